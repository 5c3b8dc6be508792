"""One attempt of a training run with programs that stand for Ray and for the trainer."""

import asyncio
import json
import sys
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agentfly.broker.client import BrokerClient
from agentfly.broker.server import Front, listen_tcp, make_app, serving
from agentfly.launch import state
from agentfly.launch.head import Head, Programs
from agentfly.launch.ray import Place
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.spec import ModelServiceSpec, PoolSpec
from agentfly.roles.launch import Report, TrainerLaunch
from agentfly.roles.trainer import TrainerConfig
from agentfly.training import checkpoints
from tests.unit.resources.harness import FakeRunner

DEADLINE = 30.0
POLICY = "run-policy"
SLEEP = ("sleep", "600")

# What every trainer below begins with; its only arguments are --config FILE.
TRAINER = """
import json, os, pathlib, sys, time
assert sys.argv[1] == "--config", sys.argv
config = json.loads(pathlib.Path(sys.argv[2]).read_text())
run, attempt = pathlib.Path(config["run_dir"]), config["attempt"]
def step(number):
    with (run / "metrics.jsonl").open("a") as file:
        line = {"step": number, "attempt": attempt, "time": 1000.0 + number, "step_seconds": 2, "reward": 0.5}
        file.write(json.dumps(line) + "\\n")
def wait_for(path):
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)
"""


def python(code: str) -> tuple[str, ...]:
    """A program of Python."""
    return (sys.executable, "-c", code)


def joined(missing: tuple[str, ...] = (), code: int = 0) -> tuple[str, ...]:
    """A program in the place of `agentfly.launch.joined`."""
    write = f"open(sys.argv[sys.argv.index('--missing') + 1], 'w').write({json.dumps(missing)!r})"
    return python(f"import sys; {write}; sys.exit({code})")


def config_of(folder: Path, **changes: object) -> TrainerConfig:
    """A run of five steps on a CPU."""
    values: dict[str, object] = {
        "run_dir": folder / "run",
        "attempt": 2,
        "model_path": folder / "model",
        "agent_entrypoint": "agent:agent",
        "base_dir": folder,
        "tasks_entrypoint": "tasks:tasks",
        "steps": 5,
        "tasks_per_step": 2,
        "group_size": 2,
        "max_turns": 2,
        "max_tokens_per_turn": 8,
        "max_prompt_tokens": 16,
        "max_context_tokens": 64,
        "checkpoint_dir": folder / "run" / "checkpoints",
        "ray_address": "auto",
    }
    return TrainerConfig.model_validate(values | changes)


def launch_of(config: TrainerConfig, broker: str, **changes: object) -> TrainerLaunch:
    """The launch of an attempt with a head and one other pod."""
    launch = TrainerLaunch(
        trainer=config,
        job="run",
        broker=broker,
        policy=POLICY,
        servers=2,
        servers_deadline_s=DEADLINE,
        head="localhost",
        pods=("run-trainer-2-0", "run-trainer-2-1"),
        barrier_s=DEADLINE,
    )
    return launch.model_copy(update=changes)


def checkpoint(config: TrainerConfig, step: int, ranks: int) -> Path:
    """A complete checkpoint, as verl leaves it."""
    actor = checkpoints.path_of(config.checkpoint_dir, step) / checkpoints.ACTOR
    actor.mkdir(parents=True)
    for kind in checkpoints.KINDS:
        for rank in range(ranks):
            checkpoints.rank_file(actor, kind, ranks, rank).touch()
    folder = checkpoints.path_of(config.checkpoint_dir, step)
    with zipfile.ZipFile(folder / "data.pt", "w") as file:
        file.writestr("data", "")
    (config.checkpoint_dir / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder


@dataclass
class Attempt:
    """A running attempt, and what a test does to it."""

    config: TrainerConfig
    state: state.State
    runner: FakeRunner
    broker: str
    port: int
    asked_file: Path
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[Report] | None" = None

    async def ends(self) -> Report:
        """Its last word."""
        assert self.task is not None
        async with asyncio.timeout(DEADLINE):
            return await self.task

    async def until(self, text: str) -> None:
        """Wait until its message has this text."""
        await until(lambda: text in self.state.report.message)


async def until(holds) -> None:
    """Wait until something is true."""
    async with asyncio.timeout(DEADLINE):
        while not holds():  # noqa: ASYNC110 - of files and processes, which tell nobody
            await asyncio.sleep(0.02)


@asynccontextmanager
async def broker(ttl: float = 30.0) -> AsyncIterator[tuple[FakeRunner, str]]:
    """A broker with the pool of the policy."""
    model = ModelServiceSpec(model="m", max_model_len=64)
    pool = PoolSpec(name=POLICY, resource=model, min=2, max=2, lease_ttl_s=ttl)
    ready = asyncio.Event()
    ready.set()
    runner = FakeRunner("model-service")
    async with ResourceEngine([runner], [pool]) as engine:
        listener = listen_tcp("127.0.0.1", 0)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with serving(make_app(engine, Front(lambda token: True, ready)), listener):
            yield runner, address


@asynccontextmanager
async def attempting(
    folder: Path,
    trainer: str,
    *,
    config: TrainerConfig | None = None,
    ttl: float = 30.0,
    at: str | None = None,
    ray: tuple[str, ...] = SLEEP,
    barrier: tuple[str, ...] | None = None,
    reshard: tuple[str, ...] = ("false",),
    pod: tuple[str, str] = ("run-trainer-2-0", ""),
    **launch: object,
) -> AsyncIterator[Attempt]:
    """An attempt that has been started, with a broker of its own or the one ``at`` an address.

    Args:
        pod: name and uid of the head's.
    """
    config = config or config_of(folder)
    report = state.State(Report(attempt=config.attempt))
    programs = Programs(ray, barrier or joined(), reshard, python(TRAINER + trainer))
    place = Place(pod[0], "127.0.0.1", config.gpus, 2**30, uid=pod[1])
    async with broker(ttl) as (runner, own), state.serving(report, "127.0.0.1", 0) as port:
        address = at or own
        attempt = Attempt(config, report, runner, address, port, folder / "suspend")
        head = Head(
            launch_of(config, address, **launch), place, programs, report, attempt.stop, attempt.asked_file
        )
        attempt.task = asyncio.create_task(head.run())
        try:
            yield attempt
        finally:
            attempt.task.cancel()
            await asyncio.wait({attempt.task}, timeout=DEADLINE)


def gone(pid_file: Path) -> bool:
    """Whether the process whose number is in the file has ended."""
    return not Path("/proc", pid_file.read_text().strip()).exists()


async def leases(attempt: Attempt) -> list[tuple[str, str]]:
    """Owner and key of what is leased at the broker."""
    async with BrokerClient(attempt.broker, token="any") as client:
        return sorted((lease.owner, lease.key) for lease in await client.leases())
