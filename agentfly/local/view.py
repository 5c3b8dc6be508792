"""What a person sees of a run or a job in the terminal: one live block, or plain lines without a terminal.

Guarantees:
1. Without a terminal a line is printed when something changed that matters: phase, message, finished step.
2. Both ways show the same: phase, progress, reward, tokens a second, and each pool's members and queue.
3. The last line of a run is for scripts as well: ``<name>: <phase> key=value ...``.
4. What has no reward is told before it, reason by reason, with the place of the trajectories.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agentfly.api import PoolUse, RolloutJob, RolloutJobStatus, TrainingRun, TrainingRunStatus
from agentfly.api.reasons import ConditionType
from agentfly.observe.curve import first_and_last
from agentfly.roles.status import SHOWN_ROLLOUTS

COLOURS = {"Succeeded": "green", "Failed": "red", "Restarting": "yellow", "Suspending": "yellow"}
Work = TrainingRun | RolloutJob
Status = TrainingRunStatus | RolloutJobStatus


@contextmanager
def view(console: Console) -> Iterator[Callable[[Work], None]]:
    """How to show work on this console, for as long as the block lasts."""
    if not console.is_terminal:
        yield Lines(console)
        return
    with Live(console=console, refresh_per_second=4) as live:
        yield lambda work: live.update(block(work))


class Lines:
    """Prints a line for each change that matters."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: tuple[object, ...] = ()

    def __call__(self, work: Work) -> None:
        """Show the work as it is now."""
        now = (work.status.phase, message(work.status), *figures(work.status)[:1])
        if now != self._last:
            self._last = now
            self._console.print(f"{datetime.now():%H:%M:%S}  {line(work)}", highlight=False, soft_wrap=True)


def line(work: Work) -> str:
    """The work in one line of text."""
    status = work.status
    parts = [f"{status.phase or 'Pending':<10}", *figures(status)]
    parts += [f"{name} {members(use)}" for name, use in sorted(status.pools.items())]
    if text := message(status):
        parts.append(text)
    return "  ".join(parts).rstrip()


def figures(status: Status) -> list[str]:
    """Progress first, then reward, speed and time left, as far as they are known."""
    if isinstance(status, RolloutJobStatus):
        counts, reward = status.tasks, status.reward
        if counts is None:
            return []
        done = counts.scored + counts.masked + counts.failed
        shown = [f"rollouts {done}/{counts.total}"]
        shown += [
            f"{name} {count}"
            for name, count in (("masked", counts.masked), ("failed", counts.failed))
            if count
        ]
        return [*shown, f"reward {float(reward.mean):.3f}"] if reward else shown
    progress = status.progress
    if progress is None:
        return []
    shown = [f"step {progress.step}/{progress.total_steps}"]
    for name, label, form in (("reward", "reward", ".3f"), ("tokens_per_s", "tokens/s", ".0f")):
        if name in progress.metrics:
            shown.append(f"{label} {float(progress.metrics[name]):{form}}")
    shown += [f"{name} {progress.metrics[name]}" for name in SHOWN_ROLLOUTS if name in progress.metrics]
    if progress.eta_seconds:
        shown.append(f"eta {progress.eta_seconds // 60}m{progress.eta_seconds % 60:02d}s")
    return shown


def members(use: PoolUse) -> str:
    """A pool's members and queue."""
    return f"{use.leased}/{use.ready} leased, {use.queued} queued"


def message(status: Status) -> str:
    """What the work waits for, or how it ended."""
    texts = {condition.type: condition.message for condition in status.conditions if condition.message}
    order = (
        ConditionType.Stalled,
        ConditionType.Reconciling,
        ConditionType.Suspended,
        ConditionType.Succeeded,
    )
    return next((texts[kind] for kind in order if kind in texts), "")


def block(work: Work) -> Table:
    """The work as a small table for a terminal."""
    status = work.status
    phase = str(status.phase or "Pending")
    table = Table.grid(padding=(0, 2))
    attempt = getattr(status, "attempt", 1)
    table.add_row(
        Text(work.metadata.name, style="bold"),
        Text(phase, style=COLOURS.get(phase, "cyan")),
        f"attempt {attempt}" if attempt > 1 else "",
    )
    for text in figures(status):
        name, value = text.split(" ", 1)
        table.add_row("", name, value)
    for name, use in sorted(status.pools.items()):
        table.add_row("", name, members(use))
    if text := message(status):
        table.add_row("", "", Text(text, style="dim"))
    return table


def training_summary(name: str, status: TrainingRunStatus, steps: Sequence[Mapping[str, Any]]) -> str:
    """The last line of a training run."""
    parts = [f"{name}: {status.phase} steps={len(steps)}"]
    if steps:
        first, last = first_and_last([float(record["reward"]) for record in steps])
        parts.append(f"reward_first5={first:.3f} reward_last5={last:.3f}")
    return " ".join(parts)


def rollout_end(told: Sequence[str], trajectories: Path, unnamed: Sequence[str]) -> str:
    """What stands before the last line of a job.

    Args:
        told: see `RolloutReport.told`.
        trajectories: the file; not named before it is there.
        unnamed: pools of the manifest that the job does not name.
    """
    lines = list(told)
    for pool in unnamed:
        if any(f"pool {pool}: " in line for line in told):
            lines.append(f"  hint: add {pool} to spec.pools")
    if trajectories.exists():
        lines.append(f"trajectories: {trajectories}")
    return "".join(f"{line}\n" for line in lines)


def rollout_summary(name: str, status: RolloutJobStatus) -> str:
    """The last line of a rollout job."""
    counts, reward = status.tasks, status.reward
    parts = [f"{name}: {status.phase}"]
    if counts is not None:
        parts.append(
            f"rollouts={counts.total} scored={counts.scored} masked={counts.masked} failed={counts.failed}"
        )
    if reward is not None:
        parts.append(f"reward={float(reward.mean):.3f}")
    return " ".join(parts)
