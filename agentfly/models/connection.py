"""What models that are asked over HTTP have in common: one pool of connections, opened when it is needed."""

from types import TracebackType
from typing import Self

import aiohttp

from agentfly.errors import AgentflyError


class Connection:
    """One server. Use as an async context manager, or call ``close``.

    Args:
        base_url: of the server.
        connect_timeout_s: seconds until it must take a connection.

    Raises:
        AgentflyError: it is no address of HTTP.
    """

    def __init__(self, base_url: str, *, connect_timeout_s: float) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise AgentflyError(f"base_url: {base_url} has no scheme", hints=[f"write http://{base_url}"])
        self.base_url = base_url.rstrip("/")
        self._connect_timeout_s = connect_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. The model can be used again afterwards."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s)
            self._session = aiohttp.ClientSession(
                timeout=timeout, connector=aiohttp.TCPConnector(limit=0), trust_env=False
            )
        return self._session


def may_answer_later(status: int) -> bool:
    """Whether a refusal says something of the server now, and nothing of the request."""
    return status >= 500 or status in (404, 408, 429)
