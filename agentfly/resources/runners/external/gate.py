"""Carries out what an account decides: requests wait here for their turn, and keys are read again.

Guarantees:
1. All waits of a request together, for its turns and between its tries, last no longer than its patience.
2. However the block of a request is left, it then holds nothing.
3. References are read again at most once in ``REREAD_S``, and at once when a key was refused; reading blocks
   nobody else. A Secret, which costs a request to the API server, is read again only if its key was refused
   or is missing: then at most once in ``REREAD_S``, and in ``SECRET_S`` while that does not change.
4. A gate belongs to no event loop: while no request is in its block, it may be used from another one.

Not here: any decision (``account``), HTTP (``proxy``).
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence

from agentfly.errors import AgentflyError
from agentfly.resources.errors import StartFailed
from agentfly.resources.runners.external.account import Account, Grant, Refused, Usage
from agentfly.resources.runners.external.keys import Key, key_in, read_keys
from agentfly.resources.runners.external.limits import Tokens
from agentfly.resources.spec import ExternalAPISpec

logger = logging.getLogger(__name__)

REREAD_S = 1.0
SECRET_S = 5.0
SECRET = "secret:"

ReadSecret = Callable[[str], Awaitable[str]]
"""The text of the Secret's key ``NAME/KEY``. Raises ``AgentflyError``, which says nothing of it."""


class Gate:
    """The way to one API for all its holders."""

    def __init__(self, spec: ExternalAPISpec, read_secret: ReadSecret | None = None) -> None:
        self.account = Account(spec)
        self._read_secret = read_secret
        self._waiting: dict[int, asyncio.Future[Key | Refused]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._read_at = self._secrets_at = -math.inf

    async def open(self) -> None:
        """Read all keys.

        Raises:
            StartFailed: there is none, with the references.
        """
        faults = await self._read(pause=0.0)
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
                    await self._read(pause=SECRET_S)
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
        await self._read(pause=REREAD_S)

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

    async def _read(self, *, pause: float) -> list[str]:
        """Read all references, Secrets if the last time is so many seconds ago; what is wrong with them."""
        self._read_at = _now()
        keys = self.account.keys
        secrets = [reference for reference in keys.references if reference.startswith(SECRET)]
        plain = [reference for reference in keys.references if reference not in secrets]
        values, faults = await asyncio.to_thread(read_keys, plain)
        keys.know(values)
        states = keys.states(self._read_at)
        useless = [reference for reference in secrets if states[reference] in ("missing", "refused")]
        if useless and self._read_at >= self._secrets_at + pause:
            self._secrets_at = self._read_at
            faults += await self._read_secrets(useless)
        return faults

    async def _read_secrets(self, references: Sequence[str]) -> list[str]:
        faults = []
        for reference in references:
            if self._read_secret is None:
                faults.append(f"{reference}: there are no Secrets outside a cluster")
                continue
            try:
                text = await self._read_secret(reference.removeprefix(SECRET))
                self.account.keys.know({reference: key_in(text)})
            except AgentflyError as error:
                faults.append(f"{reference}: {error.message}")
            except ValueError as error:
                faults.append(f"{reference}: {error}")
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
