"""The trainer of one attempt: ``python -m agentfly.training.main --config run.json``.

With ``--check`` it only looks whether an attempt can be made.

Guarantees:
1. Exit code 0: all steps are done. 85: suspended, the checkpoint is on disk. 86: the watchdog saw no step in
   time. 87: tasks, overrides or drift of the run forbid to go on, in this attempt and in every other.
   Anything else: failed, and the last lines of the log say why; too many failed rollouts too, because
   whatever they need may come back.
2. It resumes from the newest complete checkpoint of the run, whichever attempt wrote it.
3. ``metrics.jsonl`` has a line for every step before this process ends. Where it is killed, the next attempt
   adds what is missing of the steps that it does not make again.
4. From the first step on it ends by itself when verl hangs; the start is limited by whoever starts it. It
   never goes on without the thread that watches it, nor after a later attempt has begun.

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

from agentfly.agent import Agent
from agentfly.api.reasons import Reason
from agentfly.errors import AgentflyError
from agentfly.refs import load
from agentfly.roles.life import newer_attempt, write_failure
from agentfly.roles.trainer import EXIT_INVALID, EXIT_STALLED, EXIT_SUSPENDED, TrainerConfig
from agentfly.rollout.strategies import strategy_of
from agentfly.training import checkpoints, nodes
from agentfly.training.metrics import LimitExceeded, MetricsFollower, write_owed
from agentfly.training.tasks import write_tasks
from agentfly.training.verl_config import agent_loop_yaml, environment, overrides, shared_variables

logger = logging.getLogger("agentfly.training")

_POLL_S = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one attempt; returns the exit code."""
    parser = argparse.ArgumentParser(prog="agentfly.training.main")
    parser.add_argument("--config", type=Path, required=True, help="a TrainerConfig as JSON")
    parser.add_argument("--check", action="store_true", help="train nothing")
    options = parser.parse_args(arguments)
    path = options.config.resolve()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = TrainerConfig.model_validate_json(path.read_text())
    os.environ.update(environment(config, path, os.environ))
    if options.check:
        return _checked(config)
    follower = MetricsFollower(config)
    try:
        prepare(config)
        threading.Thread(target=_watch, args=(config, follower), name="metrics", daemon=True).start()
        run_verl(config, overrides(config, shared_variables(config, path, os.environ)))
        follower.poll()
    except AgentflyError as error:
        return _refused(config, error)
    except Exception as error:
        logger.exception("verl failed")
        cause = (str(error).strip() or type(error).__name__).splitlines()[-1]  # Ray puts the cause last
        logger.error("%s; rollouts of unfinished steps: %s", cause, follower.unfinished() or "none")
        return 1
    return EXIT_SUSPENDED if config.suspended_file.exists() else 0


def prepare(config: TrainerConfig) -> None:
    """Write the files that verl reads; what an earlier attempt left is used or repaired.

    Raises:
        AgentflyError: the agent cannot be played in this environment, its tasks cannot be read, or the model
            cannot be trained so.
    """
    _check_agent(config)
    _check_critic(config)
    for folder in (config.suspend_file.parent, config.tasks_file.parent, config.checkpoint_dir):
        folder.mkdir(parents=True, exist_ok=True)
    config.suspended_file.unlink(missing_ok=True)
    config.agent_loop_file.write_text(agent_loop_yaml())
    tasks = write_tasks(config)
    step = checkpoints.repair(config.checkpoint_dir)
    logger.info("%d tasks, %s", tasks, "from the start" if step is None else f"resuming after step {step}")
    if owed := write_owed(config, step):
        logger.info("metrics of steps %s: written now, an earlier attempt had no time to", owed)


def check(config: TrainerConfig) -> None:
    """Look at all of a run that can be wrong before it has any servers or sandboxes.

    Raises:
        AgentflyError: overrides, tasks, agent, strategy or model cannot be trained with.
    """
    compose_config(overrides(config, {}))
    write_tasks(config)
    _check_agent(config)
    strategy_of(config, config.base_dir)
    _check_critic(config)


def _check_agent(config: TrainerConfig) -> None:
    agent = load(config.agent_entrypoint, config.base_dir)
    if not isinstance(agent, Agent):
        raise AgentflyError(f"spec.agent: {config.agent_entrypoint} is no agentfly.Agent")
    agent.check_parser()


def _check_critic(config: TrainerConfig) -> None:
    if config.algorithm.name != "ppo":
        return
    from transformers import AutoConfig, AutoModelForTokenClassification

    found = AutoConfig.from_pretrained(config.model_path)
    if type(found) not in AutoModelForTokenClassification._model_mapping:
        raise AgentflyError(
            f"spec.algorithm.name: ppo needs a critic, and transformers has none for {found.model_type}",
            hints=["use an algorithm without a critic, such as grpo"],
        )


def _checked(config: TrainerConfig) -> int:
    try:
        check(config)
    except AgentflyError as error:
        return _refused(config, error)
    return 0


def run_verl(config: TrainerConfig, arguments: list[str]) -> None:
    """What ``verl.trainer.main_ppo`` does, without the folders that Hydra's own main would leave.

    Raises:
        AgentflyError: verl does not accept its configuration.
    """
    import ray
    from verl.trainer import main_ppo

    composed, runner = compose_config(arguments), main_ppo.TaskRunnerV1
    try:
        if config.ray_address:
            with nodes.watched(config.nodes):
                main_ppo.run_ppo(composed, task_runner_class=nodes.on_head(runner))
        else:
            main_ppo.run_ppo(composed, task_runner_class=runner)
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


def _refused(config: TrainerConfig, error: AgentflyError) -> int:
    """Say what ends this attempt; returns the exit code, ``EXIT_INVALID`` if it would end all others."""
    logger.error("%s", error.render())
    reason = error.reason if isinstance(error, LimitExceeded) else Reason.InvalidSpec
    write_failure(config.run_dir, config.attempt, reason, error.render())
    # Sandboxes that were away for minutes must not end a run of a week.
    return 1 if reason == Reason.FailureBudgetExceeded else EXIT_INVALID


def _watch(config: TrainerConfig, follower: MetricsFollower) -> None:
    """Follow the metrics; end the process when there are none for too long, or when one forbids to go on."""
    progress: float | None = None
    while True:
        time.sleep(_POLL_S)
        try:
            if follower.poll():
                progress = time.monotonic()
            newer = newer_attempt(config.run_dir, config.attempt)
        except AgentflyError as error:
            os._exit(_refused(config, error))
        except Exception:
            logger.exception("the watchdog failed, ending: nobody would see a hang any more")
            os._exit(1)
        if newer is not None:
            logger.error("attempt %d has begun, ending: this one is over", newer)
            os._exit(1)
        if progress is not None and time.monotonic() - progress > config.stall_timeout_s:
            logger.error("no step for %.0f s, ending: %s", config.stall_timeout_s, follower.unfinished())
            os._exit(EXIT_STALLED)


if __name__ == "__main__":
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # verl's lines in a log file as they come, and in order
    sys.exit(main())
