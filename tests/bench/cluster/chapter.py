"""The bench of the cluster as a whole: what it measures, and its chapter of the page.

Guarantees:
1. Clusters are made for it and gone after it, however it is left.
2. The chapter says of itself when, where and under which load it was measured: it may be older than the rest
   of the page.
"""

import contextlib
import logging
import os
import tempfile
from pathlib import Path

from agentfly.kube import Kube
from tests.bench.cluster import acquire, node, runs, starts, training
from tests.bench.machine import facts
from tests.bench.report import Section, chapter
from tests.cluster import images, product
from tests.cluster.cluster import running
from tests.cluster.demo.training import environments

logger = logging.getLogger("tests.bench")

TITLE = "On a Kubernetes cluster"
LIMITS = (
    "API server, etcd, scheduler, node, pods and client share the processor cores of one machine, so that "
    "all of them slow each other down: on a cluster of their own the same parts are faster. Pods that only "
    "run as far as the API server shows need no node, and nothing can be said by them about one. etcd does "
    "not wait for its disk."
)


async def measure() -> str:
    """The chapter.

    Raises:
        Unavailable: this machine cannot run a cluster.
    """
    described = facts("`python -m tests.bench cluster`, which `make bench` runs too")
    before = os.getloadavg()[0]
    images.python()
    product.sandboxd_image()
    environments()
    sections: list[Section] = []
    with tempfile.TemporaryDirectory(prefix="agentfly-bench-") as name:
        folder = Path(name)
        with contextlib.ExitStack() as stack:
            logger.info("a control plane")
            cluster = stack.enter_context(running(folder / "control"))
            starts.install(cluster)
            async with Kube.connect("agentfly-bench/1", kubeconfig=cluster.kubeconfig) as kube:
                sections.append(acquire.section(await acquire.measure(cluster, folder, kube)))
                logger.info("load %.1f", os.getloadavg()[0])
                sections.append(starts.section(await starts.measure(cluster, folder, kube)))
                logger.info("load %.1f", os.getloadavg()[0])
        with running(folder / "runs") as cluster:
            async with Kube.connect("agentfly-bench/1", kubeconfig=cluster.kubeconfig) as kube:
                sections.append(runs.section(await runs.measure(cluster, folder, kube)))
                logger.info("load %.1f", os.getloadavg()[0])
        with running(folder / "node", nodes=["containerd2"]) as cluster:
            sections.append(node.section(await node.measure(cluster)))
            logger.info("load %.1f", os.getloadavg()[0])
        with running(folder / "training", nodes=["containerd2"]) as cluster:
            sections.append(training.section(await training.measure(cluster)))
            logger.info("load %.1f", os.getloadavg()[0])
    load = ("load average of the minute before and at the end", f"{before:.1f}, {os.getloadavg()[0]:.1f}")
    return chapter(TITLE, sections, [*described[:-1], load], LIMITS)
