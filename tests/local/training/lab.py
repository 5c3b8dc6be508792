"""One run's trainer as a process of this machine, with a broker of sandboxes beside it."""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentfly.broker.server import BrokerServer
from agentfly.local.environments import agentfly_path
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.runners.base import Member
from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner
from agentfly.resources.runners.guard import guarded
from agentfly.resources.runners.model_service import ModelServiceRunner
from agentfly.resources.spec import ContainerSpec, ModelServiceSpec, PoolSpec
from agentfly.roles.trainer import TrainerConfig

HERE = Path(__file__).parent
JOB_S = 480
TRAINER = ("-m", "agentfly.training.main")


@dataclass
class Lab:
    """One run's folder and what its trainer needs.

    Attributes:
        modules: imported by each of verl's processes; from ``folders`` too.
    """

    python: Path
    model: Path
    url: str
    run_dir: Path
    broker: str = ""
    modules: list[str] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    program: tuple[str, ...] = TRAINER

    def config(self, attempt: int, steps: int, **changes: Any) -> TrainerConfig:
        fields: dict[str, Any] = {
            "run_dir": self.run_dir,
            "attempt": attempt,
            "model_path": self.model,
            "agent_entrypoint": "sums.py:agent",
            "base_dir": HERE,
            "tasks_entrypoint": "sums.py:tasks",
            "steps": steps,
            "tasks_per_step": 4,
            "group_size": 4,
            "algorithm": {"learning_rate": 3e-3},
            "temperature": 0.7,
            "max_turns": 1,
            "max_tokens_per_turn": 24,
            "max_prompt_tokens": 64,
            "max_context_tokens": 256,
            "checkpoint_every_steps": 1,
            "checkpoint_keep_last": 1,
            "checkpoint_dir": self.run_dir / "checkpoints",
            "stall_timeout_s": 60,
        }
        return TrainerConfig(**{**fields, **changes})

    async def start(self, config: TrainerConfig) -> asyncio.subprocess.Process:
        path = self.run_dir / f"run-{config.attempt}.json"
        path.write_text(config.model_dump_json())
        return await self.start_program(*self.program, "--config", str(path))

    async def start_program(self, *arguments: str) -> asyncio.subprocess.Process:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": os.environ["HOME"],
            "PYTHONPATH": ":".join(str(each) for each in (agentfly_path(), HERE, *self.folders)),
            "AGENTFLY_BROKER": self.broker,
            "AGENTFLY_INFERENCE_URLS": self.url,
            "AGENTFLY_RUN_DIR": str(self.run_dir),
            "VERL_USE_EXTERNAL_MODULES": ",".join(self.modules),
            "RECORD_BATCHES": str(self.run_dir / "batches.jsonl"),
        }
        command = guarded([str(self.python), *arguments])
        with self.log.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *command,
                env=environment,
                cwd=self.run_dir,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    async def run(self, config: TrainerConfig) -> int:
        process = await self.start(config)
        return await self.wait(process)

    async def wait(self, process: asyncio.subprocess.Process) -> int:
        try:
            async with asyncio.timeout(JOB_S):
                return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    @property
    def log(self) -> Path:
        return self.run_dir / "trainer.log"

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def metrics(self) -> list[dict[str, Any]]:
        return lines(self.run_dir / "metrics.jsonl")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@asynccontextmanager
async def broker(runner: BubblewrapRunner, path: Path) -> AsyncIterator[ResourceEngine]:
    pool = PoolSpec(name="shell", resource=ContainerSpec(), min=2, max=4)
    async with ResourceEngine([runner], [pool]) as engine, BrokerServer(engine, path):
        yield engine


def make_model(python: Path, script: str, folder: Path) -> Path:
    """A small random model by a script of this folder."""
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "OMP_NUM_THREADS": "1"}
    command = [python, HERE / script, folder]
    subprocess.run(command, check=True, timeout=120, env=environment, capture_output=True)
    return folder


@asynccontextmanager
async def served(python: Path, model: Path, folder: Path) -> AsyncIterator[Member]:
    """A vLLM server of a small model."""
    runner = ModelServiceRunner(python, folder, start_timeout_s=240)
    spec = ModelServiceSpec(model=str(model), max_model_len=512, max_num_seqs=64, dtype="float32")
    member = await runner.start(spec, "policy-0")
    try:
        yield member
    finally:
        await runner.stop(member)
