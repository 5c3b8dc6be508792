"""A batch of rollouts in real sandboxes, of which the first one misbehaves."""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentfly.agent import Agent, Tool, reward, tool
from agentfly.context import Context, Deadlines
from agentfly.models import Sampled, Sampling
from agentfly.resources.lease import PoolStatus, Resources
from agentfly.resources.spec import ContainerSpec, PoolSpec
from agentfly.rollout import Chain, RolloutReport, Trajectory, rollout
from agentfly.sandbox import ExecResult
from tests.unit.rollout import toys
from tests.unit.rollout.toys import ToyTokenizer, call

MEMBERS = 3
GOOD = 3  # one more rollout than members: it gets a sandbox that another one has left
POOL = PoolSpec(name="shell", resource=ContainerSpec(memory_mb=96, pids=32), min=MEMBERS, max=MEMBERS)
DEADLINES = Deadlines(call=1.5, turn=20, rollout=40)
SETTLE_S = 20.0  # a reset, or a fresh start where a sandbox is not clean, on a busy machine

# What a holder could see of the one before: processes, files, modes, programs, queues, sockets.
LOOK = """
set -- /proc/[0-9]*; echo $#
ls -A /tmp /workspace /dev/shm /root /run /dev/mqueue
stat -c '%n %a %u %g' / /tmp /workspace /dev/shm /root /run /etc /usr /usr/bin
md5sum /etc/passwd /etc/hosts; ls -lA /etc /usr /usr/bin /usr/lib | md5sum
ipcs | grep -c 0x; cat /proc/net/tcp
"""


@tool
async def shell(command: str, ctx: Context, seconds: float = 10) -> ExecResult:
    """Run a shell line."""
    box = await ctx.acquire("shell")
    return await box.sandbox.exec(command, timeout=seconds, output_limit=1000)


async def place(ctx: Context, name: str) -> None:
    box = await ctx.acquire("shell")
    await box.sandbox.write_file("/workspace/name", name.encode())


@reward
async def kept(ctx: Context, name: str) -> float:
    """1 if the sandbox still holds what the setup put there."""
    box = await ctx.acquire("shell")
    return float((await box.sandbox.exec("cat /workspace/name", timeout=5)).stdout == name)


class Actors:
    """A model that plays every rollout from its own script; the good ones act while the bad one does."""

    def __init__(self, tokenizer: ToyTokenizer, bad: Sequence[str], good: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._scripts = (bad, good)
        self._acting = asyncio.Event()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        deadline: float,
        images: Any = (),
    ) -> Sampled:
        owner, turn, _ = request_id.rsplit(".", 2)
        is_good = int(owner.split("-")[1]) > 0
        if not is_good:
            self._acting.set()
        elif turn == "2":
            with contextlib.suppress(TimeoutError):  # the bad one may need a sandbox that this one holds
                await asyncio.wait_for(self._acting.wait(), 2)
            await asyncio.sleep(0.2)  # by now the bad call is under way
        script = self._scripts[is_good]
        text = script[min(int(turn), len(script)) - 1]
        end = self._tokenizer.eos_token_id
        assert end is not None
        ids = [*self._tokenizer.encode(text, add_special_tokens=False), end]
        return Sampled(ids, [-1.0] * len(ids), "stop", None)


@dataclass
class Batch:
    """How it went: the report, and the trajectories by the name of their task."""

    report: RolloutReport
    by_name: dict[str, Trajectory]

    @property
    def bad(self) -> Trajectory:
        return self.by_name["bad"]

    @property
    def good(self) -> list[Trajectory]:
        return [trajectory for name, trajectory in self.by_name.items() if name != "bad"]


@dataclass
class _Memory:
    written: list[Trajectory] = field(default_factory=list)

    def finished(self) -> Iterable[Trajectory]:
        return []

    def write(self, trajectory: Trajectory) -> None:
        self.written.append(trajectory)


async def play(resources: Resources, act: str, tools: Sequence[Tool[..., Any]] = (), **options: Any) -> Batch:
    """One rollout makes the call ``act`` and then another one; the others work as they should."""
    tokenizer, sink = ToyTokenizer(toys.grouping), _Memory()
    bad = [act, call("shell", command="echo still here"), "done"]
    look = "cat /workspace/name; echo; ls -A /tmp /workspace"
    good = [call("shell", command="cat /workspace/name"), call("shell", command=look), "done"]
    rows: list[Mapping[str, str]] = [{"name": name} for name in ("bad", *(f"good-{n}" for n in range(GOOD)))]
    parts: dict[str, Any] = {"reward": kept, "setup": place} | options
    report = await rollout(
        Agent(tools=[shell, *tools], prompt="be {name}", **parts),
        rows,
        model=Actors(tokenizer, bad, good),
        tokenizer=tokenizer,
        resources=resources,
        strategy=Chain(max_turns=4, max_context_tokens=8192),
        sink=sink,
        deadlines=DEADLINES,
        sampling=Sampling(),
        failure_budget=0.25,
    )
    return Batch(report, {trajectory.task["name"]: trajectory for trajectory in sink.written})


def observations(trajectory: Trajectory) -> list[str]:
    """What the policy read, in order."""
    return [message["content"] for message in trajectory.messages if message["role"] == "tool"]


async def whole(resources: Resources, pool: str = POOL.name) -> PoolStatus:
    """The pool's status once every member is free again; a pool that never is fails here."""
    async with asyncio.timeout(SETTLE_S):
        while True:
            status = (await resources.status())[pool]
            if status.ready == MEMBERS:
                return status
            await asyncio.sleep(0.02)


async def looks(resources: Resources, owner: str) -> list[str]:
    """What a holder of each member sees, all held at the same time."""
    async with asyncio.TaskGroup() as group:
        leases = [group.create_task(resources.acquire(POOL.name, f"{owner}.{n}")) for n in range(MEMBERS)]
    seen = []
    for lease in leases:
        async with lease.result() as held:
            seen.append((await held.sandbox.exec(LOOK, timeout=20)).stdout)
    return seen
