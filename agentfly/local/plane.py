"""The data plane of one machine: pools of sandboxes and model servers, leased through a broker.

Guarantees:
1. Leaving the block stops every member and the broker, and removes what they had on disk, however it is left.
2. What an earlier data plane left when it was killed is swept before a new one starts.
3. A pool that cannot work on this machine is refused here, with the reason, before anything runs.
4. While it runs, ``agentfly pools`` finds its broker (see ``look``).
"""

import asyncio
import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agentfly.api import PoolUse, ResourcePool
from agentfly.broker.pools import pool_spec
from agentfly.broker.server import BrokerServer
from agentfly.local.paths import BROKER, image_cache, run_dir
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.lease import PoolStatus
from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner, sweep
from agentfly.resources.runners.container.cli import ContainerCLIRunner, remove_left
from agentfly.resources.runners.container.enroot import EnrootRunner
from agentfly.resources.runners.external.api import ExternalAPIRunner
from agentfly.resources.runners.instance.runner import InProcessRunner
from agentfly.resources.runners.model_service import ModelServiceRunner
from agentfly.resources.runners.sandboxd.owner_dir import LOCK, delete
from agentfly.sandbox.binary import find_sandboxd

FRESH_S = 60.0  # somebody may have made a folder and not locked it yet
OWNED = "p"  # begins the names of folders that were locked before they had them


@dataclass(frozen=True)
class DataPlane:
    """A running one: the engine, and the address of its broker."""

    engine: ResourceEngine
    broker: str

    def use(self, pools: Sequence[ResourcePool]) -> dict[str, PoolUse]:
        """The counts of these pools, as the status of a run shows them."""
        seen = self.engine.pool_status()
        return {pool.metadata.name: pool_use(seen[pool.metadata.name]) for pool in pools}


@asynccontextmanager
async def data_plane(
    pools: Sequence[ResourcePool], *, logs_in: Path, inference_python: Path, start_timeout_s: float
) -> AsyncIterator[DataPlane]:
    """Start a data plane with these pools.

    Args:
        logs_in: the folder whose ``logs`` gets the logs of model servers.
        inference_python: interpreter of the inference environment.
        start_timeout_s: for one model server.

    Raises:
        AgentflyError: a pool's runner does not work on this machine.
    """
    await asyncio.to_thread(sweep_dead, run_dir())
    async with AsyncExitStack() as stack:
        scratch = stack.enter_context(owned_folder(run_dir()))
        sandboxes = BubblewrapRunner(scratch, find_sandboxd(), images=image_cache())
        stack.push_async_callback(sandboxes.close)
        containers = ContainerCLIRunner(stack.enter_context(owned_folder(run_dir())), find_sandboxd())
        stack.push_async_callback(containers.close)
        enroot = EnrootRunner(stack.enter_context(owned_folder(run_dir())), find_sandboxd())
        stack.push_async_callback(enroot.close)
        keys = frozenset(_keys(pools))
        models = ModelServiceRunner(inference_python, logs_in, start_timeout_s=start_timeout_s, hidden=keys)
        instances = InProcessRunner(scratch / "i", hidden=keys)
        stack.callback(instances.close)
        engine = await stack.enter_async_context(
            ResourceEngine(
                [sandboxes, containers, enroot, models, instances, ExternalAPIRunner()],
                [pool_spec(pool) for pool in pools],
            )
        )
        broker = await stack.enter_async_context(BrokerServer(engine, scratch / BROKER))
        yield DataPlane(engine, broker.address)


def _keys(pools: Sequence[ResourcePool]) -> Iterator[str]:
    """Variables with keys of external APIs, which only their gateways are to see."""
    for pool in pools:
        if pool.spec.external_api is not None:
            yield from (key.env for key in pool.spec.external_api.credentials if key.env is not None)


@contextlib.contextmanager
def owned_folder(parent: Path) -> Iterator[Path]:
    """A new folder that `sweep_dead` leaves alone while this process lives; the block is to empty it."""
    name = secrets.token_hex(4)  # short: the path of a socket has 107 bytes
    folder, fresh = parent / f"{OWNED}{name}", parent / name
    fresh.mkdir(mode=0o700)
    lock = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fresh.rename(folder)  # nobody ever sees it under this name without its lock
        yield folder
    finally:
        with contextlib.suppress(OSError):  # gone with its sandboxes, or what they left is for the next sweep
            folder.rmdir()
        os.close(lock)


def sweep_dead(parent: Path) -> None:
    """Remove what killed data planes left: sandboxes first, then folders in which there never was one."""
    sweep(parent, remove_left)
    for folder in parent.iterdir():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if not (folder / LOCK).exists() and _abandoned(folder):
                delete([str(folder)])


def _abandoned(folder: Path) -> bool:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return folder.name.startswith(OWNED) or time.time() - os.fstat(lock).st_mtime > FRESH_S
    except BlockingIOError:
        return False
    finally:
        os.close(lock)


def pool_use(status: PoolStatus) -> PoolUse:
    """The counts of a pool as the status of a run shows them."""
    return PoolUse(
        ready=status.ready + status.leased, leased=status.leased, queued=status.queued, max=status.max
    )
