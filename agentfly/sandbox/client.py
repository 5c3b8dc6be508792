"""Talking to sandboxd, the daemon inside every sandbox.

Guarantees:
1. Every request has a deadline: the one given to the daemon plus five seconds for the way.
2. No answer is ``SandboxUnreachable``, a lost lease ``SandboxLeaseLost``, a refused request ``SandboxError``.
3. Cancelling a call closes its connection, which makes the daemon kill the command.
4. A command is never sent twice: it may have run although its answer was lost.
5. One kept-alive session for each client, closed by ``close()`` or by leaving ``async with``.
"""

import asyncio
import io
import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp

from agentfly.sandbox.errors import SandboxError, SandboxLeaseLost, SandboxUnreachable
from agentfly.sandbox.types import Endpoint, ExecResult, Health, ResetReport

MARGIN_S = 5.0
"""What a request may take beyond the time that the daemon was given: connecting, and a busy machine."""
SHORT_S = 5.0
"""Health and lease calls do no work in the daemon."""
RESET_S = 10.0
"""A reset kills for up to five seconds, then empties scratch folders."""
FILE_S = 60.0
"""64 MiB, the largest file, through a slow link."""


class _Connection:
    """The session that both clients share: addresses, the token, and the mapping of errors."""

    def __init__(self, address: str, token: str) -> None:
        self.endpoint = Endpoint(address)
        self._headers = {"Authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Idempotent; a later call opens a new session."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def health(self) -> Health:
        """Ask the daemon for its state; needs no lease."""
        return Health.parse(await self._json("GET", "/healthz", deadline=SHORT_S))

    async def _json(
        self, method: str, path: str, *, deadline: float, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        content = None if body is None else json.dumps(body).encode()
        received = await self._bytes(method, path, deadline=deadline, content=content)
        answer: dict[str, Any] = json.loads(received)
        return answer

    async def _bytes(
        self,
        method: str,
        path: str,
        *,
        deadline: float,
        content: bytes | None = None,
        query: Mapping[str, str] | None = None,
    ) -> bytes:
        try:
            async with (
                asyncio.timeout(deadline),
                self._open().request(
                    method,
                    self.endpoint.base_url + path,
                    data=None if content is None else io.BytesIO(content),  # sent in pieces
                    params=query,
                    headers=self._headers,
                ) as answer,
            ):
                received = await answer.read()
        except TimeoutError as error:
            raise SandboxUnreachable(
                f"sandbox {self.endpoint.address}: {method} {path} had no answer in {deadline:g} s"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise SandboxUnreachable(
                f"sandbox {self.endpoint.address}: {method} {path} failed: {error or type(error).__name__}"
            ) from error
        if answer.status != 200:
            raise self._refused(answer.status, received)
        return received

    def _refused(self, status: int, received: bytes) -> SandboxError | SandboxLeaseLost:
        try:
            problem = json.loads(received)["error"]
            code, message = problem["code"], problem["message"]
        except (ValueError, KeyError, TypeError):
            code, message = "Unknown", received[:200].decode(errors="replace")
        text, address = f"{message} ({status} {code})", self.endpoint.address
        if code == "LeaseLost":
            return SandboxLeaseLost(f"sandbox {address}: {text}")
        return SandboxError(f"sandbox: {text}", code=code, address=address)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            path = self.endpoint.socket_path
            connector = aiohttp.TCPConnector() if path is None else aiohttp.UnixConnector(path)
            # The deadline of each request is ours; the proxy settings of the machine are not for sandboxes.
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None), trust_env=False
            )
        return self._session


class SandboxClient(_Connection):
    """What the holder of a lease may do: run commands, read and write files.

    Args:
        address: ``unix:///path`` or ``http://host:port``.
        token: the token of the lease.
    """

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: str = "",
        timeout: float = 30.0,
        output_limit: int = 65536,
    ) -> ExecResult:
        """Run a shell line, or an argument list without a shell.

        Args:
            command: ``"ls | wc -l"``, or ``["ls", "-l"]``.
            env: added to the environment of the sandbox.
            cwd: an absolute path; None is the sandbox's workdir.
            timeout: seconds; then the command's whole process group is killed and ``timed_out`` set.
            output_limit: bytes kept of each of the two streams, at most 1 MiB; the rest is dropped.

        Raises:
            SandboxUnreachable, SandboxLeaseLost, SandboxError.
        """
        body: dict[str, Any] = {"command": command} if isinstance(command, str) else {"argv": list(command)}
        body |= {"stdin": stdin, "timeoutSeconds": timeout, "outputLimitBytes": output_limit}
        if env:
            body["env"] = dict(env)
        if cwd is not None:
            body["cwd"] = cwd
        return ExecResult.parse(await self._json("POST", "/exec", deadline=timeout + MARGIN_S, body=body))

    async def write_file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file of at most 64 MiB, creating its folders.

        Raises:
            SandboxUnreachable, SandboxLeaseLost, SandboxError (``TooLarge``, ``BadRequest``).
        """
        query = {"path": path, "mode": f"{mode:04o}"}
        await self._bytes("PUT", "/files", deadline=FILE_S, content=data, query=query)

    async def read_file(self, path: str) -> bytes:
        """Read an ordinary file of at most 64 MiB.

        Raises:
            SandboxUnreachable, SandboxLeaseLost, SandboxError (``NotFound``, ``TooLarge``, ``BadRequest``).
        """
        return await self._bytes("GET", "/files", deadline=FILE_S, query={"path": path})


class SandboxAdmin(_Connection):
    """What the owner of a sandbox may do: lease it out, and take it back clean.

    Args:
        address: ``unix:///path`` or ``http://host:port``.
        admin_token: the token that the daemon was started with.
    """

    def __init__(self, address: str, admin_token: str) -> None:
        super().__init__(address, admin_token)

    async def lease(self, owner: str, attempt: int, token: str, ttl: float) -> None:
        """Give the sandbox to an owner for ``ttl`` seconds; the same arguments again are the heartbeat.

        Raises:
            SandboxUnreachable, SandboxError (``Busy`` with another owner, ``Dirty`` after a lost lease).
        """
        body = {"owner": owner, "attempt": attempt, "token": token, "ttlSeconds": ttl}
        await self._json("POST", "/lease", deadline=SHORT_S, body=body)

    async def reset(self) -> ResetReport:
        """End the lease, kill everything, empty the scratch folders, and say whether the sandbox is clean.

        Raises:
            SandboxUnreachable.
        """
        body = await self._json("POST", "/reset", deadline=RESET_S)
        return ResetReport(clean=body["clean"], reason=body.get("reason"))
