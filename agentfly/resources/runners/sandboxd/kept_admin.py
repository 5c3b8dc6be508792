"""The one connection that the owner of a sandbox keeps to its daemon.

Guarantees:
1. All requests in one event loop go through one session. It ends with the loop (as ``asyncio.run`` ends one:
   by cancelling what is left); the next loop opens its own.
2. Once it is closed it stays so: a sandbox that was stopped is ``SandboxUnreachable``.
3. At rest it costs no connection and no task: the next request opens it anew. Until the first one nothing is
   made of it, not even the token: most of thousands of sandboxes rest.

Not here: the requests (``agentfly.sandbox``).
"""

import asyncio
from collections.abc import Callable

from agentfly.sandbox import SandboxAdmin, SandboxUnreachable


class KeptAdmin:
    """A ``SandboxAdmin`` that stays open between requests.

    Args:
        address: ``unix:///path`` or ``http://host:port``.
        token: gives that of the sandbox's owner.
    """

    def __init__(self, address: str, token: Callable[[], str]) -> None:
        self._address = address
        self._token = token
        self._admin: SandboxAdmin | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._closed = False

    def open(self) -> SandboxAdmin:
        """The client, fit for the running loop.

        Raises:
            SandboxUnreachable: it was closed.
        """
        if self._closed:
            raise SandboxUnreachable(f"sandbox {self._address}: was stopped")
        loop = asyncio.get_running_loop()
        if self._admin is None:
            self._admin = SandboxAdmin(self._address, self._token())
        if self._keeper is None or self._keeper.get_loop() is not loop:
            self._keeper = loop.create_task(self._keep(self._admin), name=f"keep {self._address}")
        return self._admin

    async def rest(self) -> None:
        """Hang up until the next request."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None and keeper.get_loop() is asyncio.get_running_loop():
            keeper.cancel()
            await asyncio.wait({keeper})

    async def close(self) -> None:
        """Hang up for good. May be repeated."""
        self._closed = True
        await self.rest()

    @staticmethod
    async def _keep(admin: SandboxAdmin) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await admin.close()
