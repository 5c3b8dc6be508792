"""Many rollouts: groups of them for each task, so many at a time, resumable.

Guarantees:
1. At most ``concurrency`` rollouts run at once; each goes to the sink when it is finished, in any order.
2. A rollout's id depends on its task's place in the whole job and its content alone: after a restart the
   finished ones are counted and skipped, a row that was changed is played anew, and parts of a job that are
   played apart have the ids, and so the seeds, that the whole would give them.
3. Finished are scored and masked rollouts, and those that lost their sandbox. Another failed one is played
   again in the next life of the job, so a job that its budget ended goes on; of several lines of one rollout
   the newest counts.
4. One failing rollout never touches another; when more than ``failure_budget`` of all rollouts failed, the
   job ends with the reasons counted and told, and what still ran is released. More than
   ``max_drift_fraction`` of its tokens drifted: it ends in the same way.
5. Every row is checked before the first rollout starts.
6. The report counts the rollouts of this job's rows and no others, each once.

Why failed rollouts may be played again: what fails for the infrastructure says nothing about the policy, and
what fails in the job's own code was mended by whoever started the job again. Within a life nothing is drawn
again, so nothing is selected by its result. ``SandboxLost`` may be the policy's doing (see ``one``): another
draw would pay a policy for destroying its sandbox, so it stays, and counts.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from agentfly.agent import Agent, TaskInvalid
from agentfly.context import Deadlines
from agentfly.errors import AgentflyError
from agentfly.models import ChatModel, Sampling, TokenModel
from agentfly.resources.lease import Resources
from agentfly.rollout.errors import DriftExceeded, FailureBudgetExceeded
from agentfly.rollout.media import ImageReader
from agentfly.rollout.one import SANDBOX_LOST, rollout_one
from agentfly.rollout.outcomes import Failed
from agentfly.rollout.play import Strategy
from agentfly.rollout.report import RolloutReport
from agentfly.rollout.template import Tokenizer
from agentfly.rollout.trajectory import Trajectory

# The share of a few tokens is chance: before so many were measured, a job is judged at its end alone.
DRIFT_TOKENS = 10_000

# (row, group id, rollout id)
_Plan = tuple[Mapping[str, Any], str, str]


class Sink(Protocol):
    """Where finished rollouts go; ``TrajectoryWriter`` is one, ``TrajectoryList`` another."""

    def finished(self) -> Iterable[Trajectory]:
        """What earlier runs left."""
        ...

    def write(self, trajectory: Trajectory) -> None:
        """Take one finished rollout."""
        ...


class TrajectoryList(list[Trajectory]):
    """Keeps finished rollouts in memory: for a notebook."""

    def finished(self) -> Iterable[Trajectory]:
        """What is there already."""
        return list(self)

    def write(self, trajectory: Trajectory) -> None:
        """Append one."""
        self.append(trajectory)


async def rollout(
    agent: Agent,
    tasks: Iterable[Mapping[str, Any]],
    *,
    model: TokenModel | ChatModel,
    tokenizer: Tokenizer | None = None,
    images: ImageReader | None = None,
    resources: Resources | None = None,
    strategy: Strategy | None = None,
    sink: Sink,
    deadlines: Deadlines | None = None,
    sampling: Sampling | None = None,
    group_size: int = 1,
    concurrency: int = 64,
    max_infra_retries: int = 1,
    failure_budget: float = 0.1,
    max_drift_fraction: float | None = None,
    progress: Callable[[RolloutReport], None] = lambda _: None,
    name: str = "rollout",
    first: int = 0,
) -> RolloutReport:
    """Play ``group_size`` rollouts of every task.

    Args:
        tasks: rows, as JSON has them.
        sink: takes each finished rollout; what it has finished already is not played again.
        failure_budget: the fraction of all rollouts that may fail.
        max_drift_fraction: the fraction of measured tokens that may drift; None: any.
        progress: is shown the report at the start and after each rollout, always the same object.
        name: prefix of the rollout ids; the same for every run of one job.
        first: place of the first row among all tasks of the job, of which these may be a part.

    See ``rollout_one`` for the other arguments.

    Raises:
        TaskInvalid: a row lacks what the agent needs, before anything started.
        FailureBudgetExceeded: too many rollouts failed.
        DriftExceeded: too many tokens drifted.
    """
    if isinstance(sink, type) or not callable(getattr(sink, "finished", None)):
        name = sink.__name__ if isinstance(sink, type) else repr(sink)
        hints = ["pass sink=TrajectoryList(), or TrajectoryWriter(PATH) for a file"]
        raise AgentflyError(f"sink: {name} takes no trajectories", hints=hints)
    _check_positive(group_size=group_size, concurrency=concurrency)
    began = time.monotonic()
    plans = plan_rollouts(agent, tasks, group_size=group_size, name=name, first=first)
    report = RolloutReport(total=len(plans))
    earlier = _count_finished(report, sink, plans)

    def check() -> None:
        progress(report)
        _check_budget(report, failure_budget)
        _check_drift(report, max_drift_fraction)

    check()
    # One iterator for all workers: each takes the next plan when it is free.
    waiting = iter([plan for plan in plans if plan[2] not in earlier])

    async def work() -> None:
        for row, group_id, rollout_id in waiting:
            trajectory = await rollout_one(
                agent,
                row,
                model=model,
                tokenizer=tokenizer,
                images=images,
                resources=resources,
                strategy=strategy,
                deadlines=deadlines,
                sampling=sampling,
                rollout_id=rollout_id,
                group_id=group_id,
                max_infra_retries=max_infra_retries,
            )
            sink.write(trajectory)
            report.add(trajectory)
            check()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(plans))):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        # The first one ended the job; the group around it is asyncio's own.
        raise errors.exceptions[0] from None
    report.seconds = time.monotonic() - began
    return report


def plan_rollouts(
    agent: Agent,
    tasks: Iterable[Mapping[str, Any]],
    *,
    group_size: int,
    name: str = "rollout",
    first: int = 0,
) -> list[_Plan]:
    """Check every row and give each rollout its ids: ``<name>-<row>-<hash of the row>-<place in group>``."""
    plans: list[_Plan] = []
    for number, row in enumerate(tasks, start=first):
        agent.check(row, f"row {number}")
        try:
            canonical = json.dumps(row, sort_keys=True)
            json.dumps(row, ensure_ascii=False).encode()  # half of a surrogate pair cannot be written down
        except (TypeError, ValueError) as error:
            raise TaskInvalid(
                f"tasks: row {number} is not JSON ({error})",
                hints=["use text, numbers, lists and dicts in rows"],
            ) from error
        group_id = f"{name}-{number}-{hashlib.sha256(canonical.encode()).hexdigest()[:8]}"
        plans.extend((row, group_id, f"{group_id}-{place}") for place in range(group_size))
    if not plans:
        raise TaskInvalid("tasks: there is none", hints=["check the tasks' entrypoint, path and limit"])
    return plans


def _count_finished(report: RolloutReport, sink: Sink, plans: Sequence[_Plan]) -> set[str]:
    """Count what earlier runs finished of these plans; returns the ids."""
    missing = {rollout_id for _, _, rollout_id in plans}
    found: set[str] = set()
    for trajectory in sink.finished():
        # The line of a finished rollout is its newest: nothing plays it again.
        if trajectory.rollout_id in missing and is_finished(trajectory):
            missing.remove(trajectory.rollout_id)
            found.add(trajectory.rollout_id)
            report.add(trajectory)
    report.resumed = len(found)
    return found


def is_finished(trajectory: Trajectory) -> bool:
    """Whether the next life of the job leaves the rollout as it is."""
    return not isinstance(trajectory.outcome, Failed) or trajectory.outcome.reason == SANDBOX_LOST


def _check_budget(report: RolloutReport, budget: float) -> None:
    if report.failures <= budget * report.total:
        return
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(report.failed.items()))
    raise FailureBudgetExceeded(
        f"spec.runPolicy.failureBudget: {report.failures} of {report.total} rollouts failed ({reasons}), "
        f"over the budget of {budget:g}",
        hints=[
            *(f"mend the first {reason}: {report.messages[reason]}" for reason in sorted(report.failed)),
            "or raise spec.runPolicy.failureBudget (in a script, failure_budget); "
            "what failed is played again by the same command",
        ],
    )


def _check_drift(report: RolloutReport, limit: float | None) -> None:
    fraction, judged = report.drift_fraction, report.finished == report.total or report.tokens >= DRIFT_TOKENS
    if limit is None or fraction <= limit or not judged:
        return
    raise DriftExceeded(
        f"rollout.maxDriftFraction: {fraction:.4f} of {report.tokens} tokens drifted, the limit is {limit:g}",
        hints=[
            "use a model whose chat template writes answers as they were sampled",
            "raise rollout.maxDriftFraction in a job of another name",
        ],
    )


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise AgentflyError(f"{name}: {value} is less than 1", hints=[f"set {name} to 1 or more"])
