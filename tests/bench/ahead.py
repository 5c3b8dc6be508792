"""The same steps of training, each waiting for its own rollouts, and with rollouts ahead of the updates.

Rollouts are those of `loops`, on its trace and its clock, which moves only while everybody waits. An update
is a wait too: what is compared is who waits for whom. A step's rollouts are begun as the trainer begins them
(`training.verl_trainer`): those of step n + ahead at the beginning of step n, which ends with its update.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from tests.bench.loops import WIDTH, Played, Players, Timed, Trace, make_trace, play
from tests.bench.report import Ratio, Section, Table
from tests.bench.scripted import load
from tests.bench.stats import exactly

TITLE = "Synchronous and asynchronous training"
STEPS, STEP = 16, 64
AHEAD = (0, 1, 2)
UPDATES = (0.25, 0.5, 1.0)
"""Seconds of an update, as shares of those that the rollouts of a step take alone."""
LIMITS = (
    "Updates cost servers and sandboxes nothing here: on one machine that has them all they would take the "
    "processor from each other. An answer that an update interrupts costs nothing either; a real server "
    "reads its prompt again. What older rollouts teach less is not seen: that is what maxStaleness bounds."
)


@dataclass(frozen=True)
class Trained:
    """A whole run on the clock of `virtual`."""

    played: Played
    tokens: int

    @property
    def tokens_rate(self) -> float:
        """Sampled tokens that were trained on, per second."""
        return self.tokens / self.played.seconds


def train(trace: Trace, steps: int, ahead: int, update_s: float, width: int = WIDTH) -> Trained:
    """Play and update ``steps`` times; the last update counts, too."""
    sink: list[Timed] = []

    async def run(players: Players) -> None:
        sink.append(players.sink)
        size = len(trace.order) // steps
        begun: dict[int, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            slots = asyncio.Semaphore(width)
            for step in range(-ahead, steps):
                if step + ahead < steps:
                    begun[step + ahead] = group.create_task(players.some((step + ahead) * size, size, slots))
                if step >= 0:
                    await begun.pop(step)
                    await asyncio.sleep(update_s)

    played = play(trace, width, run)
    return Trained(played, sum(each.sampled_tokens for each in sink[0].trajectories))


def measure(steps: int = STEPS, step: int = STEP, width: int = WIDTH) -> Section:
    """Every number of steps ahead with every update."""
    trace = make_trace(load(), "long", steps * step)
    alone = train(trace, steps, 0, 0.0, width).played.seconds / steps
    found = {
        (share, ahead): train(trace, steps, ahead, share * alone, width)
        for share in UPDATES
        for ahead in AHEAD
    }
    ratios = [
        Ratio(
            f"trained tokens per second, {_ahead(ahead)}, {_update(share)}",
            "synchronous",
            exactly(found[share, ahead].tokens_rate / found[share, 0].tokens_rate),
        )
        for share in UPDATES
        for ahead in AHEAD
        if ahead
    ]
    return Section("Asynchronous", _text(steps, step, width, alone), ratios, [_table(found)])


def _ahead(ahead: int) -> str:
    return f"maxStaleness {ahead}" if ahead else "synchronous"


def _update(share: float) -> str:
    return f"an update of {share:g} of the rollouts' time"


def _table(found: Mapping[tuple[float, int], Trained]) -> Table:
    rows = [
        [
            f"{_ahead(ahead)}, {_update(share)}",
            f"{each.played.rate:.2f}",
            f"{each.tokens_rate:.0f}",
            f"{each.played.seconds:.0f}",
        ]
        for (share, ahead), each in found.items()
    ]
    return Table(
        "Asynchronous",
        "Of whole runs, with their first step's rollouts and their last step's update.",
        ["", "trajectories /s", "trained tokens /s", "seconds"],
        rows,
    )


def _text(steps: int, step: int, width: int, alone: float) -> str:
    return (
        f"{steps} steps of {step} rollouts on {width} sandboxes, with the long-tailed latencies of *Rollout "
        f"loops*; the rollouts of a step alone take {alone:.1f} s. Each step trains on its own rollouts, "
        "which are begun with it, or as many steps before as maxStaleness says. Time is counted on a clock "
        "that moves only while everybody waits, so a ratio has neither noise nor range."
    )
