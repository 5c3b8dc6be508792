"""What makes the network of nodes a cluster's: Services, names and enforced NetworkPolicies.

Guarantees:
1. Services work by kube-proxy, names by CoreDNS, which runs in a pod with the labels that it has elsewhere: a
   policy that allows DNS by selector is the same one that a real cluster needs.
2. NetworkPolicies are enforced by kube-router, for pods in both directions. As in most clusters, a new pod's
   own traffic is free until its address is known (0.6 to 0.8 s), and open connections outlive a new policy.
3. The API server is no process of a node: a policy that shuts it out of a pod does so here, too.
"""

from pathlib import Path

from tests.cluster import debian, images
from tests.cluster.api import Api
from tests.cluster.binaries import binaries
from tests.cluster.control_plane import SERVER, Component
from tests.cluster.machine import SYSTEM_PATH, tool
from tests.cluster.node import Node
from tests.cluster.pki import Authority
from tests.cluster.space import DNS_SERVICE, PODS, SERVICES, Space

COREDNS = "agentfly-test/coredns:1"
COREFILE = """\
.:53 {
    errors
    ready
    kubernetes cluster.local in-addr.arpa {
        pods insecure
        ttl 5
    }
    cache 5 {
        denial 1000 1
    }
}
"""
DNS = "kube-dns"


def components(node: Node, authority: Authority, kubernetes: Path) -> list[Component]:
    """kube-proxy and kube-router of a node.

    Raises:
        Unavailable: iptables is not installed.
    """
    tool("iptables", "apt install iptables")
    proxy = authority.kubeconfig(node.folder / "proxy.kubeconfig", SERVER, "system:kube-proxy")
    router = authority.kubeconfig(
        node.folder / "router.kubeconfig", SERVER, "system:kube-router", "system:masters"
    )
    sets = debian.unpacked("ipset", "libipset13", "libmnl0")
    return [
        Component(
            node.component("kube-proxy"),
            (
                str(kubernetes / "kube-proxy"),
                "--proxy-mode=iptables",
                f"--kubeconfig={proxy}",
                f"--hostname-override={node.name}",
                f"--cluster-cidr={PODS}",
                "--iptables-min-sync-period=0s",
                # Its other limits cannot be written in a network namespace.
                "--conntrack-max-per-core=0",
                "--conntrack-tcp-timeout-established=0",
                "--conntrack-tcp-timeout-close-wait=0",
            ),
            node.name,
        ),
        Component(
            node.component("kube-router"),
            (
                str(binaries("kube-router") / "kube-router"),
                "--run-firewall=true",
                "--run-router=false",
                "--run-service-proxy=false",
                "--run-loadbalancer=false",
                "--enable-cni=false",
                f"--kubeconfig={router}",
                f"--hostname-override={node.name}",
                f"--service-cluster-ip-range={SERVICES}",
            ),
            node.name,
            {
                "PATH": f"{sets / 'sbin'}:{sets / 'usr' / 'sbin'}:{SYSTEM_PATH}",
                "LD_LIBRARY_PATH": debian.libraries(sets),
            },
        ),
    ]


def coredns_image() -> Path:
    """CoreDNS alone."""
    return images.of_programs(COREDNS, {"/coredns": binaries("coredns") / "coredns"}, ["/coredns"])


def install_coredns(api: Api) -> None:
    """Creates what CoreDNS needs and CoreDNS itself; `dns_works` says when it answers."""
    for path, body in _coredns():
        api.create(path, body)


def dns_works(api: Api) -> bool:
    """Whether a CoreDNS pod is ready."""
    path = f"/apis/apps/v1/namespaces/kube-system/deployments/{DNS}"
    return int(api.get(path)["status"].get("readyReplicas", 0)) > 0


def proxy_works(_: Node, space: Space) -> bool:
    """Whether kube-proxy has written its rules."""
    return "KUBE-SERVICES" in space.run("iptables-save", "-t", "nat")


def router_works(_: Node, space: Space) -> bool:
    """Whether kube-router has written its rules."""
    return "KUBE-ROUTER-FORWARD" in space.run("iptables-save", "-t", "filter")


def _coredns() -> list[tuple[str, dict[str, object]]]:
    labels = {"k8s-app": DNS}
    rules = [
        {
            "apiGroups": [""],
            "resources": ["endpoints", "services", "pods", "namespaces"],
            "verbs": ["list", "watch"],
        },
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    subject = {"kind": "ServiceAccount", "name": DNS, "namespace": "kube-system"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:coredns"}
    container = {
        "name": "coredns",
        "image": COREDNS,
        "command": ["/coredns", "-conf", "/etc/coredns/Corefile"],
        "volumeMounts": [{"name": "corefile", "mountPath": "/etc/coredns"}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1},
    }
    pod = {
        "serviceAccountName": DNS,
        "dnsPolicy": "Default",
        "priorityClassName": "system-cluster-critical",
        "tolerations": [{"operator": "Exists"}],
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [{"name": "corefile", "configMap": {"name": DNS}}],
    }
    deployment = {
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    ports = [{"name": f"dns-{kind.lower()}", "port": 53, "protocol": kind} for kind in ("UDP", "TCP")]
    service = {"clusterIP": DNS_SERVICE, "selector": labels, "ports": ports}
    system = "/api/v1/namespaces/kube-system"
    access = "/apis/rbac.authorization.k8s.io/v1"
    name: dict[str, object] = {"metadata": {"name": DNS}}
    named: dict[str, object] = {"metadata": {"name": "system:coredns"}}
    return [
        (f"{system}/serviceaccounts", name),
        (f"{access}/clusterroles", {**named, "rules": rules}),
        (f"{access}/clusterrolebindings", {**named, "roleRef": role, "subjects": [subject]}),
        (f"{system}/configmaps", {**name, "data": {"Corefile": COREFILE}}),
        (f"{system}/services", {**name, "spec": service}),
        ("/apis/apps/v1/namespaces/kube-system/deployments", {**name, "spec": deployment}),
    ]
