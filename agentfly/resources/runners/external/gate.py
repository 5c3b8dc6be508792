"""Carries out what an account decides: requests wait here for their turn, and keys are read again.

Guarantees:
1. All waits of a request together, for its turns and between its tries, last no longer than its patience.
2. However the block of a request is left, it then holds nothing.
3. References are read again at most once in ``REREAD_S``, and at once when a key was refused; reading blocks
   nobody else.
4. A gate belongs to no event loop: while no request is in its block, it may be used from another one.

Not here: any decision (``account``), HTTP (``proxy``).
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Iterator

from agentfly.resources.errors import StartFailed
from agentfly.resources.runners.external.account import Account, Grant, Refused, Usage
from agentfly.resources.runners.external.keys import Key, read_keys
from agentfly.resources.runners.external.limits import Tokens
from agentfly.resources.spec import ExternalAPISpec

logger = logging.getLogger(__name__)

REREAD_S = 1.0


class Gate:
    """The way to one API for all its holders."""

    def __init__(self, spec: ExternalAPISpec) -> None:
        self.account = Account(spec)
        self._waiting: dict[int, asyncio.Future[Key | Refused]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._read_at = -math.inf

    async def open(self) -> None:
        """Read all keys.

        Raises:
            StartFailed: there is none, with the references.
        """
        faults = await self._read()
        wanted = self.account.keys.references
        if wanted and not self.account.keys.values:
            raise StartFailed(
                f"credentials: none can be read: {'; '.join(faults)}",
                hints=("set the variable, or write the file, for the process that keeps the pool",),
            )
        for fault in faults:
            logger.warning("credentials: %s; the others are used", fault)

    def usage(self) -> Usage:
        """Counts, as of now."""
        return self.account.usage(_now())

    @contextlib.contextmanager
    def request(self, estimate: Tokens, patience: float) -> Iterator["Pass"]:
        """A request from its arrival to its end; ``patience`` is in seconds."""
        number = self.account.ask(estimate)
        try:
            yield Pass(self, number, patience)
        finally:
            # Synchronous, on purpose: nothing can interrupt the way out.
            self.account.leave(number, _now())
            self.turn()

    async def admitted(self, number: int, deadline: float) -> Key:
        """Wait for the turn of a request; ``deadline`` is a time of the loop.

        Raises:
            Refused: it has none.
        """
        future: asyncio.Future[Key | Refused] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self.account.wait(number, deadline, _now())
            async with asyncio.timeout_at(deadline):
                if _now() >= self._read_at + REREAD_S:
                    await self._read()
                self.turn()
                answer = await future
        except TimeoutError:
            raise self.account.late(number, _now()) from None
        finally:
            del self._waiting[number]
        if isinstance(answer, Refused):
            raise answer
        return answer

    async def refused(self, key: Key) -> None:
        """The API does not know this key; its reference may have a new one by now."""
        self.account.keys.refuse(key)
        logger.warning("credentials: the API refuses the key of %s", key.reference)
        await self._read()

    def turn(self) -> None:
        """Carry out what is to be done now, and come back when time alone changes something."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = _now()
        for action in self.account.decide(now):
            future = self._waiting.get(action.number)
            if future is not None and not future.done():  # else cancelled: gives back on its way out
                future.set_result(action.key if isinstance(action, Grant) else action.error)
        wake = self.account.wake_at(now)
        if wake is not None:
            self._timer = asyncio.get_running_loop().call_at(wake, self.turn)

    async def _read(self) -> list[str]:
        self._read_at = _now()
        values, faults = await asyncio.to_thread(read_keys, self.account.keys.references)
        self.account.keys.know(values)
        return faults


class Pass:
    """One request at the gate."""

    def __init__(self, gate: Gate, number: int, patience: float) -> None:
        self._gate, self._number, self._patience = gate, number, patience

    async def admitted(self) -> Key:
        """See ``Gate.admitted``. Each is one try, which ends with ``settle``."""
        began = _now()
        try:
            return await self._gate.admitted(self._number, began + self._patience)
        finally:
            self._patience -= _now() - began

    async def pause(self, seconds: float) -> bool:
        """Wait before another try. False, at once: that is longer than the request may wait."""
        if seconds >= self._patience:
            return False
        self._patience -= seconds
        await asyncio.sleep(seconds)
        return True

    def settle(self, *, used: Tokens | None, ok: bool | None) -> None:
        """See ``Account.settle``."""
        self._gate.account.settle(self._number, _now(), used=used, ok=ok)
        self._gate.turn()

    def skip(self, key: Key) -> bool:
        """See ``Account.skip``."""
        return self._gate.account.skip(self._number, key)

    async def refused(self, key: Key) -> None:
        """See ``Gate.refused``."""
        await self._gate.refused(key)

    def limited(self, key: Key, seconds: float) -> None:
        """The API wants no request with this key for so long."""
        self._gate.account.keys.limit(key, _now() + seconds)
        logger.info("credentials: the API limits the key of %s for %.3g s", key.reference, seconds)


def _now() -> float:
    return asyncio.get_running_loop().time()
