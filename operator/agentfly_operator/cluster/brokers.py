"""What brokers say of their pools, asked again and again.

Guarantees:
1. A broker is asked every `BUSY_S` seconds while something moves, else every `IDLE_S`; sooner when poked, but
   never more often than every `LEAST_S`.
2. Whoever wants to know is told when an answer differs from the one before, and when a broker falls silent or
   answers again; not when nothing changed.
3. A silent broker's last answer is kept with the time since which it is silent.
4. Every question has a deadline; an answer has a bounded size. No token is in a message or a log.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import aiohttp
from pydantic import ValidationError

from agentfly.broker.wire import POOLS
from agentfly.errors import AgentflyError
from agentfly_operator import USER_AGENT
from agentfly_operator.cluster.metrics import Metrics
from agentfly_operator.config import Config
from agentfly_operator.names import TOKEN_HEADER
from agentfly_operator.plan.seen import BrokerSeen, PoolReport

logger = logging.getLogger(__name__)

BUSY_S = 2.0
IDLE_S = 10.0
LEAST_S = 0.5
ANSWER_S = 5.0
ANSWER_MAX = 16 << 20

Token = Callable[[str], Awaitable[str]]


class _NoAnswer(Exception):
    pass


@dataclass
class _Line:
    seen: BrokerSeen
    poked: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Brokers:
    """Asks the brokers of all namespaces that are followed.

    Args:
        token: the client token of a namespace's broker; raises AgentflyError if there is none.
        changed: called with the namespace whose answer changed.
    """

    def __init__(
        self, config: Config, token: Token, changed: Callable[[str], None], metrics: Metrics
    ) -> None:
        self._config = config
        self._token = token
        self._changed = changed
        self._metrics = metrics
        self._lines: dict[str, _Line] = {}
        self._session: aiohttp.ClientSession | None = None

    def follow(self, namespace: str) -> None:
        """Begin to ask the broker of a namespace."""
        if namespace not in self._lines:
            line = self._lines[namespace] = _Line(BrokerSeen(since=datetime.now(UTC)))
            line.task = asyncio.create_task(self._ask_on(namespace, line), name=f"broker of {namespace}")

    def leave(self, namespace: str) -> None:
        """Ask no more."""
        line = self._lines.pop(namespace, None)
        if line is not None and line.task is not None:
            line.task.cancel()

    def poke(self, namespace: str) -> None:
        """Ask soon: something happened that will show in the answer."""
        if namespace in self._lines:
            self._lines[namespace].poked.set()

    def seen(self, namespace: str) -> BrokerSeen:
        """What is known of the broker of a namespace, which is followed from now on."""
        self.follow(namespace)
        return self._lines[namespace].seen

    async def close(self) -> None:
        """Ask nobody any more."""
        tasks = {line.task for line in self._lines.values() if line.task is not None}
        self._lines.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=ANSWER_S)
        if self._session is not None:
            await self._session.close()

    async def _ask_on(self, namespace: str, line: _Line) -> None:
        while True:
            before, began = line.seen, datetime.now(UTC)
            line.poked.clear()
            line.seen = await self._ask(namespace, before, began)
            moved = line.seen.pools != before.pools or line.seen.error != before.error
            if moved or before.answered is None:
                self._changed(namespace)
            busy = moved or line.seen.error or any(map(_moves, line.seen.pools.values()))
            await asyncio.sleep(LEAST_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout((BUSY_S if busy else IDLE_S) - LEAST_S):
                    await line.poked.wait()

    async def _ask(self, namespace: str, before: BrokerSeen, began: datetime) -> BrokerSeen:
        try:
            pools = await self._pools(namespace)
        except (_NoAnswer, AgentflyError) as error:
            self._metrics.polls.labels("error").inc()
            text = getattr(error, "message", str(error))
            since = before.since if before.error or not before.answered else began
            if not before.error:
                logger.info("broker of %s does not answer: %s", namespace, text)
            return BrokerSeen(since, before.answered, text, before.pools)
        except Exception:
            self._metrics.polls.labels("error").inc()
            logger.exception("broker of %s", namespace)
            return BrokerSeen(before.since, before.answered, "its answer was not understood", before.pools)
        self._metrics.polls.labels("ok").inc()
        if before.error:
            logger.info("broker of %s answers", namespace)
        answers_on = not before.error and before.answered is not None
        return BrokerSeen(before.since if answers_on else began, began, "", pools)

    async def _pools(self, namespace: str) -> Mapping[str, PoolReport]:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers={"User-Agent": USER_AGENT})
        url = self._config.broker_of(namespace) + POOLS
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        headers = {TOKEN_HEADER: await self._token(namespace)}
        try:
            async with self._session.get(url, headers=headers, timeout=timeout) as response:
                content = await response.content.read(ANSWER_MAX + 1)
                while len(content) <= ANSWER_MAX and (more := await response.content.read(ANSWER_MAX + 1)):
                    content += more
                status = response.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _NoAnswer(_reason(error)) from error
        if status != 200 or len(content) > ANSWER_MAX:
            raise _NoAnswer(f"answered with status {status}" if status != 200 else "answered too much")
        try:
            return {name: _report(told) for name, told in json.loads(content).items()}
        except (ValueError, AttributeError, TypeError, ValidationError) as error:
            raise _NoAnswer("answered what is no list of pools") from error


def _report(told: Mapping[str, Any]) -> PoolReport:
    # Clocks move in every answer; what they count from is known here by other means.
    return PoolReport.model_validate({**told, "short_s": None, "retry_in_s": None})


def _moves(report: PoolReport) -> bool:
    return bool(report.starting or report.resetting or report.stopping or report.queued)


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer in {ANSWER_S:g} s"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "its name is not known yet"
    if isinstance(error, aiohttp.ClientConnectorError):
        return (
            "connection refused"
            if isinstance(error.os_error, ConnectionRefusedError)
            else "cannot be reached"
        )
    return "the connection broke"
