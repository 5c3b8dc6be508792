"""A cluster of one folder: up, down, its components, and the faults that tests cause in it.

Guarantees:
1. `up` returns when the cluster answers and creates pods; if it fails, nothing of it is left.
2. `down` leaves no process, mount, address, group or file, whoever started the cluster and however it ended.
3. A killed component stays dead until it is restarted, and is the same then: same flags, same address.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.cluster import control_plane, images, kueue, network, space, state
from tests.cluster.api import Api, wait
from tests.cluster.audit import Audit
from tests.cluster.binaries import binaries
from tests.cluster.control_plane import Component
from tests.cluster.groups import Groups
from tests.cluster.machine import ClusterError, need_root
from tests.cluster.node import Kind, Node, import_image, mount
from tests.cluster.node import components as node_components
from tests.cluster.node import works as node_works
from tests.cluster.pki import Authority
from tests.cluster.processes import Process, enter, start
from tests.cluster.space import Space
from tests.cluster.state import Running, State

READY_S = 60.0
MARK = ".agentfly-cluster"
"""A file in every cluster's folder: no other folder is ever removed."""
FORWARD = Path(__file__).with_name("forward.py")
LAST_WORDS = 1500
NODE_PARTS: dict[str, Callable[[Node, Space], bool]] = {
    "containerd": node_works,
    "kube-proxy": network.proxy_works,
    "kube-router": network.router_works,
}
"""How to see that a part of a node works."""


class Cluster:
    """The cluster whose files are in ``folder``, running or not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.logs = self.folder / "logs"
        self.kubeconfig = self.folder / "admin.kubeconfig"
        """For programs of this machine, by a forwarded port of its loopback."""
        self.inside_kubeconfig = self.folder / "inside.kubeconfig"
        """For programs that run inside the cluster's namespaces."""

    @property
    def group(self) -> str:
        """The name of its control groups."""
        return state.group_name(self.folder)

    @property
    def _state(self) -> State:
        found = State.read(self.folder / "cluster.json")
        if found is None:
            raise ClusterError(f"cluster: {self.folder} is not up", hints=["make cluster-up"])
        return found

    @property
    def api(self) -> Api:
        """The API server as its administrator."""
        return Api(self.kubeconfig)

    @property
    def kubectl_path(self) -> Path:
        """The kubectl of the cluster's own version."""
        return binaries("kubernetes") / "kubectl"

    def is_up(self) -> bool:
        """Whether every component runs and the API server is ready."""
        found = State.read(self.folder / "cluster.json")
        if found is None or not all(one.process.alive for one in found.running.values()):
            return False
        return self.api.ready()

    def up(
        self,
        *,
        nodes: Sequence[Kind] = (),
        owner: Process | None = None,
        flags: Sequence[str] = (),
        gates: Sequence[str] = (),
    ) -> None:
        """Starts it; what an earlier one here, or a dead owner, left is removed first.

        Args:
            nodes: the kind of each node.
            owner: the process with which the cluster ends, at the next `up` of any cluster; None: it stays.
            flags: more flags of the API server; of a repeated flag the last one counts.
            gates: feature gates to switch on in the API server and in kubelets, for example ImageVolume.

        Raises:
            Unavailable: this machine cannot run it.
            ClusterError: a component does not come up.
        """
        need_root()
        etcd, kubernetes = binaries("etcd"), binaries("kubernetes")
        sweep_orphans()
        self.down()
        self.logs.mkdir(parents=True)
        (self.folder / MARK).touch()
        state.register(self.folder, owner)
        try:
            on = [f"--feature-gates={','.join(f'{gate}=true' for gate in gates)}"] if gates else []
            self._start(etcd, kubernetes, (*on, *flags))
            for kind in nodes:
                self.add_node(kind, gates)
        except BaseException:
            self.down(keep_logs=True)
            raise

    def add_node(self, kind: Kind, gates: Sequence[str] = ()) -> Node:
        """Adds a node and waits until it is Ready; it is called ``node1``, ``node2``..

        Raises:
            Unavailable: this machine cannot run it.
            ClusterError: it does not become Ready.
        """
        found = self._state
        node = Node(len(found.nodes) + 1, kind, self.folder)
        node.folder.mkdir()
        groups = Groups(found.group).make("system")
        Groups(found.group).make(node.name)
        inside = space.make_node(self.space("control"), node.number, groups, self.logs / f"{node.name}.log")
        found.spaces[node.name] = inside.holder
        found.nodes.append(kind)
        found.write(self.folder / "cluster.json")
        mount(node, inside)
        authority, cgroup = Authority(self.folder / "pki"), f"/{found.group}/{node.name}"
        kubernetes = binaries("kubernetes")
        containerd, kubelet = node_components(node, authority, kubernetes, cgroup, gates)
        self._launch(found, containerd)
        self._await(containerd.name)
        for image in (images.pause(), network.coredns_image()):
            import_image(node, inside, image)
        if node.number == 1:
            network.install_coredns(self.api)
        for component in (kubelet, *network.components(node, authority, kubernetes)):
            self._launch(found, component)
            self._await(component.name)
        wait("CoreDNS", lambda: network.dns_works(self.api), READY_S, f"see {self.logs}")
        return node

    def nodes(self) -> list[Node]:
        """The nodes that were added."""
        return [Node(number, kind, self.folder) for number, kind in enumerate(self._state.nodes, 1)]

    def define_kueue(self) -> None:
        """Defines Kueue's kinds, and waits until the API server serves them."""
        folder = str(kueue.definitions(binaries("kueue")))
        # Applied by the server: the definition of workloads is too large for an annotation.
        self.kubectl("apply", "--server-side", "-f", folder)
        self.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", folder, timeout_s=90.0)

    def add_kueue(self) -> None:
        """Starts Kueue's controller, whose kinds are defined, with its webhooks.

        Raises:
            ClusterError: it does not become ready.
        """
        program, authority = binaries("kueue"), Authority(self.folder / "pki")
        self.kubectl("create", "namespace", kueue.NAMESPACE)
        found = self._state
        self._launch(found, kueue.component(self.folder, program, authority, self.inside_kubeconfig))
        self._await("kueue")
        self.kubectl("apply", "--server-side", "-f", "-", stdin=kueue.webhooks(program, authority))

    def import_image(self, *archives: Path) -> None:
        """Puts the images of docker-archives or OCI archives into every node."""
        for node in self.nodes():
            for archive in archives:
                import_image(node, self.space(node.name), archive)

    def down(self, *, keep_logs: bool = False) -> None:
        """Stops everything and removes its files. Nothing to stop is no error.

        Raises:
            ClusterError: the folder has other files than a cluster's; it is left as it is.
        """
        if self.folder.exists() and any(self.folder.iterdir()) and not (self.folder / MARK).exists():
            raise ClusterError(
                f"folder: {self.folder} is not empty and was not made for a cluster",
                hints=["give --dir a folder that does not exist yet"],
            )
        Groups(self.group).sweep()
        if keep_logs:
            (self.folder / "cluster.json").unlink(missing_ok=True)
        elif self.folder.exists():
            shutil.rmtree(self.folder)
        state.forget(self.folder)

    def pid(self, name: str) -> int:
        """The process of a component, for example ``kube-apiserver``."""
        return self._one(self._state, name).process.pid

    def names(self) -> dict[str, bool]:
        """Every component, and whether it runs."""
        return {name: one.process.alive for name, one in self._state.running.items()}

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to a component, for example SIGSTOP."""
        self._one(self._state, name).process.signal(number)

    def kill(self, name: str) -> None:
        """Kills a component with SIGKILL; it stays dead."""
        self._one(self._state, name).process.stop()

    def restart(self, name: str) -> float:
        """Kills a component if it runs, starts it anew and waits until it works; seconds until then."""
        found = self._state
        one = self._one(found, name)
        one.process.stop()
        self._launch(found, one.component)
        return self._await(name)

    def cut(self) -> None:
        """Resets every connection from this machine to the API server, and each new one until `mend`."""
        self.signal("forward", signal.SIGUSR1)

    def mend(self) -> None:
        """Ends `cut`."""
        self.signal("forward", signal.SIGUSR2)

    def open_port(self, target: str, where: str = "control") -> int:
        """A port of this machine's loopback that leads to an address in the cluster, until it is down.

        Args:
            target: HOST:PORT, a pod's address for example; Services only from a node.
            where: from whose namespaces it is reached. From a node's, policies do not count.
        """
        found, port = self._state, _free_port()
        self._launch(found, self._forward(found, f"forward-{port}", port, target, where))
        self._await(f"forward-{port}")
        return port

    def audit(self) -> Audit:
        """Counts the requests to the API server that are made inside a block."""
        return Audit(
            self.folder / "audit.log", lambda name: self.api.call("GET", f"/api/v1/namespaces/{name}")
        )

    def kubectl(
        self, *args: str, stdin: str | None = None, check: bool = True, timeout_s: float = 60.0
    ) -> str:
        """What kubectl prints.

        Raises:
            ClusterError: it fails, and ``check``.
        """
        return kubectl(self.kubectl_path, self.kubeconfig, args, stdin, check, timeout_s)

    def x(
        self, *command: str, where: str = "control", stdin: str | None = None, timeout_s: float = 60.0
    ) -> str:
        """Runs a command in the network and mount namespace of the control plane or of a node."""
        return self.space(where).run(*command, stdin=stdin, timeout_s=timeout_s)

    def space(self, name: str) -> Space:
        """The namespaces of the control plane (``control``) or of a node."""
        return Space(self._state.spaces[name])

    def enter(self, where: str = "control") -> list[str]:
        """The beginning of a command that runs there."""
        return list(enter(self._state.spaces[where]))

    def _start(self, etcd: Path, kubernetes: Path, flags: tuple[str, ...]) -> None:
        groups = Groups(self.group).make("system")
        authority = Authority(self.folder / "pki")
        control = space.make_control(groups, self.logs / "control.log")
        port = _free_port()
        authority.kubeconfig(
            self.kubeconfig, f"https://127.0.0.1:{port}", "kubernetes-admin", "system:masters"
        )
        authority.kubeconfig(
            self.inside_kubeconfig, control_plane.SERVER, "kubernetes-admin", "system:masters"
        )
        found = State(self.group, port, [], {"control": control.holder})
        target = f"{space.CONTROL}:{control_plane.PORT}"
        self._launch(found, self._forward(found, "forward", port, target, "control"))
        self._await("forward")
        for component in control_plane.components(self.folder, authority, etcd, kubernetes, flags):
            self._launch(found, component)
            self._await(component.name)

    def _forward(self, found: State, name: str, port: int, target: str, where: str) -> Component:
        holder = found.spaces[where]
        command = (sys.executable, "-I", str(FORWARD), str(port), str(holder.pid), target)
        return Component(name, command, space="")

    def _launch(self, found: State, component: Component) -> None:
        groups = Groups(found.group).make("system")
        inside = found.spaces[component.space] if component.space else None
        log = self.logs / f"{component.name}.log"
        process = start(component.command, log, groups=groups, inside=inside, env=component.env)
        found.running[component.name] = Running(component, process)
        found.write(self.folder / "cluster.json")

    def _await(self, name: str) -> float:
        process = self._one(self._state, name).process

        def works() -> bool:
            if not process.alive:
                raise ClusterError(f"{name}: ended: {self._last_words(name)}")
            return self._works(name)

        return wait(name, works, READY_S, f"see {self.logs / name}.log")

    def _works(self, name: str) -> bool:
        if name.startswith("forward"):
            command = self._one(self._state, name).component.command
            return _listens(int(command[3]))
        if (control := self._control_works(name)) is not None:
            return control
        for node in self.nodes():
            if name == node.component("kubelet"):
                return self._ready(node.name) and self._knows_its_pods(node.name)
            for what, works in NODE_PARTS.items():
                if name == node.component(what):
                    return works(node, self.space(node.name))
        return True

    def _control_works(self, name: str) -> bool | None:
        """Whether a part of the control plane works; None of another part."""
        if name == "kube-apiserver":  # it waits for etcd itself
            return self.api.ready()
        if name == "kube-controller-manager":  # without it no pod is admitted
            return self.api.exists("/api/v1/namespaces/default/serviceaccounts/default")
        return kueue.works(self.space("control")) if name == "kueue" else None

    def _ready(self, node: str) -> bool:
        status, found = self.api.call("GET", f"/api/v1/nodes/{node}")
        conditions = found["status"].get("conditions", ()) if status == 200 else ()
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def _knows_its_pods(self, node: str) -> bool:
        """A kubelet that was started anew is healthy before it knows its pods."""
        status, known = self.api.call("GET", f"/api/v1/nodes/{node}/proxy/pods")
        bound = self.api.get(f"/api/v1/pods?fieldSelector=spec.nodeName={node}")
        return status == 200 and _uids(bound) <= _uids(known)

    def _last_words(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text(errors="replace")[-LAST_WORDS:]

    @staticmethod
    def _one(found: State, name: str) -> Running:
        if name not in found.running:
            raise ClusterError(f"component: {name} is none of {', '.join(found.running)}")
        return found.running[name]


def kubectl(
    program: Path | str,
    kubeconfig: Path,
    args: Sequence[str],
    stdin: str | None,
    check: bool,
    timeout_s: float,
) -> str:
    """What kubectl prints.

    Raises:
        ClusterError: it fails, and ``check``.
    """
    done = subprocess.run(
        [str(program), f"--kubeconfig={kubeconfig}", *args],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "KUBECACHEDIR": str(kubeconfig.parent / "kubectl-cache")},
    )
    if check and done.returncode != 0:
        raise ClusterError(f"kubectl {' '.join(args)}: {done.stderr.strip()}")
    return done.stdout


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5.0).close()
    except OSError:
        return False
    return True


def _uids(pods: dict[str, Any]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods["items"] or ()}


def sweep_orphans() -> None:
    """Removes clusters whose owner is gone."""
    for folder, groups in state.orphans():
        groups.sweep()
        shutil.rmtree(folder, ignore_errors=True)
        state.forget(folder)


@contextlib.contextmanager
def running(
    folder: Path, *, nodes: Sequence[Kind] = (), flags: Sequence[str] = (), gates: Sequence[str] = ()
) -> Iterator[Cluster]:
    """A cluster for the length of a block; arguments as of `Cluster.up`."""
    cluster = Cluster(folder)
    cluster.up(nodes=nodes, owner=Process.of(os.getpid()), flags=flags, gates=gates)
    try:
        yield cluster
    finally:
        cluster.down()
