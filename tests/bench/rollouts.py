"""Throughput of the rollout loop against a loop that waits for its whole batch at every turn.

Both sides play the same rollouts with the same code: same agent, sandboxes, answers and latencies. The
lockstep side differs in one thing, the waiting: a batch takes as many rollouts as there are sandboxes, every
turn begins when all rollouts of the batch are ready for it, no answer is used before all are there, and the
next batch begins when the last rollout of this one has ended.
"""

import asyncio
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from agentfly.agent import Agent
from agentfly.context import Deadlines
from agentfly.models import Sampled, Sampling, TokenModel
from agentfly.refs import load
from agentfly.resources.lease import Resources
from agentfly.rollout import Chain, Scored, Trajectory, rollout, rollout_one
from agentfly.rollout.many import plan_rollouts
from tests.bench.barrier import TurnBarrier
from tests.bench.report import Ratio, Section, Table
from tests.bench.scripted import Latencies, RecordedTokenizer, Recording, ScriptedModel
from tests.bench.stats import Series, percentile, ratio

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart"
STRATEGY = Chain(max_turns=3, max_tokens_per_turn=48, max_context_tokens=320)
DEADLINES = Deadlines(call=10, turn=60, rollout=120)
SIDE_S = 60.0  # one side of one repeat; it takes seconds
NAME = "bench"


class Kept:
    """A sink that keeps trajectories in memory."""

    def __init__(self) -> None:
        self.trajectories: list[Trajectory] = []

    def finished(self) -> Iterable[Trajectory]:
        """Nothing: every run starts anew."""
        return ()

    def write(self, trajectory: Trajectory) -> None:
        """Take one finished rollout."""
        self.trajectories.append(trajectory)

    def completed(self) -> int:
        """How many were played to their end and judged."""
        return sum(isinstance(each.outcome, Scored) for each in self.trajectories)


class LockstepModel:
    """A model whose callers begin together and go on together."""

    def __init__(self, model: TokenModel, barrier: TurnBarrier) -> None:
        self._model = model
        self._barrier = barrier

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        deadline: float,
        images: Any = (),
    ) -> Sampled:
        """See ``TokenModel.generate``."""
        await self._barrier.arrive()
        sampled = await self._model.generate(prompt_ids, sampling, request_id=request_id, deadline=deadline)
        await self._barrier.arrive()
        return sampled


class Players:
    """Both loops over the same recorded rollouts, in the same order."""

    def __init__(
        self,
        recording: Recording,
        resources: Resources,
        width: int,
        latencies: Latencies,
        order: Sequence[str],
    ) -> None:
        self._script = (recording, latencies, order)
        self._rows = [recording.rows[int(key.partition("-")[0])] for key in order]
        self._resources = resources
        self._width = width
        self._agent: Agent = load("agent.py:agent", EXAMPLE)
        self._tokenizer = RecordedTokenizer(recording)

    async def free(self) -> float:
        """Completed rollouts per second of ``agentfly.rollout.rollout``."""
        sink = Kept()
        began = time.perf_counter()
        async with asyncio.timeout(SIDE_S):
            await rollout(
                self._agent,
                self._rows,
                model=ScriptedModel(*self._script),
                tokenizer=self._tokenizer,
                resources=self._resources,
                strategy=STRATEGY,
                sink=sink,
                deadlines=DEADLINES,
                sampling=Sampling(),
                concurrency=self._width,
                name=NAME,
            )
        return self._rate(sink, time.perf_counter() - began)

    async def lockstep(self) -> float:
        """Completed rollouts per second with a barrier at every turn."""
        plans = plan_rollouts(self._agent, self._rows, group_size=1, name=NAME)
        sink = Kept()
        began = time.perf_counter()
        async with asyncio.timeout(SIDE_S):
            for start in range(0, len(plans), self._width):
                await self._batch(plans[start : start + self._width], sink)
        return self._rate(sink, time.perf_counter() - began)

    def _rate(self, sink: Kept, seconds: float) -> float:
        if sink.completed() != len(self._rows):
            raise RuntimeError(f"rollouts: {sink.completed()} of {len(self._rows)} were played to their end")
        return sink.completed() / seconds

    async def _batch(self, plans: Sequence[Any], sink: Kept) -> None:
        barrier = TurnBarrier(len(plans))
        model = LockstepModel(ScriptedModel(*self._script), barrier)

        async def play(row: dict[str, Any], group_id: str, rollout_id: str) -> None:
            try:
                trajectory = await rollout_one(
                    self._agent,
                    row,
                    model=model,
                    tokenizer=self._tokenizer,
                    resources=self._resources,
                    strategy=STRATEGY,
                    deadlines=DEADLINES,
                    sampling=Sampling(),
                    rollout_id=rollout_id,
                    group_id=group_id,
                )
            finally:
                barrier.leave()
            sink.write(trajectory)

        async with asyncio.TaskGroup() as group:
            for row, group_id, rollout_id in plans:
                group.create_task(play(row, group_id, rollout_id))


async def measure(recording: Recording, resources: Resources, width: int) -> Section:
    """Both loops, alternating: one batch alone, and several in a row, on both sets of latencies."""
    ratios, rows = [], []
    everything = len(recording.turns)
    await Players(recording, resources, width, "recorded", shuffled(recording, 0)).free()  # warm-up
    cases: list[tuple[Latencies, int]] = [("recorded", 5), ("long", 3)]
    for latencies, repeats in cases:
        for count in (everything, width):
            free, lockstep = Series(), Series()
            for seed in range(repeats):
                order = shuffled(recording, seed)[:count]
                players = Players(recording, resources, width, latencies, order)
                free.add([await players.free()])
                lockstep.add([await players.lockstep()])
            what = f"{count} rollouts on {width} sandboxes, {_NAMES[latencies]}"
            measured = f"throughput of the async loop: {what}"
            ratios.append(Ratio(measured, "lockstep loop on the same", ratio(free, lockstep)))
            rows.append([what, f"{free.percentile(50):.2f}", f"{lockstep.percentile(50):.2f}", str(repeats)])
    return Section("Rollout throughput", _text(recording), ratios, [_table(rows), _latencies(recording)])


def shuffled(recording: Recording, seed: int) -> list[str]:
    """The keys of all recorded rollouts: who shares a batch with whom must not be one lucky draw."""
    keys = sorted(recording.turns)
    random.Random(seed).shuffle(keys)
    return keys


_NAMES: dict[Latencies, str] = {"recorded": "latencies as recorded", "long": "long-tailed latencies"}


def _text(recording: Recording) -> str:
    return (
        "Completed trajectories per second of `agentfly.rollout.rollout`, with real sandboxes and a model "
        "that gives recorded answers after recorded latencies, over those of a loop with a barrier over the "
        "whole batch at every turn, as frameworks have that generate for a batch at a time. Both play the "
        "same rollouts in the same order with the same code; only the waiting differs. Each repeat has an "
        "order of its own, drawn at random. With one batch the gain is from the "
        "barrier alone; with several, also from starting the next rollout as soon as one ends. The "
        f"latencies: {recording.about}"
    )


def _table(rows: Sequence[Sequence[str]]) -> Table:
    return Table(
        "Rollout throughput",
        "Completed trajectories per second; median of the repeats.",
        ["Rollouts", "async loop /s", "lockstep loop /s", "repeats"],
        rows,
    )


def _latencies(recording: Recording) -> Table:
    turns = [turn for rollout_turns in recording.turns.values() for turn in rollout_turns]
    rows = []
    for name, seconds in (
        (_NAMES["recorded"], [turn.seconds for turn in turns]),
        (_NAMES["long"], [turn.long_seconds for turn in turns]),
    ):
        cells = [f"{percentile(seconds, percent):.3f}" for percent in (50, 90, 99)]
        rows.append([name, *cells, str(len(seconds))])
    return Table(
        "Recorded model latencies",
        f"Seconds per turn, as replayed above; recorded on {recording.date}, not in this run.",
        ["", "p50 s", "p90 s", "p99 s", "turns"],
        rows,
    )
