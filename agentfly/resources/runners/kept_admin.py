"""The one connection that the owner of a sandbox keeps to its daemon.

Guarantees:
1. All requests in one event loop go through one session; one that was opened in another loop is closed first.
2. Closing it may be repeated, and a later request opens it again.

Not here: the requests (``agentfly.sandbox``).
"""

import asyncio

from agentfly.sandbox import SandboxAdmin


class KeptAdmin:
    """A ``SandboxAdmin`` that stays open between requests.

    Args:
        address: ``unix:///path`` or ``http://host:port``.
        token: of the sandbox's owner.
    """

    def __init__(self, address: str, token: str) -> None:
        self._admin = SandboxAdmin(address, token)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def open(self) -> SandboxAdmin:
        """The client, fit for the running loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            await self._admin.close()
        return self._admin

    async def close(self) -> None:
        """Hang up."""
        await self._admin.close()
