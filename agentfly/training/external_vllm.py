"""verl's rollout backend for vLLM servers that somebody else started; runs in the trainer environment.

Guarantees:
1. verl starts no server and no process for one: rollouts talk to the servers directly (``agent_loop``).
2. After ``update_weights`` every server answers with the new weights, under the version
   ``str(global_steps)``; if one does not, the step fails with that server's name.
   An answer that was being written comes back as far as it was, and no token of it is by weights of another
   version than it says.
3. Every request to a server has a deadline.
4. Weight files are readable by any user, complete before a server hears of them, and gone afterwards.

The servers need ``VLLM_SERVER_DEV_MODE=1`` and see the run's ``weights`` folder under the same path. A path
that vLLM cannot read kills its engine, not just the request.
"""

import asyncio
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from safetensors.torch import save_file
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from agentfly.roles.servers import inference_urls
from agentfly.roles.trainer import current_config

logger = logging.getLogger(__name__)

NAME = "agentfly_vllm"
_SHARD_BYTES = 1 << 30
_RELOAD_TIMEOUT_S = 300.0
_CONTROL_TIMEOUT_S = 30.0


def register() -> None:
    """Make the backend known to verl."""
    rollout_base._ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.Adapter"
    RolloutReplicaRegistry.register(NAME, lambda: Replica)


class Replica(RolloutReplica):  # type: ignore[misc]
    """A replica without server actors: what verl would tell them concerns memory that is not shared here."""

    async def launch_servers(self) -> None:
        """See ``RolloutReplica``."""
        self._server_address = f"{NAME}-{self.replica_rank}"


class Adapter(BaseRollout):  # type: ignore[misc]
    """Lives in every training rank; rank 0 writes the weights and tells the servers."""

    async def resume(self, tags: list[str]) -> None:
        """Nothing to do: the servers keep their own memory."""

    async def release(self) -> None:
        """Nothing to do: the servers keep their own memory."""

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        """Give all servers the weights, an iterable of (name, tensor) that every rank must exhaust."""
        started = time.monotonic()
        leader = int(os.environ.get("RANK", "0")) == 0
        folder = current_config().weights_dir / f"step-{global_steps}"
        try:
            written = await _write_shards(ensure_async_iterator(weights), folder if leader else None)
            if leader:
                await publish(inference_urls(), folder, str(global_steps))
                seconds = time.monotonic() - started
                logger.warning("weights %s: %.1f MB in %.2f s", global_steps, written / 1e6, seconds)
        finally:
            if leader:
                shutil.rmtree(folder, ignore_errors=True)


async def _write_shards(weights: AsyncIterator[tuple[str, Any]], folder: Path | None) -> int:
    """Write the tensors as files of about 1 GB; with ``folder`` None only exhaust them. Returns bytes."""
    shard: dict[str, Any] = {}
    size = total = number = 0
    async for name, tensor in weights:
        if folder is None:
            continue
        # A copy: views of one storage are refused by safetensors, and the optimizer goes on with the
        # original.
        shard[name] = tensor.detach().cpu().contiguous().clone()
        size += shard[name].nbytes
        if size >= _SHARD_BYTES:
            _save(shard, folder / f"model-{number:05d}.safetensors")
            total, size, number, shard = total + size, 0, number + 1, {}
    if folder is not None and shard:
        _save(shard, folder / f"model-{number:05d}.safetensors")
    return total + size


def _save(shard: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(shard, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes files that only their owner can read


async def publish(urls: list[str], folder: Path, version: str) -> None:
    """Let every server load the weights in ``folder`` and call them ``version``.

    Raises:
        RuntimeError: a server refused or could not be reached.
    """
    async with aiohttp.ClientSession() as session:
        told = [_publish_to(session, url, folder, version) for url in urls]
        # Not a task group: its exception groups would bury the one line that matters in Ray's traceback.
        for failure in await asyncio.gather(*told, return_exceptions=True):
            if isinstance(failure, BaseException):
                raise failure


async def _publish_to(session: aiohttp.ClientSession, url: str, folder: Path, version: str) -> None:
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    # Paused, a server keeps what it is asked; one that an attempt left so is resumed by the next.
    await _post(session, f"{url}/pause?mode=abort&clear_cache=true", {}, _CONTROL_TIMEOUT_S)
    await _post(session, f"{url}/collective_rpc", reload, _RELOAD_TIMEOUT_S)
    await _post(session, f"{url}/update_weight_version", {"new_version": version}, _CONTROL_TIMEOUT_S)
    await _post(session, f"{url}/resume", {}, _CONTROL_TIMEOUT_S)


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any], timeout: float) -> None:
    try:
        async with asyncio.timeout(timeout), session.post(url, json=body) as response:
            text = await response.text()
    except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
        raise RuntimeError(f"weights: {url}: {error or type(error).__name__}") from error
    if response.status != 200:
        raise RuntimeError(f"weights: {url}: HTTP {response.status}: {text[:500]}")
