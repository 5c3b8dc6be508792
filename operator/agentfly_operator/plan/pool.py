"""The status of a ResourcePool, what to tell people, and when to look again.

Guarantees:
1. Equal arguments give an equal plan, order included.
2. Counts are the broker's. Where it does not answer, members are counted as pods, and what only it knows is
   left out.
3. A number that always moves is rounded, so that a quiet pool has a quiet status.
4. ``wake_at`` lies after ``now``, and nothing but time would change the plan before.
5. Planning again over what a plan says changes nothing.
6. Who has only begun to ask a broker says nothing of pools that have a status: it would be news of the
   operator's own restart.

Not here: conditions (`plan.conditions`), events (`plan.turns`).
"""

from dataclasses import dataclass
from datetime import datetime

from agentfly.api import ResourcePoolStatus, decimal
from agentfly.api.poolstatus import (
    JOBS_MAX,
    REASON_MAX,
    ImageStatus,
    JobQueue,
    MemberCounts,
    QueueStatus,
    Rates,
    ResetStatus,
)
from agentfly_operator.plan.conditions import PATIENCE, View, conditions, deadlines, is_low
from agentfly_operator.plan.facts import PodFacts
from agentfly_operator.plan.seen import PoolReport, PoolSeen
from agentfly_operator.plan.turns import Event, turns
from agentfly_operator.plan.wanted import Wanted

_METHODS = {
    "overlay": "Overlay",
    "overlay-shared-pid": "OverlaySharedPID",
    "paths": "Paths",
    "git": "Git",
    "command": "Command",
    "scratch": "Scratch",
    "recreate": "Recreate",
    "mixed": "Mixed",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to write (None: nothing yet), whom to tell, and when time alone will change it."""

    status: ResourcePoolStatus | None
    events: tuple[Event, ...] = ()
    wake_at: datetime | None = None


def plan_pool(wanted: Wanted, seen: PoolSeen, now: datetime) -> Plan:
    """How a pool is; ``now`` in whole seconds, as the API server keeps times."""
    view, asked = View(wanted, seen, now), seen.broker.since + PATIENCE
    if seen.broker.answered is None and now < asked and seen.conditions:
        return Plan(None, wake_at=asked)
    told = conditions(view)
    report = view.report
    status = ResourcePoolStatus(
        observed_generation=wanted.generation,
        revision=wanted.revision,
        selector=wanted.selector,
        members=_from_pods(seen.pods) if report is None else _members(report),
        queue=None if report is None else _queue(report),
        images=ImageStatus(resident=len(report.images)) if report is not None and wanted.per_image else None,
        rates=None if report is None else _rates(report),
        reset=None if report is None else _reset(report),
        conditions=told,
    )
    later = [time for time in deadlines(view, told) if time > now]
    return Plan(status, turns(seen.conditions, told), min(later, default=None))


def low_since(
    wanted: Wanted, report: PoolReport | None, before: datetime | None, now: datetime
) -> datetime | None:
    """Since when members are missing; ``before`` is the last answer."""
    return (before or now) if is_low(wanted, report) else None


def _members(report: PoolReport) -> MemberCounts:
    return MemberCounts(
        total=report.total,
        ready=report.ready + report.leased,
        free=report.ready,
        leased=report.leased,
        starting=report.starting,
        resetting=report.resetting,
        quarantined=len(report.quarantined),
        outdated=report.outdated,
    )


def _from_pods(pods: PodFacts) -> MemberCounts:
    return MemberCounts(total=pods.total, ready=pods.ready, starting=pods.total - pods.ready)


def _queue(report: PoolReport) -> QueueStatus:
    leased = sum(counts.leased for counts in report.by_share.values())
    jobs = [
        JobQueue(
            job=name or "-",
            pending=counts.pending,
            leased=counts.leased,
            share=decimal(round(counts.leased / leased, 2) if leased else 0),
        )
        for name, counts in report.by_share.items()
    ]
    jobs.sort(key=lambda job: (-job.pending, -job.leased, job.job))
    oldest = _rounded(report.oldest_wait_s)
    return QueueStatus(pending=report.queued, oldest_seconds=oldest, by_job=tuple(jobs[:JOBS_MAX]))


def _rates(report: PoolReport) -> Rates:
    hits, clean, p99 = report.hit_ratio, report.clean_ratio, report.acquire_p99_s
    return Rates(
        warm_hit_percent=None if hits is None else decimal(round(100 * hits)),
        acquireP99Milliseconds=None if p99 is None else _rounded(1000 * p99),
        reset_clean_percent=None if clean is None else decimal(round(100 * clean)),
    )


def _reset(report: PoolReport) -> ResetStatus | None:
    if not report.reset_method:
        return None
    method = _METHODS.get(report.reset_method, report.reset_method[:32])
    return ResetStatus(method=method, reason=report.reset_reason[:REASON_MAX])


def _rounded(value: float) -> int:
    """Two digits are enough for what is read by people, and do not change with every look."""
    return round(float(f"{value:.2g}"))
