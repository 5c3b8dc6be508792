"""Resets, rollouts and commands in real pods, measured in the network of their node.

Guarantees:
1. What is waited for has a deadline; what failed is told with its last words.
"""

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.bench.cluster.inside import ALL_S, AT_ONCE, FILES, FRESH, GROUP, TASKS, WIDTH
from tests.bench.report import Ratio, Section, Table, milliseconds
from tests.bench.stats import Series, ratio
from tests.cluster import images, product
from tests.cluster.api import wait
from tests.cluster.cluster import Cluster

logger = logging.getLogger("tests.bench")

ROOT = Path(__file__).parents[3]
SPACE = "pods"
UP_S = 30.0
LAST_WORDS = 3000
RESET_S = 0.020
RESET_TIMES, ROLLOUT_TIMES = 50, 10


async def measure(cluster: Cluster) -> dict[str, Any]:
    """What ``inside`` tells, on a cluster with a node."""
    return await asyncio.to_thread(_measure, cluster)


def _measure(cluster: Cluster) -> dict[str, Any]:
    cluster.import_image(images.python(), product.sandboxd_image())
    labels = {"pod-security.kubernetes.io/enforce": "baseline"}
    cluster.api.create("/api/v1/namespaces", {"metadata": {"name": SPACE, "labels": labels}})
    root = f"/api/v1/namespaces/{SPACE}"
    wait("config map", lambda: cluster.api.exists(f"{root}/configmaps/kube-root-ca.crt"), UP_S)
    wait("service account", lambda: cluster.api.exists(f"{root}/serviceaccounts/default"), UP_S)
    logger.info("resets, commands and rollouts in pods")
    command = [*cluster.enter("node1"), sys.executable, "-m", "tests.bench.cluster.inside"]
    command += [str(cluster.inside_kubeconfig), SPACE, images.PYTHON]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ALL_S + 30, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"in the node: {done.stderr[-LAST_WORDS:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def section(found: dict[str, Any]) -> Section:
    """The page's part."""
    resets = {name: Series(repeats) for name, repeats in found["resets"].items()}
    execs = {
        name: {what: Series(repeats) for what, repeats in of.items()} for name, of in found["execs"].items()
    }
    rollouts = {name: Series([[rate]]) for name, rate in found["rollouts"].items()}
    fresh, created = resets["delete and create"], resets["create"]
    most = resets[str(FILES[-1])]
    ratios = [
        Ratio(
            "pod deleted and another created",
            f"verified reset, {files:,} changed files",
            ratio(fresh, resets[str(files)]),
        )
        for files in FILES
    ]
    ratios += [
        Ratio(
            "pod created, none deleted", f"verified reset, {FILES[-1]:,} changed files", ratio(created, most)
        ),
        Ratio(
            "no-op rollouts per second, reset",
            "the same, deleted and created",
            ratio(rollouts["reset"], rollouts["fresh"]),
        ),
        Ratio(
            "`/bin/true` by pods/exec of the API server",
            "the same by the pod's address",
            ratio(execs["api"]["one"], execs["pod"]["one"]),
        ),
        Ratio(
            f"`/bin/true` per second by the pod's address, {AT_ONCE} at once",
            "the same by pods/exec",
            ratio(execs["pod"]["rate"], execs["api"]["rate"]),
        ),
    ]
    return Section("Real pods", _TEXT, ratios, [_resets(resets), _rollouts(rollouts), _execs(execs)])


def _resets(resets: dict[str, Series]) -> Table:
    most = resets[str(FILES[-1])]
    times = ratio(resets["delete and create"], most).middle
    text = (
        "Milliseconds from the call until the next lease may begin, in a pod of security `baseline` with "
        f"one core. Bars: p50 below {1000 * RESET_S:.0f} ms with {FILES[-1]:,} changed files, "
        f"{_word(most.percentile(50) < RESET_S)}; {RESET_TIMES} times as fast as to delete and create, "
        f"{_word(times >= RESET_TIMES)}."
    )
    rows = [[f"reset, {files:,} changed files", *_cells(resets[str(files)])] for files in FILES]
    rows += [[f"pod, {name}", *_cells(resets[name])] for name in ("delete and create", "create")]
    return Table("Resets of pods", text, _COLUMNS, rows)


def _rollouts(rollouts: dict[str, Series]) -> Table:
    times = ratio(rollouts["reset"], rollouts["fresh"]).middle
    text = (
        f"{TASKS} tasks of {GROUP} rollouts that run one command that does nothing, {WIDTH} at a time on "
        f"{WIDTH} pods; the side that deletes a pod after each and creates another one plays {FRESH}, and "
        f"rates are compared. Bar: more than {ROLLOUT_TIMES} times as many, {_word(times > ROLLOUT_TIMES)}. "
        "Published for 50 tasks of 40 by agent-sandbox, on other hardware: 416 s, which is 4.8 a second."
    )
    rows = [[f"{rollouts[side].percentile(50):.2f}" for side in ("reset", "fresh")]]
    return Table("No-op rollouts in pods", text, ["reset /s", "deleted and created /s"], rows)


def _execs(execs: dict[str, dict[str, Series]]) -> Table:
    text = (
        "`/bin/true` in one pod. *By the pod's address*: `SandboxClient.exec`, a kept connection. *By "
        "pods/exec*: a WebSocket of aiohttp for each command, protocol v5.channel.k8s.io, from the call to "
        f"the status: API server, kubelet and container runtime take part. Rates are of {AT_ONCE} at once."
    )
    rows = [
        [name, *_cells(execs[key]["one"]), f"{execs[key]['rate'].percentile(50):.1f}"]
        for key, name in (("pod", "by the pod's address"), ("api", "by pods/exec"))
    ]
    return Table("Commands in pods", text, [*_COLUMNS, "/s"], rows)


def _cells(series: Series) -> list[str]:
    return [milliseconds(series.percentile(percent)) for percent in (50, 99)] + [str(len(series))]


def _word(holds: bool) -> str:
    return "held" if holds else "missed"


_COLUMNS = ["", "p50 ms", "p99 ms", "samples"]
_TEXT = (
    "A real node with containerd, a pod as its members are made by the product's runner, and a client in the "
    "node's network, as a worker pod is. *Verified reset*: a lease changed files, of which four fifths are "
    "new and one fifth are the image's own; its processes and files are removed and the sandbox is verified. "
    "Both sides alternate. Image and daemon are on the node already, so that nothing is pulled."
)
