"""KubeRay's operator beside a test cluster: a process of this machine, without webhooks.

Guarantees:
1. Its kinds are defined when `defined` gives way, and gone, with all their objects, when it is left.
2. Its process looks at the given namespaces alone, and has ended when `running` is left.
"""

import contextlib
import os
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.cluster.api import wait
from tests.cluster.binaries import binaries
from tests.cluster.cluster import Cluster
from tests.cluster.machine import ClusterError

DEFINITIONS = "rayclusters.ray.io"
READY_S = 90.0
STOP_S = 20.0


@contextlib.contextmanager
def defined(cluster: Cluster) -> Iterator[None]:
    """KubeRay's kinds, for the length of a block.

    Raises:
        Unavailable: this machine cannot build KubeRay.
    """
    files = str(binaries("kuberay") / "bases")
    # Each is larger than what a client-side apply may leave in an annotation.
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", files)
    try:
        cluster.kubectl("wait", "--for=condition=Established", f"crd/{DEFINITIONS}", "--timeout=30s")
        yield
    finally:
        cluster.kubectl("delete", "--ignore-not-found", "--timeout=60s", "-f", files, timeout_s=90.0)


@contextlib.contextmanager
def running(cluster: Cluster, folder: Path, namespaces: Sequence[str]) -> Iterator[Path]:
    """KubeRay's operator for these namespaces, for the length of a block; gives its log.

    Args:
        folder: for its log.

    Raises:
        ClusterError: it does not come up.
    """
    port, log = _free_port(), folder / "kuberay.log"
    command = [
        str(binaries("kuberay") / "kuberay-operator"),
        "-enable-leader-election=false",
        "-metrics-addr=0",
        f"-health-probe-bind-address=127.0.0.1:{port}",
        f"-watch-namespace={','.join(namespaces)}",
        "-use-kubernetes-proxy=true",
    ]
    env = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "ENABLE_WEBHOOKS": "false"}
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=file)
    try:
        wait("KubeRay", lambda: _ready(process, port, log), READY_S, f"see {log}")
        yield log
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)


def _ready(process: "subprocess.Popen[bytes]", port: int, log: Path) -> bool:
    if process.poll() is not None:
        raise ClusterError(f"KubeRay: ended: {log.read_text(errors='replace')[-1500:]}")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
