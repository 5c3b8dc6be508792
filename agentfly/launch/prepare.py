"""What is done once before anything else of a run or job starts: the pod that prepares it.

    python3 -m agentfly.launch.prepare

Guarantees:
1. A model that is made on the spot appears as a whole or not at all, and is made once: it is the run's from
   then on, however often this is started.
2. What would be wrong again is found here, before a server starts: no model and no way to make it, settings
   that verl refuses, tasks that are none or lack what the agent needs. Exit code 87, and a report that says
   what; 1 where another try may help, 143 if it was asked to stop, 0 when all is there.
3. A rollout job's tasks are read once and kept; the report has their number.

Not here: torch. What needs the trainer's environment runs as a child in it.
"""

import asyncio
import logging
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from agentfly.api.reasons import Reason
from agentfly.errors import AgentflyError
from agentfly.launch import early
from agentfly.launch.child import SIGNALLED, running
from agentfly.launch.pod import launch_argument, read, tell
from agentfly.launch.tasks import count, freeze, tasks_file
from agentfly.refs import load
from agentfly.roles.failure import reason_in
from agentfly.roles.launch import PrepareLaunch, Report
from agentfly.roles.life import read_failure
from agentfly.roles.plan import BUILD_DEADLINE_S
from agentfly.roles.trainer import EXIT_INVALID, TrainerConfig
from agentfly.roles.worker import RolloutWorkerConfig
from agentfly.rollout.many import plan_rollouts
from agentfly.rollout.strategies import strategy_of
from agentfly.worker import rows_of

logger = logging.getLogger("agentfly.prepare")

CHECK_DEADLINE_S = 900.0  # importing verl from a cold disk takes a minute or two
ENV_POD = "POD_NAME"

Config = TypeVar("Config", TrainerConfig, RolloutWorkerConfig)


class InvalidError(AgentflyError):
    """What is wrong would be wrong again."""

    def __init__(
        self, message: str, reason: Reason = Reason.InvalidSpec, *, hints: Sequence[str] = ()
    ) -> None:
        super().__init__(message, hints=hints)
        self.reason = reason


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the run of this pod; returns the exit code."""
    path = launch_argument("agentfly.launch.prepare", arguments)
    before = signal.signal(signal.SIGTERM, _stop)  # the first process of a container would not hear it
    try:
        if early:
            _stop(early[0], None)
        report = asyncio.run(prepare(read(path, PrepareLaunch), os.environ.get(ENV_POD, str(os.getpid()))))
    except InvalidError as error:
        report = _failed(EXIT_INVALID, error.render(), error.reason)
    except AgentflyError as error:
        report = _failed(1, error.render())
    except Exception as error:
        logger.exception("not prepared")
        report = _failed(1, f"{type(error).__name__}: {error}")
    finally:
        signal.signal(signal.SIGTERM, before)
    tell(report)
    return report.exit_code or 0


async def prepare(launch: PrepareLaunch, writer: str) -> Report:
    """Do what is not done yet.

    Args:
        writer: name of this pod; no other one has it.

    Raises:
        InvalidError: it would fail again.
        AgentflyError: it failed.
    """
    await _make_model(launch, writer)
    if launch.trainer is not None:
        await _check_trainer(_absolute(launch.trainer))
    tasks = None if launch.worker is None else prepare_tasks(_absolute(launch.worker), writer)
    return Report(phase="Ended", exit_code=0, tasks=tasks)


def prepare_tasks(config: RolloutWorkerConfig, writer: str) -> int:
    """Keep the tasks of a rollout job; how many there are.

    Raises:
        InvalidError: there are none, too many, or some that the agent cannot be asked; or the strategy cannot
            be made.
    """
    path = tasks_file(config.run_dir)
    if not path.exists():
        try:
            rows = rows_of(config)
            plan_rollouts(load(config.agent_entrypoint, config.base_dir), rows, group_size=1)
            strategy_of(config.rollout, config.base_dir)
        except AgentflyError as error:
            raise InvalidError(error.message, hints=error.hints) from error
        freeze(rows, path, writer)
    return count(path)


def _absolute(config: Config) -> Config:
    """With paths that mean the same in every folder: those of an image are relative to its own."""
    path = config.tasks_path
    absolute = {"base_dir": config.base_dir.absolute(), "tasks_path": path and path.absolute()}
    return config.model_copy(update=absolute)


async def _make_model(launch: PrepareLaunch, writer: str) -> None:
    model = launch.model
    if model.exists():
        return
    if launch.script is None:
        raise InvalidError(
            f"spec.model.path: {model} is not there",
            hints=[
                "put a directory in Hugging Face layout there, on the claim of spec.storage or in the image"
            ],
        )
    partial = model.with_name(f".{model.name}.{writer}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    arguments = [str(partial) if each == str(model) else each for each in launch.arguments]
    command = [sys.executable, str(launch.script.absolute()), *arguments]
    log = model.parent / "logs" / "model.log"
    await _run("spec.model.build", command, log, cwd=launch.base_dir.absolute(), deadline_s=BUILD_DEADLINE_S)
    if not partial.is_dir():
        raise InvalidError(
            f"spec.model.build: {launch.script} ended well and made no directory",
            hints=["write the model to the directory that follows --output"],
        )
    try:
        partial.rename(model)
    except OSError:
        if not model.exists():
            raise
        shutil.rmtree(partial)  # another pod made it meanwhile


async def _check_trainer(config: TrainerConfig) -> None:
    """Have verl, in a process of its own, say whether it takes what it would be given."""
    path = config.run_dir / "control" / "prepare.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(config.model_dump_json(indent=2) + "\n")
    command = [sys.executable, "-m", "agentfly.training.main", "--config", str(path), "--check"]
    log = config.run_dir / "logs" / "prepare.log"
    code = await _run("settings", command, log, cwd=Path.cwd(), deadline_s=CHECK_DEADLINE_S, may=EXIT_INVALID)
    if code == EXIT_INVALID:
        reason, message = read_failure(config.run_dir, config.attempt) or (Reason.InvalidSpec, reason_in(log))
        raise InvalidError(message, reason)


async def _run(
    name: str, command: Sequence[str], log: Path, *, cwd: Path, deadline_s: float, may: int = 0
) -> int:
    """Run a child to its end; its exit code, which is 0 or ``may``.

    Raises:
        AgentflyError: it ended in another way, or not in time.
    """
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    async with running(command, env=env, log=log, cwd=cwd) as child:
        try:
            code = await child.wait(deadline_s)
        except TimeoutError:
            raise AgentflyError(
                f"{name}: not finished after {deadline_s:.0f} s", hints=[f"read {log}"]
            ) from None
    if code not in (0, may):
        raise AgentflyError(f"{name}: exit code {code}: {reason_in(log)}", hints=[f"read {log}"])
    return code


def _stop(number: int, frame: object) -> None:
    """Asked to end: what was begun is begun anew by the next pod, and what is there is there as a whole."""
    sys.exit(SIGNALLED + number)


def _failed(code: int, message: str, reason: Reason = Reason.AttemptFailed) -> Report:
    logger.error("%s", message)
    return Report(phase="Ended", exit_code=code, reason=reason, message=message)


if __name__ == "__main__":
    sys.exit(main())
