"""Events at turning points."""

from agentfly.api.reasons import EventReason, Reason
from agentfly_operator.plan.facts import PodFacts, Trouble
from agentfly_operator.plan.pool import plan_pool
from agentfly_operator.plan.seen import PoolSeen
from agentfly_operator.plan.turns import Event
from agentfly_operator.plan.wanted import Wanted, read_pool
from tests.unit.operator.make import NOW, SETTLED, answers, pool, seen, silent, wanted

NO_IMAGE = PodFacts(total=1, images=Trouble(1, Reason.ImagePullFailed, "not found", ("nope:1",)))
Told = list[tuple[str, EventReason, str]]


def told(of: PoolSeen, what: Wanted | None = None) -> Told:
    plan = plan_pool(what or wanted(min=1), of, NOW)
    return [(event.kind, event.reason, event.note) for event in plan.events]


# 1, 2. turns -------------------------------------------------------------------------------------------


def test_a_pool_that_becomes_ready_is_good_news_once() -> None:
    warming = {"Ready": ("False", "WarmingUp", 9.0)}
    assert told(seen(answers(ready=1), before=warming)) == [
        ("Normal", EventReason.PoolReady, "1 member: 1 free, 0 leased")
    ]
    assert told(seen(answers(ready=1), before=SETTLED)) == []


def test_a_pool_that_is_ready_no_more_is_a_warning_with_the_reason() -> None:
    of = seen(answers(starting=1), before=SETTLED)
    assert told(of) == [("Warning", EventReason.PoolNotReady, "WarmingUp: 0 of 1 member serve, 1 starting")]


def test_a_broker_that_restarts_is_no_trouble_and_one_that_stays_away_is() -> None:
    assert told(seen(silent(10, ready=1), before=SETTLED)) == []
    unknown = {**SETTLED, "Ready": ("Unknown", "BrokerUnavailable", 50.0)}
    assert [event[:2] for event in told(seen(answers(ready=1), before=unknown))] == [
        ("Normal", EventReason.PoolReady)
    ]
    (event,) = told(seen(silent(60, ready=1), before=unknown))
    assert event[:2] == ("Warning", EventReason.BrokerUnavailable)


def test_trouble_is_a_warning_and_its_end_is_normal() -> None:
    failing = {**SETTLED, "ImagePullFailing": ("True", "ImagePullFailed", 9.0)}
    assert told(seen(answers(ready=1), pods=NO_IMAGE, before=SETTLED)) == [
        ("Warning", EventReason.ImagePullFailing, "1 member waits: image nope:1: not found")
    ]
    assert told(seen(answers(ready=1), pods=NO_IMAGE, before=failing)) == []
    assert told(seen(answers(ready=1), before=failing)) == [
        ("Normal", EventReason.Recovered, "ImagePullFailing is over")
    ]


def test_a_rollout_has_a_beginning_and_an_end() -> None:
    rolling = {**SETTLED, "Reconciling": ("True", "RollingOut", 9.0)}
    (begun,) = told(seen(answers(ready=1, leased=1, outdated=1), before=SETTLED))
    assert begun[:2] == ("Normal", EventReason.RollingOut)
    assert told(seen(answers(ready=1, leased=1, outdated=1), before=rolling)) == []
    (done,) = told(seen(answers(ready=2), before=rolling))
    assert done[:2] == ("Normal", EventReason.RolledOut)


def test_a_spec_that_cannot_be_is_told_once_by_its_own_reason() -> None:
    broken = read_pool(pool(container={"image": ""}))
    events = told(seen(answers()), broken)
    assert [event[:2] for event in events] == [("Warning", EventReason.InvalidSpec)]
    stalled = {"Ready": ("False", "InvalidSpec", 9.0), "Stalled": ("True", "InvalidSpec", 9.0)}
    assert told(seen(answers(), before=stalled), broken) == []


# 3. the first look -------------------------------------------------------------------------------------


def test_the_first_look_tells_what_is_true_and_not_what_is_false() -> None:
    assert [event[1] for event in told(seen(answers(starting=1)))] == []
    assert [event[1] for event in told(seen(answers(ready=1)))] == [EventReason.PoolReady]


# 4. about ----------------------------------------------------------------------------------------------


def test_events_about_the_same_are_known_by_it_whatever_their_figures() -> None:
    def exhausted(queued: int) -> Event:
        (event,) = plan_pool(wanted(), seen(answers(leased=8, queued=queued), before=SETTLED), NOW).events
        return event

    assert exhausted(1).about == exhausted(2).about
    assert exhausted(1).note != exhausted(2).note
    recovered = {**SETTLED, "CapacityExhausted": ("True", "MaxReached", 9.0)}
    (over,) = plan_pool(wanted(), seen(answers(leased=8), before=recovered), NOW).events
    assert over.about != exhausted(1).about
