"""The pools of a manifest, on this machine and in this process: for a notebook, a script, or a chat.

    async with local_pools("pools.yaml") as resources:
        trajectory = await rollout_one(agent, task, model=model, resources=resources)

Guarantees:
1. Leaving the block ends every member, however it is left; what an earlier process left when it was killed is
   swept before.
2. A manifest that cannot work on this machine is refused before anything starts.
"""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from agentfly.api import ResourcePool
from agentfly.local import environments
from agentfly.local.plane import data_plane
from agentfly.local.preflight import pools_of
from agentfly.resources.engine import ResourceEngine

MODEL_START_S = 600.0


@asynccontextmanager
async def local_pools(manifest: Path | str) -> AsyncIterator[ResourceEngine]:
    """The engine with the ResourcePools of a file; other objects in it are left alone.

    Raises:
        AgentflyError: the file is wrong, or a pool does not work here.
    """
    async with running(pools_of(manifest)) as engine:
        yield engine


@asynccontextmanager
async def running(pools: Sequence[ResourcePool]) -> AsyncIterator[ResourceEngine]:
    """The engine with these pools, whose paths are absolute."""
    with tempfile.TemporaryDirectory(prefix="agentfly-") as logs:
        async with data_plane(
            pools,
            logs_in=Path(logs),
            inference_python=await _python(pools),
            start_timeout_s=MODEL_START_S,
        ) as plane:
            yield plane.engine


async def _python(pools: Sequence[ResourcePool]) -> Path:
    """What runs model servers; the environment is built only where there are any."""
    if any(pool.spec.model_service is not None for pool in pools):
        return await asyncio.to_thread(environments.build, "inference")
    return Path(sys.executable)
