"""One Python object that holders of leases may call, one call at a time.

Guarantees:
1. The factory, every synchronous method and ``close`` run in one thread that is the object's own;
   asynchronous ones run on the event loop. No two calls overlap.
2. A call needs the token of a live lease. Names that begin with ``_`` cannot be called.
3. What goes in and comes out is JSON. An exception of the object is an answer, with its type and text.
4. A call that outlasts its deadline breaks the object: its thread cannot be stopped, so nobody uses it again.
5. ``reset`` is verified: an object with ``reset`` and ``fingerprint`` stays if its fingerprint is again what
   it was at the start; any other is made anew by its factory.

Not here: HTTP (``server``), processes (``runner``).
"""

import asyncio
import inspect
import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentfly.refs import ReferenceFailed, load
from agentfly.resources.errors import CallRaised, Infra, LeaseLost, StartFailed
from agentfly.resources.spec import InProcessSpec

CLOSE_S = 5.0  # for the object's own ``close``


@dataclass(slots=True)
class _Hold:
    owner: str
    attempt: int
    expires: float


class Host:
    """The object of one member, and who may call it. Use ``start`` first and ``close`` last."""

    def __init__(self, spec: InProcessSpec) -> None:
        self._spec = spec
        self._holds: dict[str, _Hold] = {}
        self._turn = asyncio.Lock()
        self._thread = _Thread()
        self._object: Any = None
        self._fingerprint: Any = None
        self.broken: str | None = None

    async def start(self) -> None:
        """Make the object.

        Raises:
            StartFailed: what the reference or the factory said.
        """
        try:
            async with asyncio.timeout(self._spec.start_timeout_s):
                await self._make()
        except ReferenceFailed as error:
            raise StartFailed(f"entrypoint: {error.message}", hints=error.hints) from error
        except TimeoutError:
            self.broken = f"its factory took longer than {self._spec.start_timeout_s:g} s"
            raise StartFailed(f"entrypoint: {self._spec.entrypoint}: {self.broken}") from None
        except Exception as error:
            raise StartFailed(f"entrypoint: {self._spec.entrypoint}: {_told(error)}") from error

    def lease(self, owner: str, attempt: int, token: str, ttl_s: float) -> None:
        """Let the holder of the token call for ``ttl_s`` seconds, or renew that.

        Raises:
            LeaseLost: the object is broken, or the lease ran out before.
        """
        now = asyncio.get_running_loop().time()
        if self.broken is not None:
            raise LeaseLost(f"instance: {self.broken}")
        hold = self._holds.get(token)
        if hold is not None and hold.expires <= now:
            raise LeaseLost(f"instance: the lease of {owner} ran out")
        self._holds[token] = _Hold(owner, attempt, now + ttl_s)

    async def call(self, token: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the object's method returns, as JSON.

        Raises:
            LeaseLost: there is no such lease.
            CallRaised: there is no such method, it raised, or what it returned is not JSON.
            Infra: it did not return in time; the object is broken.
        """
        self._check(token)
        if method.startswith("_") or not callable(function := getattr(self._object, method, None)):
            known = ", ".join(sorted(name for name in dir(self._object) if not name.startswith("_")))
            raise CallRaised(f"{method}: is not a method; there are: {known}", type_name="AttributeError")
        async with self._turn:
            self._check(token)  # the lease may have ended while others had their turn
            try:
                async with asyncio.timeout(self._spec.call_timeout_s) as bound:
                    answer = await self._run(function, *args, **kwargs)
            except TimeoutError as error:
                if not bound.expired():  # the object's own TimeoutError
                    raise CallRaised(f"{method}: {_told(error)}", type_name="TimeoutError") from error
                self.broken = f"{method} did not return in {self._spec.call_timeout_s:g} s"
                raise Infra(f"instance: {self.broken}", hints=["raise callTimeoutSeconds"]) from None
            except Exception as error:
                raise CallRaised(f"{method}: {_told(error)}", type_name=type(error).__name__) from error
        return _plain(method, answer)

    async def reset(self) -> bool:
        """End all leases and make the object as at its start. False: it is broken."""
        self._holds.clear()
        async with self._turn:
            if self.broken is not None:
                return False
            try:
                async with asyncio.timeout(self._spec.start_timeout_s):
                    if not await self._reset_in_place():
                        await self._end_object()
                        await self._make()
            except Exception as error:  # of the object: it is not to be used again, whatever it was
                self.broken = f"its reset failed: {_told(error)}"
                return False
        return True

    async def close(self) -> None:
        """End the object. Never raises for what the object does."""
        self._holds.clear()
        if self.broken is None:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._end_object()
            except Exception as error:
                self.broken = f"its close failed: {_told(error)}"
        self._thread.end()

    def _check(self, token: str) -> None:
        hold = self._holds.get(token)
        if hold is None or hold.expires <= asyncio.get_running_loop().time():
            raise LeaseLost("instance: no lease with this token")
        if self.broken is not None:
            raise LeaseLost(f"instance: {self.broken}")

    async def _make(self) -> None:
        factory = await self._thread.run(lambda: load(self._spec.entrypoint, Path("/")))
        self._object = await self._run(factory, **self._spec.kwargs)
        if callable(getattr(self._object, "fingerprint", None)):
            self._fingerprint = _plain("fingerprint", await self._run(self._object.fingerprint))

    async def _reset_in_place(self) -> bool:
        if not callable(getattr(self._object, "reset", None)) or self._fingerprint is None:
            return False
        await self._run(self._object.reset)
        seen = _plain("fingerprint", await self._run(self._object.fingerprint))
        return bool(seen == self._fingerprint)

    async def _end_object(self) -> None:
        ended, self._object = self._object, None
        if callable(getattr(ended, "close", None)):
            await self._run(ended.close)

    async def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        answer = await self._thread.run(lambda: function(*args, **kwargs))
        return await answer if inspect.isawaitable(answer) else answer


class _Thread:
    """One thread that runs functions in order. A daemon: one that hangs must not keep the process alive."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name="agentfly instance", daemon=True).start()

    async def run(self, function: Callable[[], Any]) -> Any:
        """What the function returns or raises, from the thread."""
        done: Future[Any] = Future()
        self._work.put((function, done))
        return await asyncio.wrap_future(done)

    def end(self) -> None:
        """No more work; what runs goes on to its end."""
        self._work.put(None)

    def _loop(self) -> None:
        while (item := self._work.get()) is not None:
            function, done = item
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(function())
            except (SystemExit, StopIteration) as error:  # neither ends the thread, nor fits into a future
                done.set_exception(RuntimeError(_told(error)))
            except BaseException as error:
                done.set_exception(error)


def _plain(method: str, value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CallRaised(
            f"{method}: returned what is not JSON: {error}",
            type_name="TypeError",
            hints=["return numbers, text, lists and dicts, such as array.tolist()"],
        ) from error


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}".rstrip(": ")
