"""How operator and broker start where there are thousands of pods.

Guarantees:
1. The pods are members of one pool as a broker makes them, Running, each with a daemon that answers.
2. A process is ready when it has seen every pod: the operator has counted them, the broker has asked the
   daemon of each and offers it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentfly.api import ResourcePool
from agentfly.broker.pools import pool_spec
from agentfly.kube import PODS, Conflict, Kube, Obj
from agentfly.resources.names import member_prefix
from agentfly.resources.runners.kubernetes import Signer
from agentfly.resources.runners.kubernetes.pod import Start, sandbox_pod
from agentfly.resources.spec import ContainerSpec
from tests.bench.cluster import world
from tests.bench.cluster.processes import SEED, Usage, broker, cpu_s, daemons, peak_mb, until
from tests.bench.report import Ratio, Section, Table
from tests.bench.stats import Series, ratio
from tests.cluster.cluster import Cluster
from tests.integration.operator.world import fake_broker, install, operator

logger = logging.getLogger("tests.bench")

POOL = "shell"
COUNTS = (5_000, 10_000)
AT_ONCE = 32
SEEN_S = 120.0
SETTLE_S = 1.0
CPU_S, MEMORY_MB = 5.0, 200.0


@dataclass(frozen=True)
class Found:
    """What each process used, by number of pods."""

    operators: dict[int, Usage]
    brokers: dict[int, Usage]
    counts: Sequence[int]


async def measure(cluster: Cluster, folder: Path, kube: Kube, counts: Sequence[int] = COUNTS) -> Found:
    """Starts of both at every number of pods."""
    rights = await asyncio.to_thread(install, cluster)
    space = await world.namespace(cluster, kube, "starts")
    pool = await world.apply_pool(kube, space, POOL, min=counts[0], max=counts[-1])
    found = Found({}, {}, counts)
    made = 0
    async with daemons(cluster.kubeconfig, space, folder):
        for count in counts:
            await fill(kube, pool, range(made, count))
            made = count
            found.operators[count] = await operator_start(rights, space, folder, count)
            logger.info("%d pods, operator: %s", count, found.operators[count])
            found.brokers[count] = await broker_start(cluster, space, folder, count)
            logger.info("%d pods, broker: %s", count, found.brokers[count])
    return found


async def fill(kube: Kube, pool: Obj, numbers: range) -> None:
    """Member pods, until all run."""
    meta = pool["metadata"]
    spec = pool_spec(ResourcePool.model_validate(pool), platform="kubernetes").resource
    assert isinstance(spec, ContainerSpec)
    prefix, key = member_prefix(POOL), Signer(SEED).public_key
    owner = {"apiVersion": pool["apiVersion"], "kind": pool["kind"], "name": meta["name"], "uid": meta["uid"]}
    owner["controller"] = True
    left = iter(numbers)

    async def make() -> None:
        for number in left:
            start = Start(POOL, f"{prefix}-{number}", meta["namespace"], owner, f"{number:016x}")
            pod = sandbox_pod(start, spec, admin_key=key, sandboxd_image="agentfly/sandboxd:dev")
            pod["spec"]["nodeName"] = "fake-0"  # the scheduler is not what is measured
            with contextlib.suppress(Conflict):  # an earlier try of this very request
                await kube.create(PODS, pod)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(make())

    async def running() -> bool:
        path = f"{PODS.path(meta['namespace'])}?fieldSelector=status.phase!=Running&limit=1"
        return not (await kube.request("GET", path))["items"]

    await until("all pods run", running, SEEN_S, every_s=0.5)


async def operator_start(rights: Path, space: str, folder: Path, count: int) -> Usage:
    """Of an operator of this namespace, as far as that it has counted its pods."""
    async with fake_broker() as says:
        says.serves(POOL, ready=count, max=count)
        began = time.monotonic()
        with operator(rights, folder, says.url, namespaces=(space,)) as process:

            async def counted() -> bool:
                return await process.figure("agentfly_operator_member_pods") == count

            await until(f"the operator has seen {count} pods", counted, SEEN_S, process.log.read_text)
            took = time.monotonic() - began
            await asyncio.sleep(SETTLE_S)
            return Usage(process.cpu_s(), peak_mb(process.process.pid), took)


async def broker_start(cluster: Cluster, space: str, folder: Path, count: int) -> Usage:
    """Of a broker of this namespace, as far as that it offers every member."""
    async with broker(cluster.kubeconfig, space, folder) as at:
        await at.holds(POOL, count)
        took = time.monotonic() - at.began
        await asyncio.sleep(SETTLE_S)
        return Usage(cpu_s(at.process.pid), peak_mb(at.process.pid), took)


def section(found: Found) -> Section:
    """The page's part."""
    few, many = found.counts[0], found.counts[-1]
    ratios = []
    for name, by_count in (("operator", found.operators), ("broker", found.brokers)):
        for what, pick in (
            ("CPU seconds", "cpu_s"),
            ("memory", "peak_mb"),
            ("seconds until ready", "ready_s"),
        ):
            above, below = Series(), Series()
            above.add([getattr(by_count[many], pick)])
            below.add([getattr(by_count[few], pick)])
            ratios.append(
                Ratio(
                    f"{what} of the {name}'s start, {many} pods", f"the same, {few} pods", ratio(above, below)
                )
            )
    rows = [
        _row(name, count, by_count[count])
        for name, by_count in (("operator", found.operators), ("broker", found.brokers))
        for count in found.counts
    ]
    columns = ["", "pods", "CPU s", "peak MB", "s until ready", "bounds"]
    return Section("Starts among thousands of pods", _TEXT, ratios, [Table("Starts", _WHAT, columns, rows)])


def _row(name: str, count: int, used: Usage) -> list[str]:
    missed = [
        f"{what} missed"
        for what, holds in (("CPU", used.cpu_s < CPU_S), ("memory", used.peak_mb < MEMORY_MB))
        if not holds
    ]
    cells = [f"{used.cpu_s:.2f}", f"{used.peak_mb:.0f}", f"{used.ready_s:.1f}"]
    return [name, f"{count}", *cells, ", ".join(missed) or "held"]


_TEXT = (
    "Member pods of one pool, which only run as far as the API server shows, each with a daemon that "
    "answers. The operator is ready when it has counted them, the broker when it has asked the daemon of "
    "each who holds it and offers it. Twice the pods: a ratio of 2 is linear."
)
_WHAT = (
    f"From the start of the process. Bounds: less than {CPU_S:g} CPU seconds and {MEMORY_MB:.0f} MB, both "
    "with everything that the process has, Python and libraries too. The broker gives no member to anybody "
    "before that member's daemon said whether somebody holds it, which takes a connection and a request each."
)
