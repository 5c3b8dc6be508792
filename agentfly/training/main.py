"""The trainer of one attempt: ``python -m agentfly.training.main --config run.json``.

Guarantees:
1. Exit code 0: all steps are done. 85: suspended, the checkpoint is on disk. 86: the watchdog saw no step in
   time. Anything else: failed, and the last lines of the log say why.
2. It resumes from the newest complete checkpoint of the run, whichever attempt wrote it.
3. ``metrics.jsonl`` has a line for every step before this process ends.
4. From the first step on it ends by itself when verl hangs; the start is limited by whoever starts it.

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

from agentfly.errors import AgentflyError
from agentfly.roles.trainer import EXIT_STALLED, EXIT_SUSPENDED, TrainerConfig
from agentfly.training import checkpoints
from agentfly.training.metrics import MetricsFollower
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
    except AgentflyError as error:
        logger.error("%s", error.render())
        return 1
    except Exception as error:
        logger.exception("verl failed")
        cause = (str(error).strip() or type(error).__name__).splitlines()[-1]  # Ray puts the cause last
        logger.error("%s; rollouts of unfinished steps: %s", cause, follower.unfinished() or "none")
        return 1
    follower.poll()
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
    """What ``verl.trainer.main_ppo`` does, without the folders that Hydra's own main would leave."""
    import ray
    from hydra import compose, initialize_config_module
    from verl.trainer import main_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=arguments)
    auto_set_device(config)
    validate_config(config, need_reference_policy(config), need_critic(config))
    try:
        main_ppo.run_ppo(config, task_runner_class=main_ppo.TaskRunnerV1)
    finally:
        ray.shutdown()  # what its processes still had to say is printed before our own last words


def _watch(config: TrainerConfig, follower: MetricsFollower) -> None:
    """Follow the metrics; end the process when there are none for too long, or when one forbids to go on."""
    progress: float | None = None
    while True:
        time.sleep(_POLL_S)
        try:
            if follower.poll():
                progress = time.monotonic()
        except AgentflyError as error:
            logger.error("%s", error.render())
            os._exit(1)
        if progress is not None and time.monotonic() - progress > config.stall_timeout_s:
            logger.error("no step for %.0f s, ending: %s", config.stall_timeout_s, follower.unfinished())
            os._exit(EXIT_STALLED)


if __name__ == "__main__":
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # verl's lines in a log file as they come, and in order
    sys.exit(main())
