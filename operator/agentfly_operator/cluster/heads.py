"""What the heads of trainers say of their runs, asked while they run.

Guarantees:
1. A head is asked every `EVERY_S` seconds, and has `ANSWER_S` to answer; an answer has a bounded size.
2. The run is told of a report that differs from the one before, and of nothing else.
3. A head that does not answer keeps its last report: that alone is no failure, its pod says whether it lives.
4. Whether a head had time to answer this process is known: the silence before that says nothing of it. One
   that has not answered for `PATIENCE_S` seconds, of which it was asked in all, is silent.
5. A report of another attempt is none: an address may have had another pod before.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from agentfly.roles.launch import STATE_PORT, Report
from agentfly_operator import USER_AGENT
from agentfly_operator.cluster.metrics import Metrics
from agentfly_operator.plan.children import WorkKey
from agentfly_operator.plan.run_seen import PodOf

logger = logging.getLogger(__name__)

EVERY_S = 5.0
ANSWER_S = 3.0
PATIENCE_S = 60.0  # after so long a head that does not answer is silent
ANSWER_MAX = 1 << 16


@dataclass
class _Line:
    uid: str
    attempt: int
    since: float
    answered: float = float("-inf")
    report: Report | None = None
    task: asyncio.Task[None] | None = None


class Heads:
    """Asks the heads that are followed.

    Args:
        changed: called with the run whose head said something new.
        port: on which all of them answer.
    """

    def __init__(self, changed: Callable[[WorkKey], None], metrics: Metrics, port: int = STATE_PORT) -> None:
        self._changed = changed
        self._metrics = metrics
        self._port = port
        self._lines: dict[WorkKey, _Line] = {}
        self._session: aiohttp.ClientSession | None = None

    def follow(self, work: WorkKey, head: PodOf) -> None:
        """Ask this pod, which runs and has an address, and no other one of the run any more."""
        line = self._lines.get(work)
        if line is None or line.uid != head.uid:
            self.forget(work)
            line = self._lines[work] = _Line(head.uid, head.attempt, asyncio.get_running_loop().time())
        if line.task is None:
            line.since = asyncio.get_running_loop().time()
            line.task = asyncio.create_task(self._ask_on(work, head, line), name=f"head {head.name}")

    def rest(self, work: WorkKey) -> None:
        """Ask no more; what was said last is kept."""
        line = self._lines.get(work)
        if line is not None and line.task is not None:
            line.task.cancel()
            line.task = None

    def forget(self, work: WorkKey) -> None:
        """Ask no more, and keep nothing."""
        self.rest(work)
        self._lines.pop(work, None)

    def report(self, work: WorkKey, attempt: int) -> Report | None:
        """What the head of this attempt said last; None: nothing."""
        line = self._lines.get(work)
        return line.report if line is not None and line.attempt == attempt else None

    def heard(self, work: WorkKey) -> bool:
        """Whether the head that is followed answered, or had time enough to; true if none is."""
        line = self._lines.get(work)
        if line is None or line.task is None or line.report is not None:
            return True
        return asyncio.get_running_loop().time() - line.since >= PATIENCE_S

    def silent(self, work: WorkKey) -> bool:
        """Whether the head that is followed has not answered for long; false if none is."""
        line = self._lines.get(work)
        if line is None or line.task is None:
            return False
        return asyncio.get_running_loop().time() - max(line.since, line.answered) >= PATIENCE_S

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

    async def _ask_on(self, work: WorkKey, head: PodOf, line: _Line) -> None:
        while True:
            report = await self._ask(head)
            self._metrics.head_polls.labels("error" if report is None else "ok").inc()
            if report is not None:
                line.answered = asyncio.get_running_loop().time()
            if report is not None and report != line.report:
                line.report = report
                self._changed(work)
            await asyncio.sleep(EVERY_S)

    async def _ask(self, head: PodOf) -> Report | None:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers={"User-Agent": USER_AGENT})
        address = f"[{head.ip}]" if ":" in head.ip else head.ip
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        try:
            async with self._session.get(f"http://{address}:{self._port}/state", timeout=timeout) as response:
                content = await _read(response)
        except (aiohttp.ClientError, OSError, TimeoutError, UnicodeDecodeError) as error:
            logger.debug("head %s: %s", head.name, error)
            return None
        report = None if response.status != 200 or content is None else Report.read(content)
        return report if report is not None and report.attempt == head.attempt else None


async def _read(response: aiohttp.ClientResponse) -> str | None:
    """The body as text; None if it is too large."""
    content = b""
    while more := await response.content.read(ANSWER_MAX + 1):
        content += more
        if len(content) > ANSWER_MAX:
            return None
    return content.decode()
