"""The rollout worker: plays the tasks of a RolloutJob and writes their trajectories.

    python -m agentfly.worker --config rollout.json

Guarantees:
1. Each finished rollout is a line of ``trajectories/rollouts.jsonl``; a worker that is started again goes on
   with those that are not there, and those that failed (see ``agentfly.rollout.many``).
2. ``report.json`` counts the rollouts of this job's tasks and no others. It is replaced as a whole, twice a
   second at most, and at the end however the rollouts end. So is ``outcomes.txt``, which tells people the
   same of what has no reward, with the first message of each reason.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentfly.broker.client import BrokerClient
from agentfly.context import Deadlines
from agentfly.errors import AgentflyError
from agentfly.models import ChatModel, Sampling, TokenModel, VLLMModel
from agentfly.models.sticky import StickyModels
from agentfly.refs import load
from agentfly.resources.lease import Resources
from agentfly.roles.servers import inference_urls
from agentfly.roles.trainer import ENV_BROKER, ENV_JOB
from agentfly.roles.worker import EXIT_BUDGET, RolloutWorkerConfig, WorkerReport, log_file, told_file
from agentfly.rollout import (
    FailureBudgetExceeded,
    RolloutReport,
    Sink,
    TrajectoryWriter,
    rollout,
)
from agentfly.rollout.media import ImageReader
from agentfly.rollout.strategies import strategy_of
from agentfly.rollout.template import Tokenizer
from agentfly.rollout.vision import PROCESSOR_FILES, reader_of
from agentfly.tasks import read_tasks

logger = logging.getLogger("agentfly.worker")

WRITE_EVERY_S = 0.5
MAX_TASKS = 1_000_000  # of a job without a limit


@dataclass(frozen=True)
class Reading:
    """How a policy reads: its tokenizer, and how it sees images; None: it reads text alone."""

    tokenizer: Tokenizer
    images: ImageReader | None = None


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
    rows, reading = rows_of(config), reading_of(config)
    reporter = Reporter(config.report_file)
    async with BrokerClient(os.environ[ENV_BROKER], share=os.environ.get(ENV_JOB, "")) as resources:
        with TrajectoryWriter(config.trajectories_file) as file:
            try:
                await play(config, rows, reading, inference_urls(), resources, file, progress=reporter.show)
            finally:
                reporter.write()


async def play(
    config: RolloutWorkerConfig,
    rows: Sequence[Mapping[str, Any]],
    reading: Reading,
    urls: Sequence[str],
    resources: Resources,
    sink: Sink,
    *,
    first: int = 0,
    progress: Callable[[RolloutReport], None] = lambda _: None,
) -> None:
    """Play rows of a job that have no outcome in the sink yet.

    Args:
        rows: all of the job's, or a part of them.
        reading: see `reading_of`.
        urls: of the policy's servers.
        first: place of the first row among all of the job's.

    Raises:
        AgentflyError: see ``rollout``.
    """
    models = [VLLMModel(url) for url in urls]
    try:
        await play_by(
            StickyModels(models), config, rows, reading, resources, sink, first=first, progress=progress
        )
    finally:
        for model in models:
            await model.close()


async def play_by(
    model: TokenModel | ChatModel,
    config: RolloutWorkerConfig,
    rows: Sequence[Mapping[str, Any]],
    reading: Reading | None,
    resources: Resources,
    sink: Sink,
    *,
    first: int = 0,
    progress: Callable[[RolloutReport], None] = lambda _: None,
) -> None:
    """Play rows by any model; see `play`."""
    shape, limits = config.rollout, config.rollout.timeouts
    await rollout(
        load(config.agent_entrypoint, config.base_dir),
        rows,
        model=model,
        tokenizer=reading.tokenizer if reading is not None else None,
        images=reading.images if reading is not None else None,
        resources=resources,
        strategy=strategy_of(shape, config.base_dir),
        sink=sink,
        deadlines=Deadlines(
            call=limits.call_seconds, turn=limits.turn_seconds, rollout=limits.rollout_seconds
        ),
        sampling=Sampling(temperature=shape.temperature, seed=config.seed),
        group_size=shape.group_size,
        concurrency=shape.concurrency,
        max_infra_retries=shape.max_infra_retries,
        failure_budget=config.failure_budget,
        max_drift_fraction=shape.max_drift_fraction,
        progress=progress,
        first=first,
    )


def reading_of(config: RolloutWorkerConfig) -> Reading:
    """The model's. Whoever calls this holds no lease yet: for as long as it takes, nothing else goes on."""
    from transformers import AutoTokenizer

    path = config.model_path
    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(path)
    if not any((path / name).exists() for name in PROCESSOR_FILES):
        return Reading(tokenizer)
    from transformers import AutoProcessor

    return Reading(tokenizer, reader_of(lambda: AutoProcessor.from_pretrained(path)))


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
        if self._report is None:
            return
        told = "".join(f"{line}\n" for line in self._report.told(log_file(self._path.parent)))
        for path, text in (
            (self._path, worker_report(self._report).model_dump_json()),
            (told_file(self._path.parent), told),
        ):
            partial = path.with_suffix(".partial")
            partial.write_text(text)
            partial.replace(path)
        self._written = time.monotonic()


def worker_report(found: RolloutReport) -> WorkerReport:
    """The report as whoever runs the worker reads it."""
    reward = found.reward
    return WorkerReport(
        total=found.total,
        scored=found.scored,
        masked=sum(found.masked.values()),
        failed=found.failed,
        reward_mean=reward.mean if reward else None,
        reward_min=reward.min if reward else None,
        reward_max=reward.max if reward else None,
        drift_fraction=found.drift_fraction if found.tokens else None,
        drift_tokens=found.tokens,
        forks=found.forks,
        sampled_tokens=found.sampled_tokens,
    )


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
