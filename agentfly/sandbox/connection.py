"""One kept-alive session with sandboxd: addresses, the token, deadlines, and what an answer means.

Guarantees:
1. Every request has a deadline, which covers a repetition of it too.
2. No answer is ``SandboxUnreachable``, a lost lease ``SandboxLeaseLost``, a refused request ``SandboxError``.
3. A request is sent at most twice, and only one that is safe to repeat: one that changes nothing, or that
   carries a key by which the daemon knows it again.

Not here: which requests there are (``client``, ``job``).
"""

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp

from agentfly.sandbox.errors import SandboxError, SandboxLeaseLost, SandboxUnreachable
from agentfly.sandbox.types import Endpoint, Health, printable

SHORT_S = 5.0
"""Health and lease calls do no work in the daemon."""
PIECEWISE_BYTES = 1 << 16
"""A larger body is sent in pieces, so that others get their turn on the event loop."""
_ANSWERLESS = ("Cancelled", "Forgotten")
"""The daemon's words for a command that has run, and whose answer there is not."""
_BROKEN = (aiohttp.ClientError, ConnectionError)
_NO_ANSWER = (*_BROKEN, TimeoutError)


class Connection:
    """The session that every client of a daemon shares.

    Args:
        address: ``unix:///path`` or ``http://host:port``.
        token: of the lease or of the sandbox's owner.
    """

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
        return Health.parse(await self.call("GET", "/healthz", deadline=SHORT_S))

    async def call(
        self,
        method: str,
        path: str,
        *,
        deadline: float,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        key: str = "",
        repeat: bool = False,
    ) -> dict[str, Any]:
        """Send a request and read its answer.

        Args:
            deadline: seconds.
            key: the ``Idempotency-Key``.
            repeat: send it again after a connection that broke.
        """
        content = b"" if body is None else json.dumps(body).encode()
        received = await self.fetch(
            method, path, deadline=deadline, content=content, query=query, key=key, repeat=repeat
        )
        answer: dict[str, Any] = json.loads(received)
        return answer

    async def fetch(
        self,
        method: str,
        path: str,
        *,
        deadline: float,
        content: bytes = b"",
        query: Mapping[str, str] | None = None,
        key: str = "",
        repeat: bool = False,
        limit: int | None = None,
    ) -> bytes:
        """Like ``call``, with bytes both ways; an answer of more than ``limit`` bytes is ``TooLarge``."""
        headers = self._headers if not key else {**self._headers, "Idempotency-Key": key}
        try:
            async with asyncio.timeout(deadline):
                try:
                    return await self._once(method, path, content, query, headers, limit)
                except _BROKEN:
                    if not repeat:
                        raise
                return await self._once(method, path, content, query, headers, limit)
        except _NO_ANSWER as error:
            raise unreachable(self.endpoint, f"{method} {path}", deadline, error) from error

    async def _once(
        self,
        method: str,
        path: str,
        content: bytes,
        query: Mapping[str, str] | None,
        headers: Mapping[str, str],
        limit: int | None,
    ) -> bytes:
        data = content if len(content) <= PIECEWISE_BYTES else io.BytesIO(content)
        url = self.endpoint.base_url + path
        async with self._open().request(
            method, url, params=query, headers=headers, data=data or None
        ) as answer:
            if limit is not None and (answer.content_length or 0) > limit:
                raise too_large(f"{method} {path}: an answer of {answer.content_length} bytes", limit)
            received = await answer.read()
        if answer.status != 200:
            raise refused(self.endpoint, answer.status, received)
        return received

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        deadline: float,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and hand out the answer's body unread. ``options`` are those of aiohttp."""
        url = self.endpoint.base_url + path
        everything = {**self._headers, **(headers or {})}
        try:
            async with (
                asyncio.timeout(deadline),
                self._open().request(method, url, headers=everything, **options) as answer,
            ):
                if answer.status != 200:
                    raise refused(self.endpoint, answer.status, await answer.read())
                yield answer
        except _NO_ANSWER as error:
            raise unreachable(self.endpoint, f"{method} {path}", deadline, error) from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            path = self.endpoint.socket_path
            connector = aiohttp.TCPConnector() if path is None else aiohttp.UnixConnector(path)
            # The deadline of each request is ours; the proxy settings of the machine are not for sandboxes;
            # nothing here needs what a browser does.
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
                auto_decompress=False,
            )
        return self._session


def unreachable(endpoint: Endpoint, what: str, deadline: float, error: Exception) -> SandboxUnreachable:
    """What a request without an answer is."""
    if isinstance(error, TimeoutError):
        return SandboxUnreachable(f"sandbox {endpoint.address}: {what} had no answer in {deadline:g} s")
    return SandboxUnreachable(f"sandbox {endpoint.address}: {what} failed: {error or type(error).__name__}")


def refused(
    endpoint: Endpoint, status: int, received: bytes
) -> SandboxError | SandboxLeaseLost | SandboxUnreachable:
    """What an answer other than 200 is."""
    try:
        problem = json.loads(received)["error"]
        code, message = problem["code"], problem["message"]
    except (ValueError, KeyError, TypeError):
        code, message = "Unknown", received[:200].decode(errors="replace")
    text, address = printable(f"{message} ({status} {code})"), endpoint.address
    if code == "LeaseLost":
        return SandboxLeaseLost(f"sandbox {address}: {text}")
    if code in _ANSWERLESS:
        return SandboxUnreachable(f"sandbox {address}: {text}")
    return SandboxError(f"sandbox: {text}", code=code, address=address)


def too_large(what: str, limit: int) -> SandboxError:
    """What the daemon says of its own limits, for those of the client."""
    return SandboxError(f"sandbox: {what} is more than {limit}", code="TooLarge")
