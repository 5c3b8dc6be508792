"""A barrier whose parties may leave for good.

Guarantees:
1. Nobody passes before every party that has not left has arrived.
2. A party that leaves, or is cancelled while it waits, is not waited for; the others do not hang.
"""

import asyncio


class TurnBarrier:
    """Used again and again by the same parties, fewer each time."""

    def __init__(self, parties: int) -> None:
        self._parties = parties
        self._arrived = 0
        self._gate = asyncio.Event()

    async def arrive(self) -> None:
        """Wait for all others."""
        gate = self._gate
        self._arrived += 1
        self._open_if_complete()
        try:
            await gate.wait()
        except asyncio.CancelledError:
            if gate is self._gate:
                self._arrived -= 1
            raise

    def leave(self) -> None:
        """Be waited for no more; a party must not be waiting when it leaves."""
        self._parties -= 1
        self._open_if_complete()

    def _open_if_complete(self) -> None:
        if self._arrived and self._arrived >= self._parties:
            self._arrived = 0
            self._gate.set()
            self._gate = asyncio.Event()
