"""Network and mount namespaces of a cluster: for the control plane and for each node, joined by a bridge.

Guarantees:
1. Nothing in them can leave the machine: there is no route out, and no interface of the machine is touched.
2. Every address, mount and rule in them goes with the last of their processes.
3. The control plane has 10.250.0.1; node N has 10.250.0.(10+N) and the pods 10.244.N.0/24.
"""

import dataclasses
import os
import subprocess
from pathlib import Path

from tests.cluster.api import wait
from tests.cluster.machine import ClusterError, tool
from tests.cluster.processes import Process, enter, start

CONTROL = "10.250.0.1"
SERVICES = "10.96.0.0/16"
PODS = "10.244.0.0/16"
API_SERVICE = "10.96.0.1"
DNS_SERVICE = "10.96.0.10"
NETWORK = 24


def node_address(number: int) -> str:
    """The address of a node, counted from 1."""
    return f"10.250.0.{10 + number}"


def pod_range(number: int) -> str:
    """The addresses of the pods of a node."""
    return f"10.244.{number}.0/24"


@dataclasses.dataclass(frozen=True)
class Space:
    """The namespaces that a process holds open."""

    holder: Process

    def run(self, *command: str, stdin: str | None = None, timeout_s: float = 60.0) -> str:
        """Runs a command inside and returns what it printed.

        Raises:
            ClusterError: it failed.
        """
        done = subprocess.run(
            [*enter(self.holder), *command],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode != 0:
            raise ClusterError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout


def make(groups: tuple[Path, ...], log: Path) -> Space:
    """New namespaces, held by a process in these groups.

    Raises:
        Unavailable: unshare, nsenter, ip or sysctl is not installed.
        ClusterError: the machine does not allow it.
    """
    for name, package in (("unshare", "util-linux"), ("nsenter", "util-linux"), ("ip", "iproute2")):
        tool(name, f"apt install {package}")
    command = ["unshare", "--net", "--mount", "--propagation=private", "sleep", "infinity"]
    holder = start(command, log, groups=groups)
    own = os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/mnt")

    def apart() -> bool:
        if not holder.alive:
            raise ClusterError("unshare: ended", hints=[f"see {log}"])
        theirs = tuple(os.readlink(f"/proc/{holder.pid}/ns/{kind}") for kind in ("net", "mnt"))
        cmdline = Path(f"/proc/{holder.pid}/cmdline").read_bytes()
        return theirs[0] != own[0] and theirs[1] != own[1] and cmdline.startswith(b"sleep")

    wait("namespaces", apart, 10.0)
    space = Space(holder)
    space.run("ip", "link", "set", "lo", "up")
    _sysctl(space, "ip_forward", "1")
    return space


def make_control(groups: tuple[Path, ...], log: Path) -> Space:
    """The namespaces of the control plane, with the bridge that nodes join."""
    space = make(groups, log)
    space.run("ip", "link", "add", "br0", "type", "bridge")
    space.run("ip", "addr", "add", f"{CONTROL}/{NETWORK}", "dev", "br0")
    space.run("ip", "link", "set", "br0", "up")
    return space


def make_node(control: Space, number: int, groups: tuple[Path, ...], log: Path) -> Space:
    """The namespaces of a node, joined to those of the control plane."""
    space = make(groups, log)
    port = f"node{number}"
    peer = ("peer", "name", "eth0", "netns", str(space.holder.pid))
    control.run("ip", "link", "add", port, "type", "veth", *peer)
    control.run("ip", "link", "set", port, "master", "br0", "up")
    space.run("ip", "addr", "add", f"{node_address(number)}/{NETWORK}", "dev", "eth0")
    space.run("ip", "link", "set", "eth0", "up")
    # What is sent to a Service is rewritten after a route was found, so that there must be one.
    space.run("ip", "route", "add", SERVICES, "dev", "eth0")
    # Pods of other nodes go by the control plane, which knows where each range is.
    space.run("ip", "route", "add", PODS, "via", CONTROL)
    route_pods(control, number)
    return space


def route_pods(control: Space, number: int) -> None:
    """Tells the control plane where the pods of a node are."""
    control.run("ip", "route", "replace", pod_range(number), "via", node_address(number))


def _sysctl(space: Space, name: str, value: str) -> None:
    space.run("sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{name}")
