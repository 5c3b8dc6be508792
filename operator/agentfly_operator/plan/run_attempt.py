"""The attempt that a run is in: its pods, what its head said last, and when it must be over.

Guarantees:
1. A run is in an attempt from the status that numbers it to the status that says it ended: the phase alone
   says so, with the role ``trainer``, which is there from when all pods of the attempt were once made until
   the attempt has ended.
2. What another attempt's head said is not heard.
3. A step that the clock of a pod puts into the future was finished now.
4. The time to the first step counts anew from when the last pod began to run: until then the cluster places
   pods and pulls images, after it the trainer starts. Either has the whole deadline.

Not here: how it ended (`plan.run_ends`), what follows (`plan.run`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from agentfly.api import TrainingRun, TrainingRunStatus
from agentfly.api.reasons import ConditionType as Type
from agentfly.api.reasons import TrainingRunPhase as Phase
from agentfly.roles.launch import STATE_PORT, Report
from agentfly.roles.life import Clock
from agentfly_operator.plan.run_engine import by_kuberay, wants_pods
from agentfly_operator.plan.run_members import REPEATS, Members, members_of
from agentfly_operator.plan.run_seen import PodOf, RunObserved
from agentfly_operator.plan.said import condition_of

TRAINER = "trainer"
SETTLE = timedelta(seconds=5)  # pods that were just made may not be seen yet
OVER = frozenset({Phase.Succeeded, Phase.Failed})


def in_attempt(status: TrainingRunStatus) -> bool:
    """Whether the newest attempt has not ended yet."""
    if status.phase is Phase.Suspending:
        return TRAINER in status.roles
    return status.attempt > 0 and status.phase in (Phase.Starting, Phase.Running)


@dataclass(frozen=True, slots=True)
class Attempt:
    """The attempt that a run is in.

    Attributes:
        began: when it was numbered, or when the last of its pods began to run.
        members: its pods, by index.
        wanted: how many there should be.
        unmade: why it has not all its pods yet, as far as somebody else makes them; "" if nobody knows.
        report: what its head said last; None if it said nothing yet.
        made: all its pods were made once, so that one which is not there is lost.
        running_since: when its first step was seen to be finished; None before it.
        asked_at: when it was asked for a checkpoint to stop after; None if it was not.
        step_time: when its newest step was finished.
        silent: its head runs and does not answer the operator.
    """

    number: int
    began: datetime
    members: Members
    wanted: int
    report: Report | None
    made: bool
    running_since: datetime | None
    asked_at: datetime | None
    step_time: datetime | None
    silent: bool = False
    unmade: str = ""

    @property
    def pods(self) -> Mapping[int, PodOf]:
        """Its pods, by index; also those that have ended."""
        return self.members.pods

    @property
    def head(self) -> PodOf | None:
        """The pod of the trainer itself."""
        return self.pods.get(0)

    @property
    def disturbed(self) -> bool:
        """Somebody else takes one of its pods away: a person, or a drained node."""
        return any(pod.deleting for pod in self.pods.values())

    @property
    def unreached(self) -> str:
        """That its head does not answer, for people; "" if it does."""
        if not self.silent or self.head is None:
            return ""
        address = f"[{self.head.ip}]" if ":" in self.head.ip else self.head.ip
        return f"pod {self.head.name}: the operator cannot reach {address}:{STATE_PORT}"

    def clock(self, ran: int, now: datetime) -> Clock:
        """When things happened; ``ran`` is what earlier attempts spent running."""
        steps = self.running_since is not None
        return Clock(
            now=now.timestamp(),
            began=self.began.timestamp(),
            first_step=_seconds(self.running_since),
            last_step=_seconds(self.step_time or self.running_since) if steps else None,
            ran=ran,
            suspend_asked=_seconds(self.asked_at),
        )

    def deadlines(self, run: TrainingRun) -> list[datetime]:
        """When `agentfly.roles.life.overdue` may say something else than now, or patience ends."""
        policy, found = run.spec.run_policy, list[datetime]()
        repeating = self.members.repeating
        if repeating is not None and repeating.created is not None:
            found.append(repeating.created + REPEATS)
        if self.asked_at is not None:
            found.append(self.asked_at + timedelta(seconds=policy.stall_timeout_seconds))
        if self.running_since is None:
            found.append(self.began + timedelta(seconds=policy.startup_deadline_seconds))
            return found
        last = self.step_time or self.running_since
        found.append(last + timedelta(seconds=policy.stall_timeout_seconds))
        if policy.active_deadline_seconds is not None:
            left = policy.active_deadline_seconds - run.status.active_seconds
            found.append(self.running_since + timedelta(seconds=left))
        return found


def attempt_of(run: TrainingRun, seen: RunObserved, now: datetime) -> Attempt:
    """The attempt that the run is in; it has to be in one."""
    status, wanted = run.status, run.spec.trainer.nodes
    begun = TRAINER in status.roles or _runs(_newest(None, seen.head, status.attempt))
    members = members_of(run.metadata.name, status, seen, wanted, begun, now)
    pods = members.pods
    report = _newest(pods.get(0), seen.head, status.attempt)
    made = begun or _runs(report) or members.complete
    step_time = status.step_time
    if report is not None and report.step_time is not None:
        told = datetime.fromtimestamp(math.floor(report.step_time), UTC)
        step_time = min(now, max(told, step_time or told))
    return Attempt(
        number=status.attempt,
        began=_began(status, [pods.get(index) for index in range(wanted)], now),
        members=members,
        wanted=wanted,
        report=report,
        made=made,
        running_since=_since(status, Type.Running),
        asked_at=_since(status, Type.Reconciling) if status.phase is Phase.Suspending else None,
        step_time=step_time,
        silent=seen.silent,
        unmade=wants_pods(seen.clusters, status.attempt) if by_kuberay(status) else "",
    )


def _began(status: TrainingRunStatus, pods: Sequence[PodOf | None], now: datetime) -> datetime:
    numbered = status.attempt_time or now
    started = [pod.started for pod in pods if pod is not None and pod.started is not None]
    return max(numbered, min(now, max(started))) if len(started) == len(pods) else numbered


def _newest(head: PodOf | None, told: Report | None, attempt: int) -> Report | None:
    if head is not None and head.report is not None:
        return head.report
    return told if told is not None and told.attempt == attempt else None


def _runs(report: Report | None) -> bool:
    return report is not None and report.phase == "Running"


def _since(status: TrainingRunStatus, kind: Type) -> datetime | None:
    """Since when a condition is true."""
    found = condition_of(status, kind)
    return found.last_transition_time if found is not None and found.status == "True" else None


def _seconds(time: datetime | None) -> float | None:
    return None if time is None else time.timestamp()
