"""The trainer of one attempt: ``python -m agentfly.training.main --config run.json``.

Guarantees:
1. Exit code 0: all steps are done. 85: suspended, the checkpoint is on disk. 86: the watchdog saw no step in
   time. 87: tasks, overrides or limits of the run forbid to go on, in this attempt and in every other.
   Anything else: failed, and the last lines of the log say why.
2. It resumes from the newest complete checkpoint of the run, whichever attempt wrote it.
3. ``metrics.jsonl`` has a line for every step before this process ends.
4. From the first step on it ends by itself when verl hangs; the start is limited by whoever starts it. It
   never goes on without the thread that watches it.

Runs in the trainer environment, in a guard or as the main process of a pod: ending by the watchdog does not
wait for verl's other processes.
"""

import argparse
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentfly.api.reasons import Reason
from agentfly.errors import AgentflyError
from agentfly.roles.life import write_failure
from agentfly.roles.trainer import EXIT_INVALID, EXIT_STALLED, EXIT_SUSPENDED, TrainerConfig
from agentfly.training import checkpoints
from agentfly.training.metrics import LimitExceeded, MetricsFollower
from agentfly.training.tasks import write_tasks
from agentfly.training.verl_config import agent_loop_yaml, environment, overrides

logger = logging.getLogger("agentfly.training")

_POLL_S = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one attempt; returns the exit code."""
    parser = argparse.ArgumentParser(prog="agentfly.training.main")
    parser.add_argument("--config", type=Path, required=True, help="a TrainerConfig as JSON")
    path = parser.parse_args(arguments).config.resolve()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = TrainerConfig.model_validate_json(path.read_text())
    os.environ.update(environment(config, path, os.environ))
    follower = MetricsFollower(config)
    try:
        prepare(config)
        threading.Thread(target=_watch, args=(config, follower), name="metrics", daemon=True).start()
        run_verl(overrides(config))
        follower.poll()
    except AgentflyError as error:
        return _invalid(config, error)
    except Exception as error:
        logger.exception("verl failed")
        cause = (str(error).strip() or type(error).__name__).splitlines()[-1]  # Ray puts the cause last
        logger.error("%s; rollouts of unfinished steps: %s", cause, follower.unfinished() or "none")
        return 1
    return EXIT_SUSPENDED if config.suspended_file.exists() else 0


def prepare(config: TrainerConfig) -> None:
    """Write the files that verl reads; what an earlier attempt left is used or repaired."""
    for folder in (config.suspend_file.parent, config.tasks_file.parent, config.checkpoint_dir):
        folder.mkdir(parents=True, exist_ok=True)
    config.suspended_file.unlink(missing_ok=True)
    config.agent_loop_file.write_text(agent_loop_yaml())
    tasks = write_tasks(config)
    step = checkpoints.repair(config.checkpoint_dir)
    logger.info("%d tasks, %s", tasks, "from the start" if step is None else f"resuming after step {step}")


def run_verl(arguments: list[str]) -> None:
    """What ``verl.trainer.main_ppo`` does, without the folders that Hydra's own main would leave.

    Raises:
        AgentflyError: verl does not accept its configuration.
    """
    import ray
    from verl.trainer import main_ppo

    config = compose_config(arguments)
    try:
        main_ppo.run_ppo(config, task_runner_class=main_ppo.TaskRunnerV1)
    finally:
        ray.shutdown()  # what its processes still had to say is printed before our own last words


def compose_config(arguments: list[str]) -> Any:
    """verl's configuration.

    Raises:
        AgentflyError: Hydra or verl refuses it. Without overrides of the user both accept it.
    """
    from hydra import compose, initialize_config_module
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    try:
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("ppo_trainer", overrides=arguments)
        auto_set_device(config)
        validate_config(config, need_reference_policy(config), need_critic(config))
    except Exception as error:
        what = " ".join((str(error).strip() or type(error).__name__).split())
        raise AgentflyError(
            f"spec.overrides: verl refuses its configuration: {what[:1000]}",
            hints=["correct spec.overrides, and give the new run a name of its own: --name NAME"],
        ) from error
    return config


def _invalid(config: TrainerConfig, error: AgentflyError) -> int:
    """Say what makes every attempt fail; returns the exit code for it."""
    logger.error("%s", error.render())
    reason = error.reason if isinstance(error, LimitExceeded) else Reason.InvalidSpec
    write_failure(config.run_dir, config.attempt, reason, error.render())
    return EXIT_INVALID


def _watch(config: TrainerConfig, follower: MetricsFollower) -> None:
    """Follow the metrics; end the process when there are none for too long, or when one forbids to go on."""
    progress: float | None = None
    while True:
        time.sleep(_POLL_S)
        try:
            if follower.poll():
                progress = time.monotonic()
        except AgentflyError as error:
            os._exit(_invalid(config, error))
        except Exception:
            logger.exception("the watchdog failed, ending: nobody would see a hang any more")
            os._exit(1)
        if progress is not None and time.monotonic() - progress > config.stall_timeout_s:
            logger.error("no step for %.0f s, ending: %s", config.stall_timeout_s, follower.unfinished())
            os._exit(EXIT_STALLED)


if __name__ == "__main__":
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # verl's lines in a log file as they come, and in order
    sys.exit(main())
