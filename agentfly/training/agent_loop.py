"""verl's agent loop that plays agentfly's rollouts; runs in the trainer environment.

Guarantees:
1. A rollout that fails, is masked or finds no infrastructure gives no rows and raises nothing: verl would
   drop the whole group for an exception (and, in its old trainer, the batch).
2. An answer by weights that are not the step's raises: the attempt must end. Where rollouts run ahead those
   of the ``max_staleness`` steps before are the step's too.
3. Every rollout is appended to the trajectories and the outcomes before verl sees it.
4. At most ``concurrency`` rollouts of a process run at a time.
5. The policy is asked at the servers that this process was told of; where there are none, at verl's own.
"""

import asyncio
import json
import logging
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from agentfly.agent import Agent
from agentfly.broker.client import BrokerClient
from agentfly.context import Deadlines
from agentfly.models import Sampling, VLLMModel
from agentfly.models.images import pil_images
from agentfly.models.sticky import StickyModels
from agentfly.models.verl import NAME, VerlModel
from agentfly.refs import load
from agentfly.resources.lease import Resources
from agentfly.roles.servers import inference_urls
from agentfly.roles.trainer import ENV_BROKER, ENV_JOB, TrainerConfig, current_config
from agentfly.rollout import Strategy, rollout_one
from agentfly.rollout.media import ImageReader
from agentfly.rollout.strategies import strategy_of
from agentfly.rollout.trajectory import Trajectory
from agentfly.rollout.vision import reader_of
from agentfly.training.outcomes import record
from agentfly.training.pinned import PinnedModel
from agentfly.training.rows import verl_rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Worker:
    """What all rollouts of one process share."""

    config: TrainerConfig
    agent: Agent
    strategy: Strategy
    deadlines: Deadlines
    models: tuple[VLLMModel, ...]
    resources: Resources
    slots: asyncio.Semaphore
    trajectories: TextIO
    outcomes: TextIO

    def write(self, step: int, trajectory: Trajectory) -> None:
        """Append the rollout to both files, one whole line each."""
        self.trajectories.write(trajectory.model_dump_json() + "\n")
        self.trajectories.flush()
        self.outcomes.write(json.dumps(record(step, trajectory)) + "\n")
        self.outcomes.flush()


@cache
def _worker() -> _Worker:
    """Made by the first rollout of a process; verl makes a new loop object for each rollout."""
    config = current_config()
    return _Worker(
        config=config,
        agent=load(config.agent_entrypoint, config.base_dir),
        strategy=strategy_of(config, config.base_dir),
        deadlines=Deadlines(
            call=config.call_timeout_s, turn=config.turn_timeout_s, rollout=config.rollout_timeout_s
        ),
        models=tuple(VLLMModel(url) for url in inference_urls()),
        resources=BrokerClient(os.environ[ENV_BROKER], share=os.environ.get(ENV_JOB, "")),
        slots=asyncio.Semaphore(config.concurrency),
        trajectories=_append_to(config.trajectories_dir, config.attempt),
        outcomes=_append_to(config.outcomes_dir, config.attempt),
    )


def _append_to(folder: Path, attempt: int) -> TextIO:
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"attempt-{attempt}-worker-{os.getpid()}.jsonl").open("a")


class AgentflyLoop(AgentLoopBase):  # type: ignore[misc]
    """One rollout of one task. verl passes the fields of ``TaskDataset`` and its own bookkeeping."""

    async def run(self, sampling_params: dict[str, Any], **fields: Any) -> list[AgentLoopOutput]:
        """Play the rollout; returns the rows to train on, none if there is nothing to learn from."""
        worker, step = _worker(), int(fields["global_steps"])
        group = f"s{step}-t{fields['index']}"
        rollout_id = f"{group}-r{fields['session_id']}"
        # Weights get the number of the step that made them; verl validates with those of the step itself.
        allowed = max(0, step - 1 - worker.config.ahead), step
        pinned = [PinnedModel(server, server.base_url, *allowed) for server in worker.models]
        if worker.config.servers is not None:
            pinned = [PinnedModel(VerlModel(self.server_manager), NAME, *allowed)]
        reader = _reader(self.processor)
        async with worker.slots:
            trajectory = await rollout_one(
                worker.agent,
                json.loads(fields["task"]),
                model=StickyModels(pinned),
                tokenizer=self.tokenizer,
                images=reader,
                resources=worker.resources,
                strategy=worker.strategy,
                deadlines=worker.deadlines,
                sampling=Sampling(temperature=sampling_params["temperature"], top_p=sampling_params["top_p"]),
                rollout_id=rollout_id,
                group_id=group,
                max_infra_retries=worker.config.max_infra_retries,
            )
        worker.write(step, trajectory)
        for server in pinned:
            if server.stale is not None:
                raise server.stale
        dapo = worker.config.algorithm.of_dapo
        rows = verl_rows(trajectory, step - 1, None if dapo is None else dapo.overlong)
        if reader is not None and any(self._misread(row, reader) for row in rows):
            logger.warning("rollout %s: left out, text of it reads as an image to verl", rollout_id)
            return []
        return [await _output(**row) for row in rows]

    def _misread(self, row: dict[str, Any], reader: ImageReader) -> bool:
        """Whether verl would see an image that is none: it reads rows without their special tokens."""
        text = self.tokenizer.decode(row["prompt_ids"] + row["response_ids"], skip_special_tokens=True)
        return any(spelled in text for spelled in reader.reserved)


@cache
def _reader(processor: Any) -> ImageReader | None:
    """verl's processor is None for a model that reads text alone."""
    return None if processor is None else reader_of(lambda: processor)


async def _output(images: list[str], **row: Any) -> AgentLoopOutput:
    seen = {"images": await asyncio.to_thread(pil_images, images)} if images else {}
    return AgentLoopOutput(**row, multi_modal_data=seen)
