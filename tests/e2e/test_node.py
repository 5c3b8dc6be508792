"""The real node of the test cluster: pods, images, names, Services and policies as on any other cluster."""

import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.api import wait
from tests.cluster.cluster import Cluster

PODS = "/api/v1/namespaces/default/pods"
SERVICES = "/api/v1/namespaces/default/services"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"
PYTHON = "agentfly-test/python:dev"
SECRETS = "/var/run/secrets/kubernetes.io/serviceaccount"


def pod(name: str, *command: str, image: str = PYTHON, **spec: Any) -> dict[str, Any]:
    container: dict[str, Any] = {"name": "c", "image": image, "command": list(command) or ["sleep", "10000"]}
    if command[:3] == ("python3", "-m", "http.server"):
        container["readinessProbe"] = {"httpGet": {"port": 8000, "path": "/etc/hostname"}, "periodSeconds": 1}
    return {
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0, **spec},
    }


def ready(cluster: Cluster, name: str) -> Callable[[], bool]:
    def check() -> bool:
        conditions = cluster.api.get(f"{PODS}/{name}")["status"].get("conditions", ())
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    return check


def run(cluster: Cluster, *pods: dict[str, Any]) -> None:
    for one in pods:
        cluster.api.create(PODS, one)
    for one in pods:
        name = one["metadata"]["name"]
        wait(f"pod {name}", ready(cluster, name), 30.0)


def remove(cluster: Cluster, *names: str) -> None:
    for name in names:
        cluster.api.call("DELETE", f"{PODS}/{name}")
    for name in names:
        wait(f"{name} gone", lambda name=name: not cluster.api.exists(f"{PODS}/{name}"), 30.0)  # type: ignore[misc]


def inside(cluster: Cluster, name: str, script: str) -> str:
    return cluster.kubectl("exec", name, "--", "sh", "-c", script).strip()


def curl(cluster: Cluster, name: str, url: str) -> int:
    """curl's exit status; 7: refused."""
    return int(inside(cluster, name, f"curl -sk -o /dev/null -m 3 {url}; echo $?"))


@pytest.fixture(scope="module")
def server(node: Cluster) -> str:
    """A pod that serves its files, and a Service of the same name."""
    run(node, pod("server", "python3", "-m", "http.server", "8000"))
    ports = [{"port": 80, "targetPort": 8000}]
    node.api.create(
        SERVICES, {"metadata": {"name": "server"}, "spec": {"selector": {"app": "server"}, "ports": ports}}
    )
    return "server"


@pytest.fixture(scope="module")
def client(node: Cluster) -> str:
    """A pod that waits for commands."""
    run(node, pod("client"))
    return "client"


def test_the_node_can_do_user_namespaces_and_says_so(node: Cluster) -> None:
    (found,) = [one for one in node.api.get("/api/v1/nodes")["items"] if one["metadata"]["name"] == "node1"]
    assert found["status"]["nodeInfo"]["containerRuntimeVersion"] == "containerd://2.4.2"
    assert all(one["features"]["userNamespaces"] for one in found["status"]["runtimeHandlers"])
    run(node, pod("mapped", hostUsers=False))
    first, outside, count = inside(node, "mapped", "cat /proc/self/uid_map").split()
    assert (first, count) == ("0", "65536")
    assert int(outside) > 0
    remove(node, "mapped")


def test_the_images_of_the_product_run_as_they_are(product_node: Cluster) -> None:
    run(product_node, pod("product", image="agentfly/agentfly:dev"))
    assert "agentfly" in product_node.kubectl("exec", "product", "--", "agentfly", "--help")
    remove(product_node, "product")


def test_logs_and_exit_codes_come_through(node: Cluster) -> None:
    run_once = pod("once", "sh", "-c", "echo said; exit 3", restartPolicy="Never")
    node.api.create(PODS, run_once)
    wait("once", lambda: node.api.get(f"{PODS}/once")["status"]["phase"] == "Failed", 30.0)
    state = node.api.get(f"{PODS}/once")["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (state["exitCode"], node.kubectl("logs", "once")) == (3, "said\n")
    remove(node, "once")


def test_names_and_services_work_in_pods_and_by_the_api_server(
    node: Cluster, server: str, client: str
) -> None:
    assert inside(node, client, f"curl -s -m 5 http://{server}/etc/hostname") == server
    full = f"http://{server}.default.svc.cluster.local/etc/hostname"
    assert inside(node, client, f"curl -s -m 5 {full}") == server
    status, text = node.api.call("GET", f"{SERVICES}/{server}:80/proxy/etc/hostname")
    assert (status, text) == (200, f"{server}\n")


def test_a_port_of_this_machine_leads_to_a_pod_and_to_a_service(node: Cluster, server: str) -> None:
    address = node.api.get(f"{PODS}/{server}")["status"]["podIP"]
    service = node.api.get(f"{SERVICES}/{server}")["spec"]["clusterIP"]
    for port in (node.open_port(f"{address}:8000"), node.open_port(f"{service}:80", where="node1")):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/etc/hostname", timeout=10.0) as answer:
            assert answer.read().decode() == f"{server}\n"


def test_a_pod_reaches_the_api_server_as_its_service_account(node: Cluster, client: str) -> None:
    token = f'-H "Authorization: Bearer $(cat {SECRETS}/token)" --cacert {SECRETS}/ca.crt'
    url = "https://kubernetes.default.svc/apis/authentication.k8s.io/v1/selfsubjectreviews"
    body = '{\\"apiVersion\\":\\"authentication.k8s.io/v1\\",\\"kind\\":\\"SelfSubjectReview\\"}'
    answer = inside(
        node, client, f'curl -s -m 5 {token} -H "Content-Type: application/json" -d "{body}" {url}'
    )
    assert json.loads(answer)["status"]["userInfo"]["username"] == "system:serviceaccount:default:default"


def test_nothing_in_the_cluster_can_leave_the_machine(node: Cluster, client: str) -> None:
    routes = node.x("ip", "route", where="node1") + node.x("ip", "route")
    assert "default" not in routes
    assert curl(node, client, "http://192.0.2.1/") == 7


def test_a_default_deny_policy_is_enforced_with_dns_by_selector(
    node: Cluster, server: str, client: str
) -> None:
    system = {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}
    dns = {"namespaceSelector": system, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}
    spec = {
        "podSelector": {"matchLabels": {"app": client}},
        "policyTypes": ["Ingress", "Egress"],
        "egress": [{"to": [dns], "ports": [{"port": 53, "protocol": "UDP"}]}],
    }
    assert curl(node, client, f"http://{server}/") == 0
    node.api.create(POLICIES, {"metadata": {"name": "deny"}, "spec": spec})
    try:
        wait("policy", lambda: curl(node, client, f"http://{server}/") != 0, 10.0)
        address = node.api.get(f"{SERVICES}/{server}")["spec"]["clusterIP"]
        assert inside(node, client, f"getent hosts {server}").split()[0] == address
        for url in (
            f"http://{server}/",  # another pod
            "https://kubernetes.default.svc/",  # the API server by its Service
            "https://10.250.0.1:6443/",  # and by its address
            "https://10.250.0.11:10250/",  # the node
        ):
            assert curl(node, client, url) == 7, url
    finally:
        node.api.call("DELETE", f"{POLICIES}/deny")
    wait("opened", lambda: curl(node, client, f"http://{server}/") == 0, 10.0)


def test_the_audit_log_sees_a_pod_by_its_user_agent(node: Cluster, client: str) -> None:
    ask = f'curl -sk -m 5 -A in-pod/1 -H "Authorization: Bearer $(cat {SECRETS}/token)"'
    with node.audit() as audit:
        inside(node, client, f"{ask} https://kubernetes.default.svc/api/v1/namespaces/default/pods")
    user = "system:serviceaccount:default:default"
    assert audit.counts(agent="in-pod/", user=user) == {("list", "pods"): 1}


def test_a_pod_is_running_soon_and_gone_soon(node: Cluster) -> None:
    begun = time.monotonic()
    run(node, pod("quick"))
    started = time.monotonic()
    remove(node, "quick")
    assert started - begun < 15.0
    assert time.monotonic() - started < 15.0
