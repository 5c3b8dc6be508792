"""Conditions of a pool: for each rule and reason a sentence, what was seen, and all that is said then."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.api.reasons import Reason
from agentfly_operator.plan.conditions import (
    DEGRADED_AFTER,
    PATIENCE,
    STALLED_AFTER,
    UNKNOWN_FOR,
    View,
    conditions,
    is_low,
)
from agentfly_operator.plan.facts import PodFacts, Trouble
from agentfly_operator.plan.pool import plan_pool
from agentfly_operator.plan.seen import BrokerSeen, PoolSeen
from agentfly_operator.plan.wanted import Wanted, read_pool
from tests.unit.operator.make import NOW, SETTLED, ago, answers, pool, report, seen, silent, wanted

QUIET = {
    "Ready": "True MinAvailable",
    "Reconciling": "False AllReady",
    "Stalled": "False AsExpected",
    "CapacityExhausted": "False AsExpected",
    "QueueSaturated": "False AsExpected",
    "Unschedulable": "False AsExpected",
    "ImagePullFailing": "False AsExpected",
    "ResetFailing": "False AsExpected",
    "CircuitOpen": "False AsExpected",
    "Degraded": "False AsExpected",
}
NO_CPU = Trouble(2, Reason.InsufficientCpu, "0/3 nodes are available: 3 Insufficient cpu.")
NO_IMAGE = Trouble(1, Reason.ImagePullFailed, "not found", ("nope:1",))
NO_SECRET = Trouble(1, Reason.MissingObject, 'secret "hub" not found')
CRASH = Trouble(3, Reason.StartFailed, "Error, exit code 1")
BROKEN = read_pool(pool(capacity={"max": 8}, container={"image": ""}))
QUOTA = read_pool(pool(capacity={"max": 8, "quota": {"cpu": 2}}, container={"image": "a", "cpu": 1}))

CASES: dict[str, tuple[Wanted, PoolSeen, dict[str, str]]] = {
    "as many as are kept serve":
        (wanted(min=2), seen(answers(ready=1, leased=1)), {}),
    "a member on its way from one holder to the next serves":
        (wanted(min=1), seen(answers(resetting=1)), {}),
    "a pool that keeps no member is ready without one":
        (wanted(), seen(answers()), {}),
    "before the first of those that are kept it is not":
        (wanted(min=2), seen(answers(starting=2)),
         {"Ready": "False WarmingUp", "Reconciling": "True WarmingUp"}),
    "nor before all of them":
        (wanted(min=2), seen(answers(ready=1, starting=1)),
         {"Ready": "False WarmingUp", "Reconciling": "True WarmingUp"}),
    "one that was ready stays so while one serves, and does not seem to reconcile":
        (wanted(min=2), seen(answers(ready=1, starting=1), before=SETTLED), {}),
    "and is no more when none does":
        (wanted(min=2), seen(answers(starting=2), before=SETTLED),
         {"Ready": "False WarmingUp", "Reconciling": "True WarmingUp"}),
    "a raised min reconciles until it is reached, while the pool stays ready":
        (wanted(min=4, generation=2), seen(answers(ready=2, starting=2), before=SETTLED),
         {"Reconciling": "True WarmingUp"}),
    "and goes on to reconcile in later looks":
        (wanted(min=4), seen(answers(ready=2, starting=2),
                             before={**SETTLED, "Reconciling": ("True", "WarmingUp", 10)}),
         {"Reconciling": "True WarmingUp"}),
    "a change of spec that the broker cannot know yet":
        (wanted(generation=2), seen(answers(ready=1), before=SETTLED, fresh=False),
         {"Reconciling": "True Provisioning"}),
    "members of an older spec":
        (wanted(), seen(answers(ready=2, leased=2, outdated=2), before=SETTLED),
         {"Reconciling": "True RollingOut"}),
    "a broker that does not know the pool yet":
        (wanted(), seen(BrokerSeen(since=ago(9), answered=ago(1))),
         {"Ready": "False WarmingUp", "Reconciling": "True WarmingUp"}),
    "a broker that was never heard of":
        (wanted(), seen(silent(3, ever=False)),
         {"Ready": "Unknown BrokerUnavailable", "Reconciling": "True BrokerUnavailable"}),
    "a broker that missed one question":
        (wanted(min=1), seen(silent(4.9, ready=1), before=SETTLED), {}),
    "a broker that is silent":
        (wanted(min=1), seen(silent(5, ready=1), before=SETTLED),
         {"Ready": "Unknown BrokerUnavailable", "Reconciling": "True BrokerUnavailable"}),
    "a broker that is silent for long":
        (wanted(min=1), seen(silent(60, ready=1), before=SETTLED),
         {"Ready": "False BrokerUnavailable", "Reconciling": "True BrokerUnavailable"}),
    "a broker that is silent for good":
        (wanted(min=1), seen(silent(600, ready=1), before=SETTLED),
         {"Ready": "False BrokerUnavailable", "Reconciling": "False BrokerUnavailable",
          "Stalled": "True BrokerUnavailable"}),
    "a spec that cannot be read":
        (BROKEN, seen(answers()),
         {"Ready": "False InvalidSpec", "Reconciling": "False InvalidSpec", "Stalled": "True InvalidSpec"}),
    "is said also while the broker is silent":
        (BROKEN, seen(silent(600)),
         {"Ready": "False InvalidSpec", "Reconciling": "False InvalidSpec", "Stalled": "True InvalidSpec"}),
    "a spec that the broker refuses":
        (wanted(), seen(answers(problems=("container.image: host is no image of a cluster",))),
         {"Ready": "False InvalidSpec", "Reconciling": "False InvalidSpec", "Stalled": "True InvalidSpec"}),
    "no node has room for the first member":
        (wanted(min=2), seen(answers(starting=2), pods=PodFacts(total=2, unschedulable=NO_CPU)),
         {"Ready": "False NoCapacity", "Reconciling": "True NoCapacity",
          "Unschedulable": "True InsufficientCpu"}),
    "no node has room for one more":
        (wanted(min=2), seen(answers(ready=2, starting=2), pods=PodFacts(total=4, unschedulable=NO_CPU)),
         {"Unschedulable": "True InsufficientCpu"}),
    "the image cannot be pulled":
        (wanted(min=1), seen(answers(starting=1), pods=PodFacts(total=1, images=NO_IMAGE)),
         {"Ready": "False NoCapacity", "Reconciling": "True NoCapacity",
          "ImagePullFailing": "True ImagePullFailed"}),
    "the image could not be pulled, and its pod is gone":
        (wanted(min=1), seen(answers(failing={"a:1": "ErrImagePull: image a:1: no such host"})),
         {"Ready": "False NoCapacity", "Reconciling": "True NoCapacity",
          "ImagePullFailing": "True ImagePullFailed"}),
    "for so long that starts wait":
        (wanted(min=1), seen(answers(breaker="open", failing={"a:1": "ImagePullBackOff: image a:1: no"})),
         {"Ready": "False NoCapacity", "Reconciling": "True NoCapacity",
          "ImagePullFailing": "True ImagePullFailed", "CircuitOpen": "True ImagePullFailed"}),
    "an object that spec names is not there":
        (wanted(min=1), seen(answers(starting=1), pods=PodFacts(total=1, missing=NO_SECRET)),
         {"Ready": "False NoCapacity", "Reconciling": "False MissingObject",
          "Stalled": "True MissingObject"}),
    "which does not matter to members that serve":
        (wanted(min=1), seen(answers(ready=1, starting=1), pods=PodFacts(total=2, missing=NO_SECRET)), {}),
    "members crash at their start":
        (wanted(min=1), seen(answers(starting=1), pods=PodFacts(total=1, crashing=CRASH)),
         {"Ready": "False NoCapacity", "Reconciling": "True NoCapacity"}),
    "starts failed and wait":
        (wanted(min=1), seen(answers(breaker="open", failing={"": "no space left"})),
         {"Ready": "False NoCapacity", "Reconciling": "True NoCapacity", "CircuitOpen": "True StartFailed"}),
    "one start failed":
        (wanted(min=1), seen(answers(failing={"a:1": "no space left"})),
         {"Ready": "False NoCapacity", "Reconciling": "True NoCapacity"}),
    "for long":
        (wanted(min=1), seen(answers(breaker="open", message="no"),
                             before={"CircuitOpen": ("True", "StartFailed", 600)}),
         {"Ready": "False NoCapacity", "Reconciling": "False CircuitOpen", "Stalled": "True CircuitOpen",
          "CircuitOpen": "True StartFailed"}),
    "for long, while a member serves":
        (wanted(min=1), seen(answers(ready=1, breaker="open"),
                             before={"CircuitOpen": ("True", "StartFailed", 600)}),
         {"CircuitOpen": "True StartFailed"}),
    "because of the image":
        (wanted(), seen(answers(ready=1, breaker="open"), pods=PodFacts(total=1, images=NO_IMAGE)),
         {"CircuitOpen": "True ImagePullFailed", "ImagePullFailing": "True ImagePullFailed"}),
    "all are leased and nobody waits":
        (wanted(), seen(answers(leased=8)), {}),
    "all are leased and one waits":
        (wanted(), seen(answers(leased=8, queued=1)), {"CapacityExhausted": "True MaxReached"}),
    "one waits for a start":
        (wanted(), seen(answers(leased=7, queued=1)), {}),
    "what is kept for a look takes a place":
        (wanted(), seen(answers(leased=7, queued=1, quarantined={"m": "dirty"})),
         {"CapacityExhausted": "True MaxReached"}),
    "the quota of the pool is reached":
        (QUOTA, seen(answers(leased=2, queued=1)), {"CapacityExhausted": "True QuotaReached"}),
    "the quota of the namespace is reached":
        (wanted(), seen(answers(leased=2, queued=1, breaker="open", message="pods ... exceeded quota: team")),
         {"CapacityExhausted": "True QuotaReached", "CircuitOpen": "True StartFailed"}),
    "the queue is full":
        (wanted(), seen(answers(leased=8, queued=3, saturated=True)),
         {"CapacityExhausted": "True MaxReached", "QueueSaturated": "True MaxPendingReached"}),
    "half of the resets were clean":
        (wanted(), seen(answers(ready=1, clean_ratio=0.5)), {}),
    "most resets were not":
        (wanted(), seen(answers(ready=1, clean_ratio=0.49)), {"ResetFailing": "True Dirty"}),
    "too few serve for a while":
        (wanted(min=3), seen(answers(ready=2), before=SETTLED, low=59), {}),
    "too few serve for long":
        (wanted(min=3), seen(answers(ready=2), before=SETTLED, low=60), {"Degraded": "True BelowMin"}),
    "too few are free for long":
        (wanted(buffer=2), seen(answers(ready=1, leased=3), before=SETTLED, low=60),
         {"Degraded": "True BelowBuffer"}),
}  # fmt: skip


def said(what: Wanted, of: PoolSeen) -> dict[str, str]:
    return {each.type: f"{each.status} {each.reason}" for each in conditions(View(what, of, NOW))}


@pytest.mark.parametrize(("what", "of", "want"), CASES.values(), ids=CASES.keys())
def test_conditions_of_a_pool(what: Wanted, of: PoolSeen, want: dict[str, str]) -> None:
    assert said(what, of) == {**QUIET, **want}


def test_every_reason_of_a_pool_has_a_case() -> None:
    reasons = {text.split()[1] for _, _, want in CASES.values() for text in want.values()}
    documented = {
        each.value
        for each in (
            *(Reason.WarmingUp, Reason.RollingOut, Reason.NoCapacity, Reason.BrokerUnavailable),
            *(Reason.MissingObject, Reason.MaxReached, Reason.QuotaReached, Reason.MaxPendingReached),
            *(Reason.ImagePullFailed, Reason.Dirty, Reason.CircuitOpen, Reason.BelowMin, Reason.BelowBuffer),
            *(Reason.InvalidSpec, Reason.StartFailed, Reason.Provisioning),
        )
    }
    assert documented <= reasons


# 3. messages -------------------------------------------------------------------------------------------

MESSAGES = {
    "Ready, serving": (wanted(min=2), seen(answers(ready=2, leased=3, resetting=1)), "Ready",
        "6 members: 2 free, 3 leased, 1 resetting"),
    "Ready, fewer than are kept": (wanted(min=4), seen(answers(ready=1), before=SETTLED), "Ready",
        "1 member of 4 that are kept: 1 free, 0 leased"),
    "Ready, none kept": (wanted(), seen(answers()), "Ready",
        "no member is kept idle; one is started for an acquire"),
    "WarmingUp": (wanted(min=4), seen(answers(ready=1, starting=2)), "Ready",
        "1 of 4 members serve, 2 starting"),
    "NoCapacity": (wanted(min=4),
        seen(answers(starting=2), pods=PodFacts(total=3, images=NO_IMAGE, unschedulable=NO_CPU)), "Ready",
        "no member serves: 1 member waits: image nope:1: not found; "
        "2 members wait: 0/3 nodes are available: 3 Insufficient cpu."),
    "BrokerUnavailable": (wanted(), seen(silent(90)), "Ready",
        "the broker does not answer since 2026-11-30T11:58:30Z (connection refused); "
        "leases that are held go on. See: kubectl logs deployment/agentfly-broker"),
    "BrokerUnavailable from the first": (wanted(),
        seen(silent(90, ever=False, error="its name is not known yet")), "Ready",
        "the broker has not answered since 2026-11-30T11:58:30Z, when it was looked for first "
        "(its name is not known yet). See: kubectl logs deployment/agentfly-broker"),
    "MaxReached": (wanted(), seen(answers(leased=8, queued=41)), "CapacityExhausted",
        "8 of 8 members are leased, 41 acquires wait. Raise capacity.max (8), or lower the concurrency"),
    "MaxReached, while some are reset": (wanted(), seen(answers(leased=3, resetting=5, queued=2)),
        "CapacityExhausted", "3 of 8 members are leased and 5 not free, 2 acquires wait. "
        "Raise capacity.max (8), or lower the concurrency"),
    "MaxPendingReached": (wanted(max_pending=3), seen(answers(queued=3, saturated=True)), "QueueSaturated",
        "3 acquires wait, more are refused. Raise queue.maxPending (3) or capacity.max"),
    "Dirty": (wanted(), seen(answers(clean_ratio=0.25, quarantined={"m-1": "a process was left"})),
        "ResetFailing",
        "75 % of the last resets were not clean, their members were replaced: a process was left"),
    "Dirty, and nothing to look at": (wanted(), seen(answers(clean_ratio=0.25)), "ResetFailing",
        "75 % of the last resets were not clean, their members were replaced; "
        "keep one for a look with reuse.quarantine: 1"),
    "MissingObject": (wanted(), seen(answers(starting=1), pods=PodFacts(total=1, missing=NO_SECRET)),
        "Stalled",
        '1 member waits: secret "hub" not found. Create it, or correct its name in spec'),
    "StartFailed": (wanted(), seen(answers(breaker="open", message="no space left")), "CircuitOpen",
        "starts of members failed and wait for their back-off: no space left"),
    "RollingOut": (wanted(), seen(answers(ready=1, leased=1, outdated=1)), "Reconciling",
        "1 member of an older spec: replaced when nobody holds them"),
    "BelowMin": (wanted(min=3), seen(answers(ready=2), before=SETTLED, low=60), "Degraded",
        "2 of 3 members that are kept serve since 2026-11-30T11:59:00Z"),
}  # fmt: skip


@pytest.mark.parametrize(("what", "of", "kind", "text"), MESSAGES.values(), ids=MESSAGES.keys())
def test_a_message_says_what_and_how_many_and_what_to_do(
    what: Wanted, of: PoolSeen, kind: str, text: str
) -> None:
    told = {each.type: each.message for each in conditions(View(what, of, NOW))}
    assert told[kind] == text


def test_messages_hold_no_time_that_moves() -> None:
    first = conditions(View(wanted(), seen(silent(90)), NOW))
    later = conditions(View(wanted(), seen(silent(90)), NOW + timedelta(seconds=30)))
    assert [each.message for each in first] == [each.message for each in later]


# 4. times ----------------------------------------------------------------------------------------------


def test_the_time_of_a_condition_changes_only_with_its_status() -> None:
    before = {"Ready": ("True", "MinAvailable", 50.0), "Reconciling": ("True", "WarmingUp", 40.0)}
    told = {
        each.type: each for each in conditions(View(wanted(), seen(answers(ready=1), before=before), NOW))
    }
    assert told["Ready"].last_transition_time == ago(50)
    assert told["Reconciling"].last_transition_time == NOW


# Properties --------------------------------------------------------------------------------------------

small = st.integers(0, 9)
troubles = st.sampled_from([None, NO_CPU, NO_IMAGE, NO_SECRET, CRASH])
times = st.sampled_from([0.0, 1.0, 4.0, 5.0, 59.0, 60.0, 61.0, 599.0, 600.0, 601.0])
befores = st.dictionaries(
    st.sampled_from(sorted(QUIET)),
    st.tuples(
        st.sampled_from(["True", "False", "Unknown"]), st.sampled_from(["WarmingUp", "RollingOut"]), times
    ),
)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Wanted, PoolSeen]:
    counts: dict[str, Any] = {
        name: draw(small)
        for name in ("ready", "leased", "starting", "resetting", "stopping", "queued", "outdated")
    }
    counts |= {
        "breaker": draw(st.sampled_from(["open", "closed"])),
        "failing": draw(st.sampled_from([{}, {"": "no"}])),
        "clean_ratio": draw(st.sampled_from([None, 0.0, 0.5, 1.0])),
    }
    broker = draw(
        st.one_of(
            st.just(answers(**counts)),
            st.builds(lambda s, ever: silent(s, ever=ever, **counts), times, st.booleans()),
            st.just(BrokerSeen(since=ago(3), answered=ago(1))),
        )
    )
    pods = PodFacts(draw(small), 0, 0, draw(troubles), draw(troubles), draw(troubles), draw(troubles))
    low = draw(st.sampled_from([None, 0.0, 59.0, 60.0]))
    what = draw(
        st.one_of(
            st.just(BROKEN),
            st.builds(
                lambda least, spare: wanted(min=least, buffer=spare), st.integers(0, 8), st.integers(0, 8)
            ),
        )
    )
    return what, seen(broker, pods=pods, before=draw(befores), fresh=draw(st.booleans()), low=low)


@given(worlds())
def test_stalled_and_reconciling_are_never_both_true(world: tuple[Wanted, PoolSeen]) -> None:
    told = said(*world)
    assert list(told) == list(QUIET)
    assert not (told["Stalled"].startswith("True") and told["Reconciling"].startswith("True"))
    # kstatus: what is neither ready nor failed is in progress, and what is ready and quiet is current.
    if not told["Stalled"].startswith("True"):
        assert told["Ready"].startswith("True") or told["Reconciling"].startswith("True")
    else:
        assert not told["Ready"].startswith("True")


@given(worlds())
def test_planning_over_its_own_plan_changes_nothing(world: tuple[Wanted, PoolSeen]) -> None:
    what, of = world
    assert plan_pool(what, of, NOW) == plan_pool(what, of, NOW)
    settled = settle(what, of)
    told = plan_pool(what, settled, NOW)
    assert told.events == ()
    assert told.status is None or told.status.conditions == settled.conditions


@given(worlds())
def test_wake_at_lies_ahead_and_nothing_changes_before(world: tuple[Wanted, PoolSeen]) -> None:
    what, of = world
    settled = settle(what, of)
    plan = plan_pool(what, settled, NOW)
    until = plan.wake_at or NOW + timedelta(days=1)
    assert until > NOW
    assert plan_pool(what, settled, until - timedelta(seconds=1)).status == plan.status


def settle(what: Wanted, of: PoolSeen) -> PoolSeen:
    """The same with the conditions that it has once they were written twice."""
    for _ in range(2):
        status = plan_pool(what, of, NOW).status
        told = of.conditions if status is None else status.conditions
        of = PoolSeen(of.broker, of.pods, told, of.fresh, of.low_since)
    return of


@pytest.mark.parametrize(
    ("of", "after"),
    [
        (seen(silent(1, ready=1), before=SETTLED), PATIENCE - timedelta(seconds=1)),
        (seen(silent(10, ready=1), before=SETTLED), UNKNOWN_FOR - timedelta(seconds=10)),
        (seen(silent(100, ready=1), before=SETTLED), STALLED_AFTER - timedelta(seconds=100)),
        (seen(silent(700, ready=1), before=SETTLED), None),
        (seen(answers(ready=1), before=SETTLED, low=20), DEGRADED_AFTER - timedelta(seconds=20)),
        (seen(answers(breaker="open"), before={"CircuitOpen": ("True", "StartFailed", 9)}),
         STALLED_AFTER - timedelta(seconds=9)),
        (seen(answers(ready=1), before=SETTLED), None),
    ],
)  # fmt: skip
def test_it_asks_to_be_woken_when_time_alone_changes_something(of: PoolSeen, after: timedelta | None) -> None:
    assert plan_pool(wanted(), of, NOW).wake_at == (None if after is None else NOW + after)


def test_members_are_missing_only_where_there_is_room_for_them() -> None:
    assert not is_low(wanted(min=2), None)
    assert is_low(wanted(min=2), report(ready=1))
    assert is_low(wanted(buffer=2), report(ready=1, leased=5, starting=2))
    assert not is_low(wanted(buffer=2), report(ready=1, leased=7))
    assert not is_low(wanted(buffer=1), report(ready=1))
