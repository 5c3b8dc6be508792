"""The process that keeps the pool: a real data plane, at an address that workers read from a file.

It is killed and started again by the supervisor; what it leaves then, the next one sweeps.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from agentfly.api import ResourcePool
from agentfly.local.plane import data_plane

POOL = "soak"
TTL_S = 3  # the shortest that a pool may have: members of killed workers come back soon


def pool(members: int) -> ResourcePool:
    """A pool of small sandboxes, all of which are kept."""
    return ResourcePool.model_validate(
        {
            "metadata": {"name": POOL},
            "spec": {
                "type": "Container",
                "container": {"memory": "64Mi", "pids": 32, "cpu": "0.5"},
                "capacity": {"min": members, "max": members},
                "queue": {"maxPending": 4096},
                "lease": {"ttlSeconds": TTL_S},
                "reuse": {"maxReuses": 200},
            },
        }
    )


async def keep(root: Path, members: int) -> None:
    """Serve until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with data_plane(
        [pool(members)], logs_in=root, inference_python=Path(sys.executable), start_timeout_s=60
    ) as plane:
        fresh = root / f"address.{os.getpid()}"
        fresh.write_text(plane.broker)
        fresh.rename(root / "address")
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(keep(Path(sys.argv[1]), int(sys.argv[2])))
