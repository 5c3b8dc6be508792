"""What holders of tokens, ServiceAccounts and users may do, and where keys of external APIs are seen.

Each refusal stands beside something that the same identity may do.
"""

import base64
import contextlib
import json
import secrets
import select
import subprocess
import sys
from collections.abc import Iterator

import pytest
import yaml

from tests.cluster.api import wait
from tests.e2e.attackers import INTERNET, TENANT, outside
from tests.e2e.world import BROKER, OPERATOR, SYSTEM, Obj, World, installed

__all__ = ["installed"]

TTL_S = 10
KEY = f"sk-{secrets.token_hex(16)}"
CLIENT = f"{BROKER}-client"


# Rights.


def may(world: World, user: str, verb: str, resource: str, namespace: str = "", name: str = "") -> bool:
    """What the API server says to a user's request; ``resource`` as kubectl writes it."""
    plural, _, rest = resource.partition("/")
    plural, _, group = plural.partition(".")
    asked = {"verb": verb, "resource": plural, "group": group, "subresource": rest, "name": name}
    review = world.cluster.api.call(
        "POST",
        "/apis/authorization.k8s.io/v1/subjectaccessreviews",
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": user,
                "groups": ["system:authenticated"],
                "resourceAttributes": asked | {"namespace": namespace or world.namespace},
            },
        },
    )
    return bool(review[1]["status"]["allowed"])


def test_a_broker_has_its_pods_and_nothing_else(installed: World) -> None:
    user = f"system:serviceaccount:{installed.namespace}:{BROKER}"
    for verb in ("get", "list", "watch", "create", "delete"):
        assert may(installed, user, verb, "pods")
        assert not may(installed, user, verb, "pods", "default")
        assert not may(installed, user, verb, "secrets")
        assert not may(installed, user, verb, "secrets", name=BROKER)
        assert not may(installed, user, verb, "secrets", name="somebody-elses")
    for verb in ("create", "delete", "patch", "update"):
        assert not may(installed, user, verb, "resourcepools.agentfly.dev")
        assert not may(installed, user, verb, "resourcepools.agentfly.dev/status")
        assert not may(installed, user, verb, "networkpolicies.networking.k8s.io")
        assert not may(installed, user, verb, "roles.rbac.authorization.k8s.io")
    assert may(installed, user, "get", "resourcepools.agentfly.dev")
    for escalation in (
        "pods/exec",
        "pods/attach",
        "pods/ephemeralcontainers",
        "serviceaccounts/token",
        "nodes/proxy",
    ):
        assert not may(installed, user, "create", escalation)


def test_an_operator_reads_no_secret_but_its_own_and_those_it_grants(installed: World) -> None:
    user = f"system:serviceaccount:{SYSTEM}:{OPERATOR}"
    with without(installed, "clusterrolebinding", "agentfly-operator-credentials"):
        for name in (BROKER, CLIENT):
            assert may(installed, user, "get", "secrets", name=name)
        assert not may(installed, user, "get", "secrets", name="somebody-elses")
    # The role for pools that name Secrets is what it says: any, one at a time.
    assert may(installed, user, "get", "secrets", name="somebody-elses")
    for verb in ("list", "watch", "delete", "deletecollection", "update"):
        assert not may(installed, user, verb, "secrets")
    # It makes and removes the pools of a run's servers, and changes nobody's.
    for verb in ("update", "patch", "deletecollection"):
        assert not may(installed, user, verb, "resourcepools.agentfly.dev")
    for kind in ("trainingruns", "rolloutjobs"):
        for verb in ("create", "update", "patch", "delete"):
            assert not may(installed, user, verb, f"{kind}.agentfly.dev")
    for escalation in ("pods/exec", "pods/ephemeralcontainers", "serviceaccounts/token", "nodes/proxy"):
        assert not may(installed, user, "create", escalation)
    for resource in ("clusterroles", "clusterrolebindings"):
        assert not may(installed, user, "create", f"{resource}.rbac.authorization.k8s.io")
    for verb in ("escalate", "bind"):
        assert not may(installed, user, verb, "roles.rbac.authorization.k8s.io", name=BROKER)
    assert not may(installed, user, "impersonate", "users")


@contextlib.contextmanager
def without(world: World, kind: str, name: str) -> Iterator[None]:
    """Deletes an object for the length of a block."""
    kept = world.cluster.kubectl("get", kind, name, "-o", "yaml")
    world.cluster.kubectl("delete", kind, name)
    try:
        user = f"system:serviceaccount:{SYSTEM}:{OPERATOR}"
        wait("rights", lambda: not may(world, user, "get", "secrets", name="somebody-elses"), 15)
        yield
    finally:
        obj = yaml.safe_load(kept)
        for field in ("uid", "resourceVersion", "creationTimestamp", "managedFields"):
            obj["metadata"].pop(field, None)
        world.cluster.kubectl("create", "-f", "-", stdin=yaml.safe_dump(obj))
        wait("rights", lambda: may(world, user, "get", "secrets", name="somebody-elses"), 15)


@pytest.mark.parametrize("role", ["agentfly-edit", "agentfly-view"])
def test_a_user_of_pools_gets_no_token(installed: World, role: str) -> None:
    binding = f"mallory-{role}"
    subjects = [{"kind": "User", "name": binding, "apiGroup": "rbac.authorization.k8s.io"}]
    installed.cluster.api.create(
        f"/apis/rbac.authorization.k8s.io/v1/namespaces/{installed.namespace}/rolebindings",
        {
            "metadata": {"name": binding},
            "subjects": subjects,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        },
    )
    pools = "resourcepools.agentfly.dev"
    allowed = ("create", pools) if role == "agentfly-edit" else ("list", pools)
    wait("rights", lambda: may(installed, binding, *allowed), 15)
    for verb in ("get", "list", "watch"):
        assert not may(installed, binding, verb, "secrets")
        assert not may(installed, binding, verb, "secrets", name=CLIENT)
    for doing in (
        "pods",
        "pods/exec",
        "pods/portforward",
        "pods/proxy",
        "services/proxy",
        "serviceaccounts/token",
    ):
        assert not may(installed, binding, "create", doing)
        assert not may(installed, binding, "get", doing)
    for verb in ("patch", "update"):
        assert not may(installed, binding, verb, f"{pools}/status")
    assert not may(installed, binding, "list", pools, "default")


# The broker, by who may connect to it.


def ask(world: World, *requests: Obj) -> list[int]:
    """The status of each answer, asked from a worker's pod."""
    said = world.cluster.kubectl(
        *("exec", "-i", "-n", world.namespace, "worker", "--", "python", "-", json.dumps(requests)),
        stdin=(TENANT / "ask.py").read_text(),
    )
    return list(json.loads(said))


def test_a_broker_hears_nobody_without_its_token(installed: World) -> None:
    worker = installed.worker()
    lease = worker.acquire("shell", "holder")
    data = installed.cluster.api.get(f"{installed.path}/secrets/{CLIENT}")["data"]
    token = base64.b64decode(data["client-token"]).decode()
    base = f"http://{BROKER}.{installed.namespace}.svc:7080"
    body = {"lease_id": lease["lease_id"], "dirty": True}
    requests: list[Obj] = [
        *({"url": f"{base}{path}"} for path in ("/pools", "/leases", "/metrics")),
        {"url": f"{base}/v1/release", "method": "POST", "body": body},
        {"url": f"{base}/v1/acquire", "method": "POST", "body": {}},
        {"url": f"{base}/v1/heartbeat", "method": "POST", "body": {"lease_ids": [lease["lease_id"]]}},
        {"url": f"{base}/v1/restore", "method": "POST", "body": {"records": ["e30.e30"]}},
    ]
    for wrong in ("", "guess", lease["token"], lease["lease_id"], token[:-1]):
        tries = [one | {"headers": {"X-Agentfly-Token": wrong}} for one in requests]
        assert ask(installed, *tries) == [401] * len(tries)
        assert ask(installed, *(one | {"token": wrong} for one in requests)) == [401] * len(requests)
    assert ask(installed, *(one | {"token": token} for one in requests[:3])) == [200] * 3
    assert worker.exec("holder", "echo mine")["stdout"] == "mine\n"
    worker.release("holder")


def test_a_record_that_was_forged_is_no_lease(installed: World) -> None:
    data = installed.cluster.api.get(f"{installed.path}/secrets/{CLIENT}")["data"]
    token = base64.b64decode(data["client-token"]).decode()
    note = {
        "lease_id": "x",
        "pool": "judge",
        "owner": "me",
        "key": "default",
        "attempt": 0,
        "token": "t",
        "ttl_s": 60,
    }
    record = {"note": note, "member_id": "", "incarnation": 1, "broker": "00"}
    content = base64.urlsafe_b64encode(json.dumps(record).encode()).decode().rstrip("=")
    installed.worker()
    said = installed.cluster.kubectl(
        *("exec", "-i", "-n", installed.namespace, "worker", "--", "python", "-"),
        *(f"http://{BROKER}.{installed.namespace}.svc:7080/v1/restore", f"X-Agentfly-Token={token}"),
        json.dumps({"records": [f"{content}.AAAA", content, "", f"{content}.{content}"]}),
        stdin=(TENANT / "get.py").read_text(),
    )
    assert json.loads(said) == [False] * 4


# Keys of an external API.

UPSTREAM = (
    "import http.server\n"
    "class Handler(http.server.BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        print(self.headers.get('Authorization'), flush=True)\n"
    "        body = b'{}'\n"
    "        self.send_response(200); self.send_header('Content-Type', 'application/json')\n"
    "        self.send_header('Content-Length', '2'); self.end_headers(); self.wfile.write(body)\n"
    "    def log_message(self, *args): pass\n"
    "http.server.ThreadingHTTPServer(('0.0.0.0', 82), Handler).serve_forever()\n"
)


def test_a_key_is_used_for_its_lease_and_seen_nowhere(installed: World) -> None:
    cluster, namespace = installed.cluster, installed.namespace
    cluster.api.create(
        f"{installed.path}/secrets", {"metadata": {"name": "judge"}, "stringData": {"token": KEY}}
    )
    command = [*cluster.enter(), sys.executable, "-c", UPSTREAM]
    with outside(installed), subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as upstream:
        try:
            pool(
                installed,
                "judge",
                {
                    "type": "ExternalAPI",
                    "scope": "Global",
                    "capacity": {"max": 1},
                    "lease": {"ttlSeconds": TTL_S},
                    "externalAPI": {
                        "baseUrl": f"http://{INTERNET}:82/v1",
                        "credentials": [{"secretKeyRef": {"name": "judge", "key": "token"}}],
                    },
                },
            )
            worker = installed.worker()
            mine, other = worker.acquire("judge", "one"), worker.acquire("judge", "two")
            box = worker.acquire("shell", "three")
            url = f"{mine['address'].rstrip('/')}/models"
            assert upstream.stdout is not None
            assert ask(installed, {"url": url, "token": mine["token"]}) == [200]
            assert upstream.stdout.readline() == f"Bearer {KEY}\n"
            assert mine["token"] != other["token"]
            strangers = ("", "guess", box["token"], KEY)
            # 503 as long as others may hold a lease of the broker before.
            assert set(ask(installed, *({"url": url, "token": each} for each in strangers))) <= {401, 503}
            worker.release("one")
            use = {"url": url, "token": mine["token"]}
            wait("the end", lambda: ask(installed, use)[0] in (401, 503), 2 * TTL_S, every_s=1.0)
            assert ask(installed, {"url": url, "token": other["token"]}) == [200]
            while (said := upstream.stdout.readline()) == f"Bearer {KEY}\n":
                if not select.select([upstream.stdout], [], [], 0.5)[0]:
                    break
            assert said == f"Bearer {KEY}\n"
        finally:
            upstream.kill()
    shown = {
        "pools": cluster.kubectl("get", "rpool", "-n", namespace, "-o", "yaml"),
        "described": cluster.kubectl("describe", "rpool,pods,deployments", "-n", namespace),
        "events": cluster.kubectl("get", "events", "-n", namespace, "-o", "yaml"),
        "the broker's log": cluster.kubectl("logs", "-n", namespace, f"deployment/{BROKER}"),
        "the operator's log": cluster.kubectl("logs", "-n", SYSTEM, f"deployment/{OPERATOR}"),
        "the broker's pools": json.dumps(worker.ask("pools")),
        "the broker's leases": json.dumps(worker.ask("leases")),
        "/proc of the broker": cluster.kubectl(
            *("exec", "-n", namespace, f"deployment/{BROKER}", "--", "sh", "-c"),
            "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | tr '\\0' '\\n'",
        ),
    }
    assert "judge" in shown["pools"]
    assert "AGENTFLY_NAMESPACE" in shown["/proc of the broker"]
    assert [where for where, text in shown.items() if KEY in text] == []
    for token in (mine["token"], other["token"], box["token"]):
        assert [where for where, text in shown.items() if token in text] == []
    worker.release("two")
    worker.release("three")


@pytest.mark.parametrize(
    "credential",
    [
        {"file": "/var/run/secrets/kubernetes.io/serviceaccount/token"},
        {"env": "HOME"},
        {"secretKeyRef": {"name": CLIENT, "key": "client-token"}},
    ],
    ids=["its account", "its environment", "its clients' token"],
)
def test_no_pool_makes_a_broker_send_what_is_its_own(installed: World, credential: Obj) -> None:
    name = f"thief-{secrets.token_hex(2)}"
    api = {"baseUrl": f"http://{INTERNET}:82", "credentials": [credential]}
    pool(
        installed,
        name,
        {"type": "ExternalAPI", "scope": "Global", "capacity": {"max": 1}, "externalAPI": api},
    )
    try:
        wait("a refusal", lambda: "the broker's own" in json.dumps(installed.status(name)), 30.0, every_s=0.3)
    finally:
        installed.cluster.kubectl("delete", "rpool", name, "-n", installed.namespace)


def pool(world: World, name: str, spec: Obj) -> None:
    obj = {
        "apiVersion": "agentfly.dev/v1alpha1",
        "kind": "ResourcePool",
        "metadata": {"name": name},
        "spec": spec,
    }
    world.cluster.kubectl("apply", "-n", world.namespace, "-f", "-", stdin=yaml.safe_dump(obj))
