"""Steps that training runs and rollout jobs have in common.

Guarantees:
1. A step that is asked to stop ends at once, with all that it had started.
2. A model that is made on the spot appears as a whole or not at all.
3. An environment is built by a process of its own: a stop waits neither for its downloads nor for another
   process that builds the same one.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from agentfly.api import ModelRef, ResourcePool
from agentfly.errors import AgentflyError
from agentfly.local import environments
from agentfly.local.plane import DataPlane
from agentfly.local.processes import role_environment, run_to_end
from agentfly.resources.images.holds import UNPACK_S
from agentfly.resources.images.reference import HOST
from agentfly.resources.lease import Lease
from agentfly.roles.plan import BUILD_DEADLINE_S, Places, model_path, model_role

PROOF_S = 60.0  # a sandbox starts in milliseconds, on a machine that may be busy
ENVIRONMENT_S = 7200.0  # gigabytes over a slow line, twice: another process may have begun and failed

Value = TypeVar("Value")


class StopAsked(Exception):
    """A stop was asked for while a step was under way."""


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, Value]) -> Value:
    """The result of the work; or StopAsked, with the work cancelled, as soon as the event is set."""
    task, asked = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise StopAsked
    finally:
        asked.cancel()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def environment(name: environments.Name, gpus: int, log: Path) -> Path:
    """The Python of an environment, built if it is not there.

    Args:
        gpus: 0 for the CPU environment.
        log: of the build.

    Raises:
        AgentflyError: it cannot be built.
    """
    accelerator: environments.Accelerator = "cuda" if gpus else "cpu"
    found = environments.find(name, accelerator=accelerator)
    if found is None:
        path = os.pathsep.join(
            [str(environments.agentfly_path()), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        await run_to_end(
            f"environment {name}",
            [sys.executable, "-m", "agentfly.cli", "env", name, "--accelerator", accelerator],
            env={**os.environ, "PYTHONPATH": path},
            log=log,
            cwd=log.parent,
            deadline_s=ENVIRONMENT_S,
        )
        found = environments.find(name, accelerator=accelerator)
    if found is None:
        raise AgentflyError(f"environment {name}: was built, and is not there", hints=[f"read {log}"])
    return found


async def make_model(model: ModelRef, seed: int, places: Places, python: Path, log: Path) -> None:
    """Make the model of a manifest that says how; nothing if it is there already."""
    role, target = model_role(model, seed, places), model_path(model, places)
    if role is None or target.exists():
        return
    partial = target.with_name(f"{target.name}.partial")
    arguments = [str(partial) if argument == str(target) else argument for argument in role.arguments]
    command = [str(python), *arguments]
    await run_to_end(
        role.name,
        command,
        env=role_environment(role),
        log=log,
        cwd=places.base_dir,
        deadline_s=BUILD_DEADLINE_S,
    )
    partial.rename(target)


async def prove(plane: DataPlane, pools: Sequence[ResourcePool], start_timeout_s: float) -> None:
    """Have every pool give a member once: a pool that cannot is found here, not by each rollout for itself.

    Args:
        start_timeout_s: for pools of model services, whose members load weights before they serve.

    Raises:
        AgentflyError: a pool gave none; the text says why.
    """
    for pool in pools:
        name = pool.metadata.name
        deadline = start_timeout_s if pool.spec.type == "ModelService" else PROOF_S + _image_s(pool)
        async with await plane.engine.acquire(name, "proof", deadline=deadline):
            pass


def _image_s(pool: ResourcePool) -> float:
    """How long the first member may wait for its image; this machine's own root and a folder are there."""
    image = HOST if pool.spec.container is None else pool.spec.container.image
    return 0.0 if image == HOST or image.startswith("/") else UNPACK_S


async def lease_servers(plane: DataPlane, policy: ResourcePool, owner: str, deadline_s: float) -> list[Lease]:
    """Leases of all members of the policy's pool, for the owner."""
    return [
        await plane.engine.acquire(policy.metadata.name, owner, key=f"server-{number}", deadline=deadline_s)
        for number in range(policy.spec.capacity.max)
    ]


async def ends_within(process: asyncio.subprocess.Process, seconds: float) -> bool:
    """Whether a process ended within so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            await process.wait()
    except TimeoutError:
        return False
    return True
