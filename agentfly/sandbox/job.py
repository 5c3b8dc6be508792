"""A command that goes on in the sandbox while its caller does something else.

Guarantees:
1. Its output is read in order and without loss, up to the output limit of the command, in pieces; nothing is
   kept of pieces that were handed out.
2. Leaving its ``async with``, however it is left, kills the whole group of the command if that has not ended.
3. A result that was read once needs no sandbox to be read again.

Not here: starting one (``client``).
"""

import contextlib
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Self

from agentfly.errors import AgentflyError
from agentfly.sandbox.connection import Connection
from agentfly.sandbox.errors import SandboxError
from agentfly.sandbox.types import ExecResult, Piece, Stream

WAIT_S = 20.0
"""Of one long poll; the daemon allows 30."""
ANSWER_S = 10.0
"""Beyond that: connecting, a busy machine, and after a cancel a process that is slow to die."""


class Job:
    """The handle of a long command. Leaving its ``async with`` cancels it."""

    def __init__(self, connection: Connection, job_id: str) -> None:
        self.id = job_id
        self._connection = connection
        self._result: ExecResult | None = None
        self._cancelled = False

    @property
    def over(self) -> bool:
        """Whether its end is known here: it was told, or it was cancelled."""
        return self._result is not None or self._cancelled

    async def poll(self) -> ExecResult | None:
        """How it ended, or None while it runs.

        Raises:
            SandboxUnreachable, SandboxLeaseLost, SandboxError (``NotFound``: the daemon has forgotten it).
        """
        return await self._ask(0.0)

    async def wait(self) -> ExecResult:
        """Wait for its end: at most its timeout. Raises what ``poll`` raises."""
        while (result := await self._ask(WAIT_S)) is None:
            pass
        return result

    async def output(self) -> AsyncIterator[Piece]:
        """What it writes, from its start to its end, as it comes. Raises what ``poll`` raises."""
        streams: tuple[Stream, ...] = ("stdout", "stderr")
        offsets, running = dict.fromkeys(streams, 0), True
        while running:
            body = await self._get(WAIT_S, offsets)
            running = body["running"]
            for name in streams:
                offsets[name] = body[f"{name}Offset"]
                if text := body[name]:
                    yield Piece(name, text)

    async def cancel(self) -> None:
        """Kill it and everything in its group, and have the daemon forget it. Idempotent.

        Raises:
            SandboxUnreachable, SandboxLeaseLost, SandboxError (``Timeout``: it outlives its SIGKILL).
        """
        if self.over:
            return
        try:
            await self._connection.call("DELETE", f"/exec/{self.id}", deadline=ANSWER_S, repeat=True)
        except SandboxError as error:
            if error.code != "NotFound":  # it has ended and is forgotten
                raise
        self._cancelled = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(AgentflyError):  # a sandbox that is gone, or lost, has ended it
            await self.cancel()

    async def _ask(self, wait: float) -> ExecResult | None:
        if self._result is None:
            body = await self._get(wait, {})
            self._result = None if body["running"] else ExecResult.parse(body)
        return self._result

    async def _get(self, wait: float, offsets: Mapping[Stream, int]) -> dict[str, Any]:
        return await self._connection.call(
            "GET",
            f"/exec/{self.id}",
            deadline=wait + ANSWER_S,
            query={"wait": f"{wait:g}"} | {str(name): str(offset) for name, offset in offsets.items()},
            repeat=True,
        )
