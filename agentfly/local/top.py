"""Runs, jobs and pools of a namespace on one screen, as their status has them.

Guarantees:
1. In a terminal it is one screen that is asked anew every `PAUSE_S` seconds, until Ctrl-C; elsewhere, and
   with ``once``, one plain table a kind.
2. What goes on stands before what is finished; within that, names are in order.
3. A status that is not there yet, or has fields of a newer release, is shown as far as it is known.
4. An API server that does not answer at the start is an error. Later it is told below what was seen last.
5. Nothing is changed, and three lists are all that a look costs.

Not here: what the numbers mean (`agentfly.api`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agentfly.api.reasons import ConditionType
from agentfly.errors import AgentflyError
from agentfly.kube import RESOURCE_POOLS, ROLLOUT_JOBS, TRAINING_RUNS, Kube, NotFound
from agentfly.local.look import WIDTH, duration
from agentfly.local.view import COLOURS

USER_AGENT = "agentfly-cli/0.1"
PAUSE_S = 2.0
_NONE = "-"
_OVER = ("Succeeded", "Failed")
_TOLD = (ConditionType.Stalled, ConditionType.Reconciling, ConditionType.Suspended, ConditionType.Failed)

Object = Mapping[str, Any]


@dataclass(frozen=True)
class Seen:
    """What there is in a namespace, as the API server returned it."""

    namespace: str
    runs: Sequence[Object] = ()
    jobs: Sequence[Object] = ()
    pools: Sequence[Object] = ()


def screen(seen: Seen, note: str = "") -> Group:
    """All that is seen, and a note below it."""
    parts: list[Table | Text] = [
        table
        for table in (run_table(seen.runs), job_table(seen.jobs), pool_table(seen.pools))
        if table.row_count
    ]
    if not parts:
        parts.append(Text(f"namespace {seen.namespace}: no runs, jobs or pools"))
    return Group(*parts, *([Text(note, style="yellow")] if note else []))


def run_table(runs: Sequence[Object]) -> Table:
    """TrainingRuns."""
    table = _table("Run", "Status", right=("Step", "Reward", "ETA", "Attempt"))
    for run in _in_order(runs):
        status = _block(run, "status")
        progress = _block(status, "progress")
        total = progress.get("totalSteps") or _block(run, "spec").get("steps")
        eta = progress.get("etaSeconds")
        table.add_row(
            _name(run),
            _phase(status),
            f"{progress.get('step', 0)}/{total or _NONE}",
            _reward(_block(progress, "metrics").get("reward")),
            _NONE if not eta else duration(eta),
            str(status.get("attempt") or _NONE),
            _told(status),
        )
    return table


def job_table(jobs: Sequence[Object]) -> Table:
    """RolloutJobs; done are those with any outcome."""
    table = _table("Job", "Status", right=("Done", "Reward", "Failed", "Workers"))
    for job in _in_order(jobs):
        status = _block(job, "status")
        tasks = _block(status, "tasks")
        done = sum(tasks.get(outcome, 0) for outcome in ("scored", "masked", "failed"))
        table.add_row(
            _name(job),
            _phase(status),
            f"{done}/{tasks.get('total') or _NONE}",
            _reward(_block(status, "reward").get("mean")),
            str(tasks.get("failed", 0)),
            str(status.get("workers", 0)),
            _told(status),
        )
    return table


def pool_table(pools: Sequence[Object]) -> Table:
    """ResourcePools. Ready members are those that are free or leased."""
    table = _table("Pool", "Type", right=("Ready", "Leased", "Queued", "Max"))
    for pool in _in_order(pools):
        spec, status = _block(pool, "spec"), _block(pool, "status")
        members, queue = _block(status, "members"), _block(status, "queue")
        ready = _condition(status, ConditionType.Ready)
        why = (
            "" if ready.get("status") == "True" else f"{ready.get('reason', '')}: {ready.get('message', '')}"
        )
        table.add_row(
            _name(pool),
            str(spec.get("type", _NONE)),
            str(members.get("ready", _NONE)),
            str(members.get("leased", _NONE)),
            str(queue.get("pending", _NONE)),
            str(_block(spec, "capacity").get("max", _NONE)),
            _aside(why.strip(": ")),
        )
    return table


def top(
    console: Console,
    *,
    namespace: str | None = None,
    kubeconfig: Path | None = None,
    context: str | None = None,
    once: bool = False,
) -> None:
    """Show a namespace on the console.

    Args:
        namespace, kubeconfig, context: as ``kubectl`` takes them; None is its default.
        once: print it and return, as where the console is no terminal.

    Raises:
        AgentflyError: there is no cluster, it has no agentfly, or it may not be asked.
    """
    with suppress(KeyboardInterrupt):
        asyncio.run(_top(console, namespace, kubeconfig, context, once or not console.is_terminal))


async def _top(
    console: Console, namespace: str | None, kubeconfig: Path | None, context: str | None, once: bool
) -> None:
    async with Kube.connect(USER_AGENT, kubeconfig=kubeconfig, context=context) as kube:
        where = namespace or kube.namespace
        first = await look(kube, where)
        if once:
            Console(file=console.file, width=WIDTH, no_color=True).print(screen(first))
            return
        with Live(screen(first), console=console, screen=True, auto_refresh=False) as live:
            again = partial(look, kube, where)
            await follow(first, again, partial(live.update, refresh=True), PAUSE_S)


async def follow(
    seen: Seen,
    again: Callable[[], Awaitable[Seen]],
    show: Callable[[Group], None],
    pause_s: float,
) -> None:
    """Look and show for ever, from what was seen first."""
    note = ""
    while True:
        show(screen(seen, note))
        await asyncio.sleep(pause_s)
        try:
            seen, note = await again(), ""
        except AgentflyError as error:
            note = f"{datetime.now():%H:%M:%S} not answered: {error.message}"


async def look(kube: Kube, namespace: str) -> Seen:
    """What there is now.

    Raises:
        AgentflyError: the cluster has no agentfly, or may not be asked.
    """
    asked = (kube.list(resource, namespace) for resource in (TRAINING_RUNS, ROLLOUT_JOBS, RESOURCE_POOLS))
    found = await asyncio.gather(*asked, return_exceptions=True)
    for failure in found:
        if isinstance(failure, NotFound):
            raise AgentflyError(
                f"namespace {namespace}: its cluster does not know agentfly",
                hints=["kubectl apply -k manifests/base", "or name another cluster: --context NAME"],
            ) from failure
        if isinstance(failure, BaseException):
            raise failure
    runs, jobs, pools = (each for each in found if isinstance(each, list))
    return Seen(namespace, runs, jobs, pools)


def _table(*left: str, right: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")  # the one that gives way where the screen is narrow
    return table


def _in_order(objects: Sequence[Object]) -> list[Object]:
    return sorted(objects, key=lambda each: (_block(each, "status").get("phase") in _OVER, _name(each)))


def _block(obj: Object, name: str) -> Object:
    """A part of an object, which may be absent."""
    found: Object = obj.get(name) or {}
    return found


def _name(obj: Object) -> str:
    return str(_block(obj, "metadata").get("name", ""))


def _phase(status: Object) -> Text:
    phase = str(status.get("phase") or "Pending")
    return Text(phase, style=COLOURS.get(phase, "cyan"))


def _reward(value: object) -> str:
    return _NONE if value is None else f"{float(str(value)):.3f}"


def _condition(status: Object, kind: ConditionType) -> Object:
    return next((each for each in status.get("conditions") or () if each["type"] == kind), {})


def _told(status: Object) -> Text:
    """What it waits for, or why it failed."""
    found = (_condition(status, kind) for kind in _TOLD)
    message = next((str(each["message"]) for each in found if each.get("status") == "True"), "")
    return _aside(message.split("\n", 1)[0])


def _aside(text: str) -> Text:
    return Text(text, style="dim", no_wrap=True, overflow="ellipsis")
