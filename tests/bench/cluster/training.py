"""How long a TrainingRun takes to its first step, to give back what it holds, and to go on.

Guarantees:
1. It is the scene of `make e2e`: the manifests that are shipped, real vLLM, real verl, real sandboxes.
"""

import asyncio
import logging

from tests.bench.report import Section, Table
from tests.cluster.cluster import Cluster
from tests.cluster.demo.times import Times
from tests.cluster.demo.training import Training, archives, environments

logger = logging.getLogger("tests.bench")

STEPS, PAUSE_AFTER = 16, 2


async def measure(cluster: Cluster) -> Times:
    """The times of the quickstart's run, on a cluster with a node.

    Raises:
        Unavailable: this machine has no environment that fits.
        RuntimeError: the run was at its end before it could be suspended.
    """
    return await asyncio.to_thread(_measure, cluster)


def _measure(cluster: Cluster) -> Times:
    homes = environments()
    cluster.import_image(*archives(homes))
    scene = Training(cluster, lambda text: logger.info("%s", text.splitlines()[0] if text else ""))
    scene.run(homes, STEPS, PAUSE_AFTER)
    if scene.times.next_step is None:
        raise RuntimeError(f"training: {STEPS} steps were done before the run was suspended")
    return scene.times


def section(found: Times) -> Section:
    """The page's part."""
    rows = [
        ["applied until every role answers", _cell(found.roles_ready)],
        ["applied until it makes steps", _cell(found.first_step)],
        ["asked to suspend until it is, with a checkpoint", _cell(found.suspended)],
        ["asked to suspend until no pod and no server of it is left", _cell(found.released)],
        ["asked to go on until it makes steps again", _cell(found.next_step)],
    ]
    return Section("A training run on a node", _TEXT, [], [Table("Times of a run", _WHAT, ["", "s"], rows)])


def _cell(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.0f}"


_TEXT = (
    "The quickstart's TrainingRun on a real node, where operator, broker, vLLM, verl, sandboxes and API "
    "server share the cores of one machine without a GPU."
)
_WHAT = (
    f"By the times of its conditions, in whole seconds; once, with a pause after {PAUSE_AFTER} of {STEPS} "
    "steps. The first span has the preparation in it, which makes the model on one core. Images are on the "
    "node already."
)
