"""What a node consists of: containerd and kubelet, in namespaces of its own, with their configuration.

Guarantees:
1. Two kinds, which differ as real ones do: `containerd2` (containerd 2 and runc 1.5, user namespaces) and
   `debian` (Debian's containerd 1.6 and runc 1.1, none).
2. What they write to fixed places of a machine (/run, /var) is a copy that only the node sees.
3. Images are only what tests import; no node can pull.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import yaml

from tests.cluster import debian
from tests.cluster.binaries import binaries
from tests.cluster.control_plane import SERVER, Component
from tests.cluster.machine import SYSTEM_PATH, ClusterError
from tests.cluster.pki import Authority
from tests.cluster.space import DNS_SERVICE, Space, node_address, pod_range

Kind = Literal["containerd2", "debian"]
KINDS: tuple[Kind, ...] = ("containerd2", "debian")
PAUSE = "agentfly-test/pause:1"
MAX_PODS = 110
INSIDE = Path("/run/node")
"""Where a node sees its own folder: root of a user namespace must be able to pass all that is above."""


@dataclasses.dataclass(frozen=True)
class Node:
    """The node with this number, counted from 1, whose files are below ``cluster``."""

    number: int
    kind: Kind
    cluster: Path

    @property
    def name(self) -> str:
        """``node1``, ``node2``.."""
        return f"node{self.number}"

    @property
    def folder(self) -> Path:
        """Its files."""
        return self.cluster / self.name

    @property
    def socket(self) -> Path:
        """Where containerd listens, in the namespaces of the node."""
        return INSIDE / "containerd.sock"

    @property
    def ctr(self) -> list[str]:
        """The beginning of a containerd command, in the namespaces of the node."""
        program = self.programs() / "ctr"
        return [str(program), f"--address={self.socket}", "--namespace=k8s.io"]

    def programs(self) -> Path:
        """The folder with containerd, its shim and ctr."""
        if self.kind == "containerd2":
            return binaries("containerd")
        return debian.unpacked("containerd", "runc") / "usr" / "bin"

    def runc(self) -> Path:
        """The program that makes containers."""
        if self.kind == "containerd2":
            return binaries("runc") / "runc"
        return debian.unpacked("containerd", "runc") / "usr" / "sbin" / "runc"

    def component(self, what: str) -> str:
        """The name of one of its components, for example ``node1-kubelet``."""
        return f"{self.name}-{what}"


def mount(node: Node, space: Space) -> None:
    """Gives a node its own /run and a copy of /var."""
    upper = node.folder / "var"
    for name in ("upper", "work"):
        (upper / name).mkdir(parents=True, exist_ok=True)
    options = f"lowerdir=/var,upperdir={upper / 'upper'},workdir={upper / 'work'}"
    space.run("mount", "-t", "overlay", "overlay", "-o", options, "/var")
    space.run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    space.run("mkdir", "-p", "/run/netns", "/run/lock", "/run/containerd", str(INSIDE))
    space.run("mount", "--bind", str(node.folder), str(INSIDE))


def components(
    node: Node, authority: Authority, kubernetes: Path, cgroup: str, gates: Sequence[str] = ()
) -> list[Component]:
    """containerd and kubelet of a node, in the order in which they start.

    Args:
        cgroup: the group below which the kubelet makes those of pods; it exists.
        gates: feature gates to switch on.
    """
    node.folder.mkdir(parents=True, exist_ok=True)
    configuration = node.folder / "containerd.toml"
    configuration.write_text(_containerd2(node) if node.kind == "containerd2" else _containerd1(node))
    (node.folder / "cni").mkdir(exist_ok=True)
    (node.folder / "cni" / "10-ptp.conflist").write_text(json.dumps(_network(node)))
    kubelet = node.folder / "kubelet.yaml"
    (node.folder / "resolv.conf").touch()
    certificate, key = authority.server(f"kubelet-{node.name}", [node.name, node_address(node.number)])
    kubelet.write_text(yaml.safe_dump(_kubelet(node, authority.ca, certificate, key, cgroup, gates)))
    user = f"system:node:{node.name}"
    kubeconfig = authority.kubeconfig(node.folder / f"{node.name}.kubeconfig", SERVER, user, "system:nodes")
    path = {"PATH": f"{node.programs()}:{node.runc().parent}:{SYSTEM_PATH}"}
    return [
        Component(
            node.component("containerd"),
            (str(node.programs() / "containerd"), "--config", str(configuration)),
            node.name,
            path,
        ),
        Component(
            node.component("kubelet"),
            (
                str(kubernetes / "kubelet"),
                f"--config={kubelet}",
                f"--kubeconfig={kubeconfig}",
                f"--hostname-override={node.name}",
                f"--node-ip={node_address(node.number)}",
                f"--root-dir={INSIDE / 'kubelet'}",
                f"--cert-dir={node.folder}",
                f"--node-labels=agentfly.test/containerd={node.kind}",
            ),
            node.name,
            path,
        ),
    ]


def import_image(node: Node, space: Space, archive: Path) -> None:
    """Puts the images of a docker-archive or OCI archive into a node.

    Raises:
        ClusterError: containerd does not take it.
    """
    space.run(*node.ctr, "images", "import", str(archive), timeout_s=300.0)


def works(node: Node, space: Space) -> bool:
    """Whether containerd answers."""
    try:
        space.run(*node.ctr, "version", timeout_s=5.0)
    except (ClusterError, TimeoutError):
        return False
    return True


def _plugins() -> Path:
    return debian.unpacked("containernetworking-plugins") / "usr" / "lib" / "cni"


def _containerd2(node: Node) -> str:
    return f"""\
version = 3
root = "{INSIDE}/containerd"
state = "{INSIDE}/containerd-state"
[grpc]
  address = "{node.socket}"
[ttrpc]
  address = "{node.socket}.ttrpc"
[plugins.'io.containerd.internal.v1.opt']
  path = "{INSIDE}/opt"
[plugins.'io.containerd.nri.v1.nri']
  disable = true
[plugins.'io.containerd.cri.v1.images']
  snapshotter = 'overlayfs'
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = '{PAUSE}'
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["{_plugins()}"]
    conf_dir = "{node.folder}/cni"
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = 'io.containerd.runc.v2'
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      BinaryName = "{node.runc()}"
      Root = "{INSIDE}/runc"
"""


def _containerd1(node: Node) -> str:
    return f"""\
version = 2
root = "{INSIDE}/containerd"
state = "{INSIDE}/containerd-state"
oom_score = 0
[grpc]
  address = "{node.socket}"
[ttrpc]
  address = "{node.socket}.ttrpc"
[plugins."io.containerd.internal.v1.opt"]
  path = "{INSIDE}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  disable_tcp_service = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{_plugins()}"
    conf_dir = "{node.folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "{node.runc()}"
        Root = "{INSIDE}/runc"
"""


def _network(node: Node) -> dict[str, object]:
    addresses = {
        "type": "host-local",
        "dataDir": str(INSIDE / "addresses"),
        "ranges": [[{"subnet": pod_range(node.number)}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [{"type": "ptp", "ipMasq": False, "ipam": addresses}],
    }


def _kubelet(
    node: Node, authority: Path, certificate: Path, key: Path, cgroup: str, gates: Sequence[str]
) -> dict[str, object]:
    endpoint = f"unix://{node.socket}"
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node_address(node.number),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(authority)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(certificate),
        "tlsPrivateKeyFile": str(key),
        "containerRuntimeEndpoint": endpoint,
        "imageServiceEndpoint": endpoint,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroup,
        "failCgroupV1": False,
        "failSwapOn": False,
        "enforceNodeAllocatable": [],
        "clusterDomain": "cluster.local",
        "clusterDNS": [DNS_SERVICE],
        "resolvConf": str(node.folder / "resolv.conf"),
        "podLogsDir": str(INSIDE / "pod-logs"),
        "volumePluginDir": str(INSIDE / "volume-plugins"),
        "maxPods": MAX_PODS,
        "serializeImagePulls": False,
        # Off: it would delete imported images, which nothing can pull again, on a disk that is nearly full.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
            "nodefs.inodesFree": "1%",
        },
        "kubeAPIQPS": 100,
        "kubeAPIBurst": 200,
        "eventRecordQPS": 0,
        "registryPullQPS": 0,
        "makeIPTablesUtilChains": False,
        "featureGates": dict.fromkeys(gates, True),
        # Renewed every quarter of it, so that some may be late on a busy machine.
        "nodeLeaseDurationSeconds": 20,
        "nodeStatusUpdateFrequency": "4s",
    }
