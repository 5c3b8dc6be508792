"""The process: flags, the leader's Lease, the page for monitors, and an orderly end.

Guarantees:
1. Only the leader watches and writes. A process that loses the Lease exits, with status 1.
2. SIGTERM and SIGINT end it with status 0, and the Lease is free for the next one at once.
3. Flags or variables that cannot be used are told in one line with a remedy, with status 2.
"""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.broker.logs import log_json
from agentfly.errors import AgentflyError
from agentfly.kube import Kube
from agentfly.kube.access import find_login
from agentfly_operator import USER_AGENT
from agentfly_operator.cluster.leader import LeaderLease
from agentfly_operator.cluster.metrics import Metrics
from agentfly_operator.cluster.operator import Operator
from agentfly_operator.cluster.web import Web
from agentfly_operator.config import Config, ConfigError

logger = logging.getLogger(__name__)


@dataclass
class _State:
    """What the page for monitors says of the process."""

    operator: Operator | None = None
    waits: bool = False
    wrong: str = ""

    def healthy(self) -> str:
        return self.wrong

    def ready(self) -> str:
        if self.wrong or self.waits:
            return self.wrong
        return "" if self.operator is not None and self.operator.synced else "not everything is listed yet"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until told to stop; the exit status."""
    options = _parser().parse_args(arguments)
    log_json()
    logging.getLogger().setLevel(options.log_level.upper())
    logging.getLogger("kopf").setLevel(logging.WARNING)  # it has a line for each event of each object
    try:
        config = Config.from_environment()
        return asyncio.run(_run(options, config))
    except ConfigError as error:
        print(error.render(), file=sys.stderr)  # noqa: T201
        return 2
    except AgentflyError as error:
        logger.error("%s", error.render())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="agentfly_operator", description="The agentfly operator.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--all-namespaces", "-A", action="store_true", help="act in all namespaces")
    where.add_argument(
        "--namespace", "-n", action="append", default=[], help="act in this one; may be repeated"
    )
    parser.add_argument(
        "--listen", default="0.0.0.0:8080", help="HOST:PORT of /healthz, /readyz and /metrics"
    )
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser


async def _run(options: argparse.Namespace, config: Config) -> int:
    host, _, port = str(options.listen).rpartition(":")
    if not port.isdigit():
        raise ConfigError(
            f"--listen: {options.listen} is not HOST:PORT", hints=["write it as in 0.0.0.0:8080"]
        )
    metrics, state, stop = Metrics(), _State(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    login = find_login()
    async with Web(host, int(port), metrics, state.healthy, state.ready), Kube(USER_AGENT, login) as kube:
        lease = LeaderLease(kube, config.namespace, config.identity)
        state.waits = True
        if await _first(stop.wait(), lease.acquire()) == 0:
            return 0
        state.waits = False
        metrics.leader.set(1)
        held = asyncio.create_task(lease.hold(), name="lease")
        operator = state.operator = Operator(kube, login, config, options.namespace, lease, metrics)
        try:
            return await _act(operator, held, stop, state)
        finally:
            held.cancel()
            await asyncio.wait({held})
            await lease.release()
            metrics.leader.set(0)


async def _act(operator: Operator, held: "asyncio.Task[None]", stop: asyncio.Event, state: _State) -> int:
    """Act until told to stop; 1 if that was not why it ended."""

    async def work() -> str:
        async with operator:
            return await operator.ended()

    job = asyncio.create_task(work(), name="operator")
    stopped = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({job, stopped, held}, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            return 0
        state.wrong = "the lease was lost" if held.done() else _why(job)
        logger.error("%s: this process ends", state.wrong)
        return 1
    finally:
        for task in (job, stopped):
            task.cancel()
        await asyncio.wait({job, stopped})


def _why(job: "asyncio.Task[str]") -> str:
    error = job.exception()
    return job.result() if error is None else f"the operator ended: {error}"


async def _first(*waits: Coroutine[Any, Any, object]) -> int:
    """Which of these ends first; the others are cancelled. What it raises is raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        number = min(tasks.index(task) for task in done)
        tasks[number].result()
        return number
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
