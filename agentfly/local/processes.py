"""Roles as processes of this machine.

Guarantees:
1. A role ends with all its descendants, however it ends and however this process ends: each runs in a process
   namespace of its own (`agentfly.resources.runners.guard`). One that is `unguarded`, which is for pods, ends
   with its process group when the block is left.
2. Leaving `running` stops the role, in bounded time.
3. Everything a role prints stands in its log, and the end of it in the error when it fails.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from agentfly.errors import AgentflyError
from agentfly.local.environments import agentfly_path
from agentfly.resources.runners.guard import kill_guard, start_guarded
from agentfly.roles.failure import reason_in
from agentfly.roles.plan import Role

STOP_S = 10.0  # to collect a killed process; it has no way to refuse
# What the role inherits of this process's environment; the rest is set by its plan.
INHERITED = ("PATH", "HOME", "LANG", "TZ", "USER", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "SSL_CERT_FILE")


def role_environment(role: Role) -> dict[str, str]:
    """The variables of a role on this machine: its own, and agentfly itself on the import path."""
    return {**role.variables, "PYTHONPATH": str(agentfly_path()), "PYTHONUNBUFFERED": "1"}


class RoleFailed(AgentflyError):
    """A role that had to succeed ended with another exit code."""

    def __init__(self, name: str, exit_code: int, log: Path) -> None:
        super().__init__(f"role {name}: exit code {exit_code}: {reason_in(log)}", hints=[f"read {log}"])
        self.exit_code = exit_code


@asynccontextmanager
async def running(
    argv: Sequence[str], *, env: Mapping[str, str], log: Path, cwd: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A started role; stopped when the block is left.

    Args:
        argv: the program and its arguments, without the guard.
        env: added to the few variables that are inherited.
        log: standard output and error are appended to it.
        cwd: where it runs.
    """
    inherited = {key: os.environ[key] for key in INHERITED if key in os.environ}
    with log.open("ab") as output:
        process = await start_guarded(
            argv,
            env={**inherited, **env},
            cwd=cwd,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        await asyncio.shield(_collect(process))


@asynccontextmanager
async def unguarded(
    argv: Sequence[str], *, env: Mapping[str, str], log: Path, cwd: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """As ``running``, where there is no bubblewrap: in a pod, which is a guard by itself."""
    inherited = {key: os.environ[key] for key in INHERITED if key in os.environ}
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *argv,
            env={**inherited, **env},
            cwd=cwd,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        await asyncio.shield(_collect(process))


async def _collect(process: asyncio.subprocess.Process) -> None:
    kill_guard(process)
    async with asyncio.timeout(STOP_S):
        await process.wait()


async def run_to_end(
    name: str, argv: Sequence[str], *, env: Mapping[str, str], log: Path, cwd: Path, deadline_s: float
) -> None:
    """Run a role that ends by itself.

    Raises:
        RoleFailed: it ended with another exit code than 0.
        AgentflyError: it did not end in time.
    """
    async with running(argv, env=env, log=log, cwd=cwd) as process:
        try:
            async with asyncio.timeout(deadline_s):
                code = await process.wait()
        except TimeoutError:
            raise AgentflyError(
                f"role {name}: not finished after {deadline_s:.0f} s", hints=[f"read {log}"]
            ) from None
    if code != 0:
        raise RoleFailed(name, code, log)
