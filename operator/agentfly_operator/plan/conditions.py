"""What a pool is, said in conditions: one table of rules for each, the first that holds decides.

Guarantees:
1. Every condition is there in every status. `Stalled` and `Reconciling` are never both true.
2. `Ready` becomes true when `capacity.min` members serve, and then stays true as long as one does: members
   that come and go are the life of a pool, and no news for those who wait for it.
3. A message says what, how many, and what to do; it holds no time that moves and nothing that is secret.
4. The time of a condition changes only with its status.

How generic tools (kstatus, Argo CD, Flux) read it: `Reconciling` is in progress, `Stalled` is failed, else
`Ready` decides: true is current, anything else in progress.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Literal

from agentfly.api import Condition
from agentfly.api.reasons import ConditionType as Type
from agentfly.api.reasons import Reason
from agentfly_operator.plan.facts import Trouble
from agentfly_operator.plan.seen import PoolReport, PoolSeen
from agentfly_operator.plan.wanted import Wanted

PATIENCE = timedelta(seconds=5)  # a broker that is silent for less is not worth a word: one question was lost
UNKNOWN_FOR = timedelta(seconds=60)  # a broker that restarts, or starts, is back within that time
STALLED_AFTER = timedelta(minutes=10)  # what has not mended itself by then has not in practice
DEGRADED_AFTER = timedelta(seconds=60)  # more than the start of a member
CLEAN_RATIO = 0.5  # below it, most resets end in a new member

Status = Literal["True", "False", "Unknown"]


@dataclass(frozen=True)
class View:
    """A pool as the rules look at it."""

    wanted: Wanted
    seen: PoolSeen
    now: datetime

    @cached_property
    def silent(self) -> bool:
        """Whether its broker does not answer, or never did."""
        broker = self.seen.broker
        return (bool(broker.error) and self.now - broker.since >= PATIENCE) or broker.answered is None

    @cached_property
    def report(self) -> PoolReport | None:
        """What the broker says of it."""
        return None if self.silent else self.seen.broker.pools.get(self.wanted.name)

    @cached_property
    def problem(self) -> str:
        """Why no member can be made of its spec."""
        told = self.report.problems if self.report is not None else ()
        return self.wanted.problem or "; ".join(told)

    @cached_property
    def hopeless(self) -> str:
        """Why no member comes although none serves; "" if one does, or may."""
        report, pods = self.report, self.seen.pods
        if report is None or report.usable:
            return ""
        troubles = (pods.missing, pods.images, pods.unschedulable, pods.crashing)
        told = [_of_pods(trouble) for trouble in troubles if trouble is not None]
        if report.fails:
            told.append(f"starts fail: {report.fails}")
        return "; ".join(told)

    def was(self, kind: Type) -> Condition | None:
        """The condition before."""
        return next((each for each in self.seen.conditions if each.type == kind), None)

    def lasted(self, kind: Type) -> timedelta:
        """How long a condition has been true; zero if it was not."""
        was = self.was(kind)
        true = was is not None and was.status == "True"
        return self.now - was.last_transition_time if was is not None and true else timedelta()


Answer = tuple[Status, Reason, str]
Rule = Callable[[View], Answer | None]


def conditions(view: View) -> tuple[Condition, ...]:
    """All conditions of a pool."""
    ready, circuit = _first(READY, view), _circuit(view)
    assert ready is not None  # its last rule always holds
    stalled = _first(STALLED, view) or _stuck(view, circuit)
    answers = {
        Type.Ready: ready,
        Type.Reconciling: _reconciling(view, ready, stalled),
        Type.Stalled: stalled,
        Type.CapacityExhausted: _exhausted(view),
        Type.QueueSaturated: _saturated(view),
        Type.Unschedulable: _of_trouble(view.seen.pods.unschedulable),
        Type.ImagePullFailing: _unpulled(view),
        Type.ResetFailing: _resets(view),
        Type.CircuitOpen: circuit,
        Type.Degraded: _degraded(view),
    }
    return tuple(_condition(view, kind, answer) for kind, answer in answers.items())


def deadlines(view: View, told: Sequence[Condition]) -> list[datetime]:
    """When conditions will change though nothing else does."""
    by_type = {condition.type: condition for condition in told}
    found: list[datetime] = []
    broker = view.seen.broker
    if broker.error or broker.answered is None:
        found += [broker.since + after for after in (PATIENCE, UNKNOWN_FOR, STALLED_AFTER)]
    if by_type[Type.CircuitOpen].status == "True":
        found.append(by_type[Type.CircuitOpen].last_transition_time + STALLED_AFTER)
    if view.seen.low_since is not None:
        found.append(view.seen.low_since + DEGRADED_AFTER)
    return found


def is_low(wanted: Wanted, report: PoolReport | None) -> bool:
    """Whether members are missing that the pool should have and has room for."""
    if report is None:
        return False
    missing = report.usable < wanted.min or report.ready < wanted.buffer
    return missing and report.total - report.starting < wanted.max


# Ready -------------------------------------------------------------------------------------------------


def _invalid(view: View) -> Answer | None:
    return ("False", Reason.InvalidSpec, view.problem) if view.problem else None


def _silent(view: View) -> Answer | None:
    if not view.silent:
        return None
    broker = view.seen.broker
    status: Status = "Unknown" if view.now - broker.since < UNKNOWN_FOR else "False"
    if broker.answered is None:
        text = f"the broker has not answered since {_clock(broker.since)}, when it was looked for first"
    else:
        text = f"the broker does not answer since {_clock(broker.since)}"
    why = f" ({broker.error})" if broker.error else ""
    held = "; leases that are held go on" if broker.answered is not None else ""
    return (
        status,
        Reason.BrokerUnavailable,
        f"{text}{why}{held}. See: kubectl logs deployment/agentfly-broker",
    )


def _unknown_to_broker(view: View) -> Answer | None:
    if view.report is not None:
        return None
    return "False", Reason.WarmingUp, "the broker has not taken up this pool yet"


def _hopeless(view: View) -> Answer | None:
    return ("False", Reason.NoCapacity, f"no member serves: {view.hopeless}") if view.hopeless else None


def _serves(view: View) -> Answer | None:
    report, wanted = _reported(view), view.wanted
    was = view.was(Type.Ready)
    if report.usable >= wanted.min or (report.usable and was is not None and was.status == "True"):
        if not report.usable:
            return "True", Reason.MinAvailable, "no member is kept idle; one is started for an acquire"
        of = f" of {wanted.min} that are kept" if report.usable < wanted.min else ""
        text = f"{_members(report.usable)}{of}: {report.ready} free, {report.leased} leased"
        return (
            "True",
            Reason.MinAvailable,
            text + (f", {report.resetting} resetting" if report.resetting else ""),
        )
    return None


def _warming(view: View) -> Answer | None:
    report = _reported(view)
    text = f"{report.usable} of {_members(view.wanted.min)} serve, {report.starting} starting"
    return "False", Reason.WarmingUp, text


READY: tuple[Rule, ...] = (_invalid, _silent, _unknown_to_broker, _hopeless, _serves, _warming)

# Stalled and Reconciling -------------------------------------------------------------------------------


def _invalid_for_good(view: View) -> Answer | None:
    return ("True", Reason.InvalidSpec, view.problem) if view.problem else None


def _missing(view: View) -> Answer | None:
    trouble = view.seen.pods.missing
    if trouble is None or (view.report is not None and view.report.usable):
        return None
    return "True", Reason.MissingObject, f"{_of_pods(trouble)}. Create it, or correct its name in spec"


def _silent_for_good(view: View) -> Answer | None:
    if not view.silent or view.now - view.seen.broker.since < STALLED_AFTER:
        return None
    _, reason, text = _silent(view) or ("", Reason.BrokerUnavailable, "")
    return "True", reason, text


STALLED: tuple[Rule, ...] = (_invalid_for_good, _missing, _silent_for_good)


def _stuck(view: View, circuit: Answer) -> Answer:
    usable = view.report is not None and view.report.usable
    if circuit[0] == "True" and not usable and view.lasted(Type.CircuitOpen) >= STALLED_AFTER:
        return "True", Reason.CircuitOpen, circuit[2]
    return _no_trouble()


def _reconciling(view: View, ready: Answer, stalled: Answer) -> Answer:
    if stalled[0] == "True":
        return "False", stalled[1], ""
    if not view.silent and not view.seen.fresh:
        return "True", Reason.Provisioning, f"the broker takes up generation {view.wanted.generation}"
    if ready[0] != "True":
        return "True", ready[1], ready[2]
    report = _reported(view)
    if report.outdated:
        text = f"{_members(report.outdated)} of an older spec: replaced when nobody holds them"
        return "True", Reason.RollingOut, text
    was = view.was(Type.Reconciling)
    grows = was is None or was.status == "True" or was.observed_generation != view.wanted.generation
    if report.usable < view.wanted.min and grows:
        return "True", Reason.WarmingUp, _words(_warming(view))
    return "False", Reason.AllReady, ""


# Trouble -----------------------------------------------------------------------------------------------


def _exhausted(view: View) -> Answer:
    report, wanted = view.report, view.wanted
    if report is None or not report.queued or report.ready:
        return _no_trouble()
    if report.total >= wanted.max > 0:
        quota = wanted.max < wanted.max_written
        others = report.total - report.leased
        busy = f" and {others} not free" if others else ""
        what = f"{report.leased} of {wanted.max} members are leased{busy}, {report.queued} acquires wait"
        field = "capacity.quota" if quota else f"capacity.max ({wanted.max})"
        reason = Reason.QuotaReached if quota else Reason.MaxReached
        return "True", reason, f"{what}. Raise {field}, or lower the concurrency"
    if "exceeded quota" in report.fails:  # the API server has no other word for it
        return "True", Reason.QuotaReached, f"{report.queued} acquires wait: {report.fails}"
    return _no_trouble()


def _saturated(view: View) -> Answer:
    report, most = view.report, view.wanted.max_pending
    if report is None or not report.saturated:
        return _no_trouble()
    text = f"{report.queued} acquires wait, more are refused. Raise queue.maxPending ({most}) or capacity.max"
    return "True", Reason.MaxPendingReached, text


def _of_trouble(trouble: Trouble | None) -> Answer:
    return _no_trouble() if trouble is None else ("True", trouble.reason, _of_pods(trouble))


def _unpulled(view: View) -> Answer:
    if view.seen.pods.images is not None:
        return _of_trouble(view.seen.pods.images)
    if view.report is None or not view.report.unpulled:
        return _no_trouble()
    return "True", Reason.ImagePullFailed, f"starts fail: {'; '.join(sorted(view.report.unpulled.values()))}"


def _resets(view: View) -> Answer:
    report = view.report
    if report is None or report.clean_ratio is None or report.clean_ratio >= CLEAN_RATIO:
        return _no_trouble()
    share = f"{100 * (1 - report.clean_ratio):.0f} % of the last resets were not clean"
    found = min(report.quarantined.values(), default="")
    cause = f": {found}" if found else "; keep one for a look with reuse.quarantine: 1"
    return "True", Reason.Dirty, f"{share}, their members were replaced{cause}"


def _circuit(view: View) -> Answer:
    report = view.report
    if report is None or report.breaker == "closed":
        return _no_trouble()
    reason = Reason.ImagePullFailed if _unpulled(view)[0] == "True" else Reason.StartFailed
    return (
        "True",
        reason,
        f"starts of members failed and wait for their back-off: {report.fails or 'no cause told'}",
    )


def _degraded(view: View) -> Answer:
    low, report = view.seen.low_since, view.report
    if report is None or low is None or view.now - low < DEGRADED_AFTER:
        return _no_trouble()
    if report.usable < view.wanted.min:
        text = f"{report.usable} of {_members(view.wanted.min)} that are kept serve since {_clock(low)}"
        return "True", Reason.BelowMin, text
    text = f"fewer than {view.wanted.buffer} members (capacity.buffer) are free since {_clock(low)}"
    return "True", Reason.BelowBuffer, text


# Words -------------------------------------------------------------------------------------------------


def _first(rules: Sequence[Rule], view: View) -> Answer | None:
    return next((answer for rule in rules if (answer := rule(view)) is not None), None)


def _no_trouble() -> Answer:
    return "False", Reason.AsExpected, ""


def _reported(view: View) -> PoolReport:
    assert view.report is not None  # the rules before have decided where there is none
    return view.report


def _of_pods(trouble: Trouble) -> str:
    images = f" image {', '.join(trouble.images)}:" if trouble.images else ""
    wait = "1 member waits" if trouble.count == 1 else f"{trouble.count} members wait"
    return f"{wait}:{images} {trouble.message or trouble.reason}"


def _members(count: int) -> str:
    return f"{count} member" if count == 1 else f"{count} members"


def _clock(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def _words(answer: Answer | None) -> str:
    return answer[2] if answer is not None else ""


def _condition(view: View, kind: Type, answer: Answer) -> Condition:
    status, reason, message = answer
    was = view.was(kind)
    kept = was is not None and was.status == status
    return Condition(
        type=kind.value,
        status=status,
        observed_generation=view.wanted.generation,
        last_transition_time=was.last_transition_time if was is not None and kept else view.now,
        reason=reason.value,
        message=message,
    )
