"""The one connection that the owner of a sandbox keeps to its daemon.

Guarantees:
1. All requests in one event loop go through one session. It ends with the loop (as ``asyncio.run`` ends one:
   by cancelling what is left); the next loop opens its own.
2. Once it is closed it stays so: a sandbox that was stopped is ``SandboxUnreachable``.

Not here: the requests (``agentfly.sandbox``).
"""

import asyncio

from agentfly.sandbox import SandboxAdmin, SandboxUnreachable


class KeptAdmin:
    """A ``SandboxAdmin`` that stays open between requests.

    Args:
        address: ``unix:///path`` or ``http://host:port``.
        token: of the sandbox's owner.
    """

    def __init__(self, address: str, token: str) -> None:
        self._address = address
        self._admin = SandboxAdmin(address, token)
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
        if self._keeper is None or self._keeper.get_loop() is not loop:
            self._keeper = loop.create_task(self._keep(), name=f"keep {self._address}")
        return self._admin

    async def close(self) -> None:
        """Hang up for good. May be repeated."""
        self._closed = True
        if self._keeper is not None and self._keeper.get_loop() is asyncio.get_running_loop():
            self._keeper.cancel()
            await asyncio.wait({self._keeper})

    async def _keep(self) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await self._admin.close()
