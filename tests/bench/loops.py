"""Three ways to play many rollouts on few sandboxes: ours, in lockstep, and with a queue for each engine.

All three play the same trace with the same code, on a clock that moves only while everybody waits (see
`virtual`): the figures are of waiting alone, and the same in every run. What the work costs is measured
beside that, in seconds of the processor.

*Ours*: a rollout begins when another one has ended. *Lockstep*: a batch of as many rollouts as there are
sandboxes goes through every turn together, and the next batch begins when all of it has ended. *A queue for
each engine*: every engine has its share of the rollouts and of the sandboxes from the start.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field

from agentfly.agent import Agent, reward, tool
from agentfly.context import Context, Deadlines
from agentfly.models import Sampling, TokenModel
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.spec import ContainerSpec, PoolSpec
from agentfly.rollout import Trajectory, rollout, rollout_one
from agentfly.rollout.many import plan_rollouts
from tests.bench import virtual
from tests.bench.barrier import TurnBarrier
from tests.bench.load import Nothing
from tests.bench.report import Ratio, Section, Table
from tests.bench.rollouts import STRATEGY, Kept, LockstepModel
from tests.bench.scripted import Latencies, RecordedTokenizer, Recording, ScriptedModel, load
from tests.bench.stats import exactly

TITLE = "Rollout loops"
SIZE, WIDTH, ENGINES = 512, 64, 8
SLOW_S = 60.0
DEADLINES = Deadlines(call=600, turn=3600, rollout=7200)
LIMITS = (
    "The latencies of a model's turns were recorded where 16 rollouts shared a server, and do not depend on "
    "how many wait here: a real server would answer the last rollouts of a batch faster, so a lockstep loop "
    "would lose somewhat less. Those of tools are draws. Sandboxes cost nothing here, nor do their resets."
)
_TOOL = (-1.6, 1.0)  # of a log-normal distribution: median 0.2 s
_TOOL_MOST_S = 10.0


@dataclass
class Trace:
    """What every rollout waits for: which recorded rollout answers, and how long each of its calls takes."""

    recording: Recording
    latencies: Latencies
    order: Sequence[str]
    tools: Sequence[Sequence[float]]
    begun: Counter[int] = field(default_factory=Counter)

    def call(self, rollout_id: str) -> float:
        """Seconds of the next call of a rollout."""
        row = int(rollout_id.rsplit("-", 3)[1])
        self.begun[row] += 1
        return self.tools[row][self.begun[row] - 1]


def make_trace(recording: Recording, latencies: Latencies, size: int, *, slow: bool = False) -> Trace:
    """The same trace for the same arguments. ``slow``: the first rollout's first call takes ``SLOW_S``."""
    rng = random.Random(size)
    keys = sorted(recording.turns)
    # The first one has calls, of which one may be slow.
    order = [
        max(keys, key=lambda key: len(recording.turns[key])),
        *(rng.choice(keys) for _ in range(size - 1)),
    ]
    tools = [[min(_TOOL_MOST_S, rng.lognormvariate(*_TOOL)) for _ in recording.turns[key]] for key in order]
    if slow:
        tools[0][0] = SLOW_S
    return Trace(recording, latencies, order, tools)


@dataclass(frozen=True)
class Played:
    """How it went. ``ends`` are seconds since the start, of each rollout; ``cpu`` is the processor's time."""

    seconds: float
    ends: dict[str, float]
    turns: int
    cpu: float

    @property
    def rate(self) -> float:
        """Rollouts per second."""
        return len(self.ends) / self.seconds

    @property
    def others(self) -> float:
        """Seconds until all rollouts but the first, which may have the slow call, had ended."""
        return max(end for row, end in self.ends.items() if row != "0")


class Timed(Kept):
    """A sink that notes when each rollout ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: dict[str, float] = {}

    def write(self, trajectory: Trajectory) -> None:
        """Take one finished rollout."""
        super().write(trajectory)
        self.ends[trajectory.rollout_id.rsplit("-", 3)[1]] = asyncio.get_running_loop().time()


class Players:
    """One trace, and an engine with as many sandboxes as may be used at once."""

    def __init__(self, trace: Trace, engine: ResourceEngine, width: int) -> None:
        self._trace, self._engine, self._width = trace, engine, width
        self._rows = [{"number": number} for number in range(len(trace.order))]
        self._model = ScriptedModel(trace.recording, trace.latencies, trace.order)
        self._tokenizer = RecordedTokenizer(trace.recording)
        self._agent = _agent(trace)
        self.sink = Timed()

    async def ours(self) -> None:
        """One queue of rollouts for all sandboxes."""
        await self._loop(0, len(self._rows), self._width)

    async def by_engine(self) -> None:
        """A queue for each engine, each with its share of the rollouts and of the sandboxes."""
        share = len(self._rows) // ENGINES
        async with asyncio.TaskGroup() as group:
            for engine in range(ENGINES):
                group.create_task(self._loop(engine * share, share, self._width // ENGINES))

    async def lockstep(self) -> None:
        """Batches that go through their turns together."""
        plans = plan_rollouts(self._agent, self._rows, group_size=1)
        for start in range(0, len(plans), self._width):
            batch = plans[start : start + self._width]
            barrier = TurnBarrier(len(batch))
            async with asyncio.TaskGroup() as group:
                for _, _, rollout_id in batch:
                    group.create_task(self._in_step(rollout_id, barrier))

    async def some(self, first: int, count: int, slots: asyncio.Semaphore) -> None:
        """These rollouts, as many at a time as there are slots, which others may take too."""

        async def one(rollout_id: str) -> None:
            async with slots:
                self.sink.write(await self._one(rollout_id, self._model))

        async with asyncio.TaskGroup() as group:
            for _, _, rollout_id in plan_rollouts(self._agent, self._rows, group_size=1)[
                first : first + count
            ]:
                group.create_task(one(rollout_id))

    async def _in_step(self, rollout_id: str, barrier: TurnBarrier) -> None:
        try:
            trajectory = await self._one(rollout_id, LockstepModel(self._model, barrier))
        finally:
            barrier.leave()
        self.sink.write(trajectory)

    async def _one(self, rollout_id: str, model: TokenModel) -> Trajectory:
        return await rollout_one(
            self._agent,
            {},
            model=model,
            tokenizer=self._tokenizer,
            resources=self._engine,
            strategy=STRATEGY,
            deadlines=DEADLINES,
            sampling=Sampling(),
            rollout_id=rollout_id,
            group_id=rollout_id,
        )

    async def _loop(self, first: int, count: int, concurrency: int) -> None:
        await rollout(
            self._agent,
            self._rows[first : first + count],
            model=self._model,
            tokenizer=self._tokenizer,
            resources=self._engine,
            strategy=STRATEGY,
            sink=self.sink,
            deadlines=DEADLINES,
            sampling=Sampling(),
            concurrency=concurrency,
            first=first,
        )


def _agent(trace: Trace) -> Agent:
    @tool
    async def shell(command: str, ctx: Context) -> str:
        """Take as long as the trace says."""
        await ctx.acquire("shell")
        await asyncio.sleep(trace.call(ctx.rollout_id))
        return "ok"

    @reward
    async def done(ctx: Context) -> float:
        return 1.0

    return Agent(prompt="go", tools=[shell], reward=done)


def play(trace: Trace, width: int, loop: Callable[[Players], Coroutine[None, None, None]]) -> Played:
    """Play a trace by one of the loops; every rollout must come to its end."""

    async def main() -> Played:
        pool = PoolSpec(name="shell", resource=ContainerSpec(), min=width, max=width, lease_ttl_s=3600)
        clock = asyncio.get_running_loop().time
        async with ResourceEngine([Nothing()], [pool]) as engine:
            while engine.pool_status()["shell"].ready < width:  # noqa: ASYNC110 -- of one that tells nobody
                await asyncio.sleep(0.01)
            players = Players(trace, engine, width)
            began, cpu = clock(), time.process_time()
            await loop(players)
            cpu, seconds = time.process_time() - cpu, clock() - began
        kept = players.sink
        if kept.completed() != len(trace.order):
            raise RuntimeError(f"rollouts: {kept.completed()} of {len(trace.order)} came to their end")
        ends = {row: end - began for row, end in kept.ends.items()}
        return Played(seconds, ends, sum(each.turns for each in kept.trajectories), cpu)

    trace.begun.clear()
    return virtual.run(main())


_NAMES: dict[Latencies, str] = {"recorded": "latencies as recorded", "long": "long-tailed latencies"}
_SLOW = f"long-tailed latencies and one call of {SLOW_S:g} s"
OURS = "ours"
_LOOPS: tuple[tuple[str, Callable[[Players], Coroutine[None, None, None]]], ...] = (
    (OURS, Players.ours),
    ("lockstep", Players.lockstep),
    ("a queue for each engine", Players.by_engine),
)


def measure(size: int = SIZE, width: int = WIDTH) -> Section:
    """All loops on all traces."""
    recording = load()
    mixes: dict[str, Trace] = {
        _NAMES["recorded"]: make_trace(recording, "recorded", size),
        _NAMES["long"]: make_trace(recording, "long", size),
        _SLOW: make_trace(recording, "long", size, slow=True),
    }
    found = {(mix, name): play(trace, width, loop) for mix, trace in mixes.items() for name, loop in _LOOPS}
    others = [name for name, _ in _LOOPS[1:]]
    ratios = [
        Ratio(f"throughput of our loop, {mix}", name, exactly(found[mix, OURS].rate / found[mix, name].rate))
        for mix in mixes
        if mix != _SLOW
        for name in others
    ]
    ratios += [
        Ratio(
            f"seconds until all other rollouts ended, {_SLOW}: {name}",
            "the same without that call",
            exactly(found[_SLOW, name].others / found[_NAMES["long"], name].others),
        )
        for name, _ in _LOOPS
    ]
    return Section("Loops", _text(size, width), ratios, [_table(found)])


def _table(found: Mapping[tuple[str, str], Played]) -> Table:
    rows = [
        [
            f"{name}, {mix}",
            f"{played.rate:.2f}",
            f"{played.others:.1f}",
            f"{1000 * played.cpu / played.turns:.2f}",
            str(played.turns),
        ]
        for (mix, name), played in found.items()
    ]
    return Table(
        "Loops",
        "Rollouts per second, and seconds until all rollouts but the first had ended, both of the clock that "
        "moves only while everybody waits; seconds of the processor for 1,000 turns, which are in neither.",
        ["", "rollouts /s", "others ended s", "CPU s / 1000 turns", "turns"],
        rows,
    )


def _text(size: int, width: int) -> str:
    return (
        f"{size} rollouts on {width} sandboxes. A model's latencies are those under *Rollout throughput*; a "
        f"call takes 0.2 s in the median (log-normal, sigma 1, at most {_TOOL_MOST_S:g} s). The engine is "
        f"real, its sandboxes cost nothing. *Lockstep*: batches of {width} that wait for one another at each "
        f"turn. *A queue for each engine*: {ENGINES} queues with {width // ENGINES} sandboxes each. Time is "
        "counted on a clock that moves only while everybody waits, so a ratio has neither noise nor range."
    )
