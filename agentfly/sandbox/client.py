"""Talking to sandboxd, the daemon inside every sandbox.

Guarantees:
1. Every request has a deadline: the one given to the daemon plus five seconds for the way.
2. No answer is ``SandboxUnreachable``, a lost lease ``SandboxLeaseLost``, a refused request ``SandboxError``.
3. Cancelling a call closes its connection, which makes the daemon kill the command a second later.
4. A command never runs twice. Its request is repeated once after a connection that broke, under a key by
   which the daemon knows it again: what was lost is the answer, and that is given again.
5. One kept-alive session for each client, closed by ``close()`` or by leaving ``async with``; what was
   started and has not ended is cancelled then.
6. Files of any size travel in bounded memory by ``upload`` and ``download``; half a file never has the
   name of a whole one, on either side.
"""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from agentfly.sandbox.connection import SHORT_S, Connection, too_large
from agentfly.sandbox.job import Job
from agentfly.sandbox.types import ExecResult, Holding, ResetReport, printable

MARGIN_S = 5.0
"""What a request may take beyond the time that the daemon was given: connecting, and a busy machine."""
RESET_S = 10.0
"""A reset kills for up to five seconds, then empties scratch folders."""
FILE_S = 60.0
"""``MEMORY_BYTES`` through a slow link."""
MEMORY_BYTES = 64 << 20
"""The largest file that is held in memory."""
PIECE_BYTES = 1 << 20


class SandboxClient(Connection):
    """What the holder of a lease may do: run commands, read and write files.

    Args:
        address: ``unix:///path`` or ``http://host:port``.
        token: the token of the lease.
    """

    def __init__(self, address: str, token: str) -> None:
        super().__init__(address, token)
        self._jobs: list[Job] = []

    async def close(self) -> None:
        """Cancel what was started and close the connections. Idempotent; a later call opens a new session."""
        jobs, self._jobs = self._jobs, []
        try:
            await asyncio.gather(*(job.__aexit__(None, None, None) for job in jobs))
        finally:
            await super().close()

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: str = "",
        user: str | None = None,
        timeout: float = 30.0,
        output_limit: int = 65536,
    ) -> ExecResult:
        """Run a shell line, or an argument list without a shell.

        Args:
            command: ``"ls | wc -l"``, or ``["ls", "-l"]``.
            env: added to the environment of the sandbox.
            cwd: an absolute path; None is the sandbox's workdir.
            user: a name of the sandbox, ``uid`` or ``uid:gid``; refused where the sandbox has one user only,
                as all of bubblewrap have. None is the user of the sandbox.
            timeout: seconds; then the command's whole process group is killed and ``timed_out`` set.
            output_limit: bytes kept of each of the two streams, at most 1 MiB; the rest is dropped.

        Raises:
            SandboxUnreachable, SandboxLeaseLost, SandboxError.
        """
        body = _request(command, env, cwd, stdin, user, timeout, output_limit)
        key = secrets.token_urlsafe(12)
        deadline = timeout + MARGIN_S
        return ExecResult.parse(
            await self.call("POST", "/exec", deadline=deadline, body=body, key=key, repeat=True)
        )

    async def start(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: str = "",
        user: str | None = None,
        timeout: float = 3600.0,
        output_limit: int = 1 << 20,
    ) -> Job:
        """Start a command that goes on by itself; the arguments are those of ``exec``.

        Use it as ``async with await client.start(...) as job``: then it ends with the block at the latest. In
        any case it ends with its timeout, with ``close()``, and with the lease.

        Raises:
            SandboxUnreachable, SandboxLeaseLost, SandboxError.
        """
        body = _request(command, env, cwd, stdin, user, timeout, output_limit) | {"waitSeconds": 0}
        key = secrets.token_urlsafe(12)
        begun = await self.call("POST", "/exec", deadline=MARGIN_S, body=body, key=key, repeat=True)
        self._jobs = [job for job in self._jobs if not job.over]
        self._jobs.append(Job(self, begun["id"]))
        return self._jobs[-1]

    async def write_file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file of at most 64 MiB, creating its folders.

        Raises:
            SandboxUnreachable, SandboxLeaseLost, SandboxError (``TooLarge``, ``BadRequest``).
        """
        if len(data) > MEMORY_BYTES:
            raise too_large(
                f"data: {len(data)} bytes for {path}, which write_file() sends from memory,", MEMORY_BYTES
            )
        query, key = {"path": path, "mode": f"{mode:04o}"}, secrets.token_urlsafe(12)
        await self.fetch("PUT", "/files", deadline=FILE_S, content=data, query=query, key=key, repeat=True)

    async def read_file(self, path: str) -> bytes:
        """Read an ordinary file of at most 64 MiB.

        Raises:
            SandboxUnreachable, SandboxLeaseLost, SandboxError (``NotFound``, ``TooLarge``, ``BadRequest``).
        """
        return await self.fetch(
            "GET", "/files", deadline=FILE_S, query={"path": path}, repeat=True, limit=MEMORY_BYTES
        )

    async def upload(self, local: Path, path: str, mode: int = 0o644, timeout: float = 3600.0) -> None:
        """Send a local file of any size, creating its folders in the sandbox. It is sent once.

        Args:
            timeout: seconds for all of it.

        Raises:
            OSError: the local file cannot be read.
            SandboxUnreachable, SandboxLeaseLost, SandboxError (``TooLarge``, ``BadRequest``).
        """
        with local.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            async with self.stream(
                "PUT",
                "/files",
                deadline=timeout,
                params={"path": path, "mode": f"{mode:04o}"},
                headers={"Content-Length": str(size)},
                data=_pieces(file, size),
                expect100=True,  # a refusal comes before the body is sent
            ) as answer:
                await answer.read()

    async def download(self, path: str, local: Path, timeout: float = 3600.0) -> None:
        """Fetch an ordinary file of any size into a local one, which is replaced once it is whole.

        Args:
            timeout: seconds for all of it.

        Raises:
            OSError: the local file cannot be written.
            SandboxUnreachable, SandboxLeaseLost, SandboxError (``NotFound``, ``TooLarge``, ``BadRequest``).
        """
        half = local.with_name(f".{local.name}-{secrets.token_hex(4)}")
        try:
            with half.open("xb") as file:
                async with self.stream("GET", "/files", deadline=timeout, params={"path": path}) as answer:
                    async for piece in answer.content.iter_chunked(PIECE_BYTES):
                        await asyncio.to_thread(file.write, piece)
            half.replace(local)
        finally:
            half.unlink(missing_ok=True)


def _request(
    command: str | Sequence[str],
    env: Mapping[str, str] | None,
    cwd: str | None,
    stdin: str,
    user: str | None,
    timeout: float,
    output_limit: int,
) -> dict[str, Any]:
    body: dict[str, Any] = {"command": command} if isinstance(command, str) else {"argv": list(command)}
    body |= {"stdin": stdin, "timeoutSeconds": timeout, "outputLimitBytes": output_limit}
    given = {"env": dict(env) if env else None, "cwd": cwd, "user": user}
    return body | {name: value for name, value in given.items() if value is not None}


async def _pieces(file: BinaryIO, size: int) -> AsyncIterator[bytes]:
    while size > 0:
        piece = await asyncio.to_thread(file.read, min(PIECE_BYTES, size))
        if not piece:
            raise ConnectionError(f"{file.name}: became shorter while it was sent")
        size -= len(piece)
        yield piece


class SandboxAdmin(Connection):
    """What the owner of a sandbox may do: lease it out, and take it back clean.

    Args:
        address: ``unix:///path`` or ``http://host:port``.
        admin_token: the token that the daemon was started with.
    """

    def __init__(self, address: str, admin_token: str) -> None:
        super().__init__(address, admin_token)

    async def lease(self, owner: str, attempt: int, token: str, ttl: float, note: str = "") -> None:
        """Give the sandbox to an owner for ``ttl`` seconds; the same arguments again are the heartbeat.

        Args:
            note: at most 8 KiB, which ``holding`` gives back for as long as it is leased.

        Raises:
            SandboxUnreachable, SandboxError (``Busy`` with another owner, ``Dirty`` after a lost lease).
        """
        body = {"owner": owner, "attempt": attempt, "token": token, "ttlSeconds": ttl}
        noted = {"note": note} if note else {}
        await self.call("POST", "/lease", deadline=SHORT_S, body=body | noted, repeat=True)

    async def holding(self) -> Holding:
        """What the daemon keeps of its lease.

        Raises:
            SandboxUnreachable, SandboxError (``Unauthorized``: the token is not the owner's).
        """
        return Holding.parse(await self.call("GET", "/lease", deadline=SHORT_S, repeat=True))

    async def reset(self, timeout: float = 0.0) -> ResetReport:
        """End the lease, kill everything, put back what the method of reset can, and say whether it is clean.

        Args:
            timeout: seconds that the method may take beyond that; what a spec has as ``reset.timeout_s``.

        Raises:
            SandboxUnreachable.
        """
        # Again where a kept connection was cut, as when a sandbox ends: a reset of a clean one is clean.
        body = await self.call("POST", "/reset", deadline=RESET_S + timeout, repeat=True)
        reason, took = body.get("reason"), body.get("milliseconds")
        return ResetReport(
            clean=body["clean"],
            reason=None if reason is None else printable(reason),
            method=body.get("method"),
            wall_s=None if took is None else took / 1000,
            incarnation=body.get("incarnation"),
        )
