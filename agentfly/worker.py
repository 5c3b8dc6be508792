"""The rollout worker: plays the tasks of a RolloutJob and writes their trajectories.

    python -m agentfly.worker --config rollout.json

Guarantees:
1. Each finished rollout is a line of ``trajectories/rollouts.jsonl``; a worker that is started again goes on
   with those that are not there, and those that failed (see ``agentfly.rollout.many``).
2. ``report.json`` counts the rollouts of this job's tasks and no others. It is replaced as a whole, twice a
   second at most, and at the end however the rollouts end.
3. Exit code 0: every rollout has an outcome. 3: more failed than the budget allows. 1: anything else.
4. The job's seed decides how answers are drawn: each turn of each rollout has a seed that follows from it.

Runs in the inference environment, which has the model's tokenizer.
"""

import argparse
import asyncio
import itertools
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentfly.broker.client import BrokerClient
from agentfly.context import Deadlines
from agentfly.errors import AgentflyError
from agentfly.models import Sampling, VLLMModel
from agentfly.models.sticky import StickyModels
from agentfly.refs import load
from agentfly.roles.servers import inference_urls
from agentfly.roles.trainer import ENV_BROKER, ENV_JOB
from agentfly.roles.worker import EXIT_BUDGET, RolloutWorkerConfig, WorkerReport
from agentfly.rollout import (
    Chain,
    FailureBudgetExceeded,
    RolloutReport,
    TrajectoryWriter,
    rollout,
)
from agentfly.tasks import read_tasks

logger = logging.getLogger("agentfly.worker")

WRITE_EVERY_S = 0.5
MAX_TASKS = 1_000_000  # of a job without a limit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the worker; returns the exit code."""
    parser = argparse.ArgumentParser(prog="agentfly.worker")
    parser.add_argument("--config", type=Path, required=True, help="a RolloutWorkerConfig as JSON")
    config = RolloutWorkerConfig.model_validate_json(parser.parse_args(arguments).config.read_text())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(work(config))
    except FailureBudgetExceeded as error:
        logger.error("%s", error.render())
        return EXIT_BUDGET
    except AgentflyError as error:
        logger.error("%s", error.render())
        return 1
    return 0


async def work(config: RolloutWorkerConfig) -> None:
    """Play every task that has no outcome yet."""
    from transformers import AutoTokenizer

    shape = config.rollout
    rows = rows_of(config)
    models = [VLLMModel(url) for url in inference_urls()]
    resources = BrokerClient(os.environ[ENV_BROKER], share=os.environ.get(ENV_JOB, ""))
    reporter = Reporter(config.report_file)
    with TrajectoryWriter(config.trajectories_file) as file:
        try:
            await rollout(
                load(config.agent_entrypoint, config.base_dir),
                rows,
                model=StickyModels(models),
                tokenizer=AutoTokenizer.from_pretrained(config.model_path),
                resources=resources,
                strategy=Chain(
                    shape.max_turns,
                    shape.max_tokens_per_turn,
                    shape.max_context_tokens,
                    shape.max_prompt_tokens,
                ),
                sink=file,
                deadlines=Deadlines(
                    call=shape.timeouts.call_seconds,
                    turn=shape.timeouts.turn_seconds,
                    rollout=shape.timeouts.rollout_seconds,
                ),
                sampling=Sampling(temperature=shape.temperature, seed=config.seed),
                group_size=shape.group_size,
                concurrency=shape.concurrency,
                max_infra_retries=shape.max_infra_retries,
                failure_budget=config.failure_budget,
                max_drift_fraction=shape.max_drift_fraction,
                progress=reporter.show,
            )
        finally:
            reporter.write()
            await resources.close()
            for model in models:
                await model.close()


class Reporter:
    """Keeps a report in a file as it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._report: RolloutReport | None = None
        self._written = -WRITE_EVERY_S

    def show(self, report: RolloutReport) -> None:
        """Take the report as it is now, and write it unless that was done a moment ago."""
        self._report = report
        if time.monotonic() - self._written >= WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Write the last report; nothing if the job has not got so far as to have one."""
        if (found := self._report) is None:
            return
        reward = found.reward
        text = WorkerReport(
            total=found.total,
            scored=found.scored,
            masked=sum(found.masked.values()),
            failed=found.failed,
            reward_mean=reward.mean if reward else None,
            reward_min=reward.min if reward else None,
            reward_max=reward.max if reward else None,
            drift_fraction=found.drift_fraction if found.tokens else None,
            sampled_tokens=found.sampled_tokens,
        ).model_dump_json()
        partial = self._path.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(self._path)
        self._written = time.monotonic()


def rows_of(config: RolloutWorkerConfig) -> list[dict[str, Any]]:
    """The tasks of the job."""
    tasks = read_tasks(config.tasks_entrypoint, config.tasks_path, config.base_dir, config.seed)
    rows = list(itertools.islice(tasks, config.limit or MAX_TASKS + 1))
    if config.limit is None and len(rows) > MAX_TASKS:
        raise AgentflyError(
            f"spec.tasks: more than {MAX_TASKS} without spec.limit; the source may be endless",
            hints=["set spec.limit to the number of tasks to take"],
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
