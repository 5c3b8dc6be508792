"""What runs on this machine or in a cluster, as brokers tell it: pools and leases, as tables or as JSON.

Guarantees:
1. Without an address every data plane of this user that runs here is asked; one that ends meanwhile is left
   out, unless it was the only one. A namespace of a cluster has one broker.
2. An address that is none, a broker that does not answer, or none at all is an error that says what to do.
3. No token is shown: brokers do not tell them.

Not here: what the numbers mean (``agentfly.resources.lease``).
"""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from rich.table import Table

from agentfly.broker.client import BrokerClient
from agentfly.broker.proxied import ProxiedBroker
from agentfly.errors import AgentflyError
from agentfly.local.paths import BROKER
from agentfly.resources.errors import Infra
from agentfly.resources.lease import LeaseStatus, PoolStatus

WIDTH = 500  # a row is a line, in a narrow terminal and in a pipe as well
SCHEMES = ("unix://", "http://", "https://")

T = TypeVar("T")
Pools = dict[str, PoolStatus]
Leases = list[LeaseStatus]


def listening(parent: Path) -> list[str]:
    """The addresses of the brokers below this folder that somebody serves, in the order of their names."""
    return [f"unix://{path}" for path in sorted(parent.glob(f"*/{BROKER}")) if _answers(path)]


def pools(addresses: Sequence[str]) -> dict[str, Pools]:
    """The pools of each of these brokers, by address.

    Raises:
        AgentflyError: there is no broker, or none that answers.
    """
    return asyncio.run(_ask(addresses, BrokerClient.status))


def leases(addresses: Sequence[str]) -> dict[str, Leases]:
    """What is held at each of these brokers, by address.

    Raises:
        AgentflyError: there is no broker, or none that answers.
    """
    return asyncio.run(_ask(addresses, BrokerClient.leases))


def pools_of(cluster: ProxiedBroker, name: str) -> dict[str, Pools]:
    """As ``pools``, for the broker of a namespace, under this name.

    Raises:
        AgentflyError: there is none, or it may not be asked.
    """
    return {name: asyncio.run(cluster.pools())}


def leases_of(cluster: ProxiedBroker, name: str) -> dict[str, Leases]:
    """As ``leases``, likewise."""
    return {name: asyncio.run(cluster.leases())}


def pool_table(found: Pools, title: str | None) -> Table:
    """The pools of one broker. Ready members are those that are free or leased."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("Pool", "Type"):
        table.add_column(name, overflow="fold")
    for name in ("Ready", "Free", "Leased", "Starting", "Queued", "Max", "Hit%", "P99"):
        table.add_column(name, justify="right")
    table.add_column("Reason", overflow="fold")
    for name, status in sorted(found.items()):
        counts = (status.ready + status.leased, status.ready, status.leased, status.starting, status.queued)
        table.add_row(
            name,
            status.kind,
            *map(str, (*counts, status.max)),
            "-" if status.hit_ratio is None else f"{100 * status.hit_ratio:.0f}",
            "-" if status.acquire_p99_s is None else duration(status.acquire_p99_s),
            f"{status.reason}: {status.message}" if status.message else status.reason,
        )
    return table


def lease_table(found: Leases, title: str | None) -> Table:
    """What is held at one broker, the longest first."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("Lease", "Pool", "Member", "Owner", "Share"):
        table.add_column(name, overflow="fold")
    for name in ("Held for", "Expires in"):
        table.add_column(name, justify="right")
    for lease in sorted(found, key=lambda lease: (-lease.held_s, lease.lease_id)):
        names = (lease.lease_id, lease.pool, lease.member_id, lease.owner, lease.share or "-")
        table.add_row(*names, duration(lease.held_s), duration(lease.expires_in_s))
    return table


def as_json(found: dict[str, Pools] | dict[str, Leases], what: str) -> str:
    """The same for programs: a list with one object for each broker."""
    answers = [{"broker": address, what: _plain(content)} for address, content in found.items()]
    return json.dumps(answers, indent=2)


def duration(seconds: float) -> str:
    """A time for people: the two units that matter."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.1f}ms" if seconds < 0.00995 else f"{1000 * seconds:.0f}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def _plain(content: Pools | Leases) -> object:
    if isinstance(content, list):
        return [lease.model_dump() for lease in content]
    return {name: status.model_dump() for name, status in content.items()}


async def _ask(addresses: Sequence[str], question: Callable[[BrokerClient], Awaitable[T]]) -> dict[str, T]:
    for address in addresses:
        if not address.startswith(SCHEMES):
            raise AgentflyError(
                f"broker: {address} is no address", hints=["use unix:///path/to/broker or http://host:port"]
            )
    if not addresses:
        raise AgentflyError(
            "broker: no run is going on here",
            hints=["start one with agentfly run or agentfly rollout", "or name a broker: --broker ADDRESS"],
        )
    answers: dict[str, T] = {}
    failure: AgentflyError | None = None
    for address in addresses:
        try:
            async with BrokerClient(address) as client:
                answers[address] = await question(client)
        except Infra as error:
            failure = error
    if not answers and failure is not None:
        raise failure
    return answers


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0
