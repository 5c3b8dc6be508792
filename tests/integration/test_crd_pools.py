"""The generated definitions on a real API server: it accepts them, and refuses what the models refuse.

What tests/unit/api shows of schemas with a stand-in for CEL is asked here of the real thing.
"""

import contextlib
import http.client
import json
import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentfly.api import ResourcePool, ResourcePoolStatus, crd
from agentfly.api.pods import LABEL_KEY_PATTERN, NOT_PUBLIC, OBJECT_PATTERN, left_out
from agentfly.broker.pools import pool_spec
from tests.cluster.api import Api, wait
from tests.cluster.cluster import Cluster
from tests.cluster.machine import ClusterError
from tests.unit.api.run_rules import STATES, WRONG_RUNS
from tests.unit.api.test_models import NASTY, fields, items, placed
from tests.unit.api.test_rules import ACCEPTED, CHANGES, REFUSED
from tests.unit.api.worlds import KINDS, OBJECTS, complete, made, model_refusals

CRDS = Path(__file__).parents[2] / "crds"
NAMES = [f"{kind.plural}.agentfly.dev" for kind in crd.KINDS]
NAMESPACE = "crd-pools"
LAST_APPLIED_MAX = 262_144
STRICT = "?dryRun=All&fieldValidation=Strict"

Object = dict[str, Any]


class Server:
    """The API server over one kept connection: thousands of dry runs are asked here."""

    def __init__(self, api: Api) -> None:
        url = urllib.parse.urlsplit(api.server)
        self._headers = {**api.headers, "Content-Type": "application/json"}
        self._connection = http.client.HTTPSConnection(
            url.hostname or "", url.port or 443, timeout=30, context=api.ssl
        )

    def call(self, method: str, path: str, body: Object) -> tuple[int, Object]:
        """Status and answer of one request."""
        self._connection.request(method, path, json.dumps(body), self._headers)
        response = self._connection.getresponse()
        return response.status, json.loads(response.read())

    def refusals(self, method: str, path: str, body: Object) -> list[str]:
        """`path: message` of everything that is wrong with an object; empty if it is accepted."""
        status, answer = self.call(method, path, body)
        if status in (200, 201):
            return []
        causes = answer["details"].get("causes") or [{"field": "", "message": answer["message"]}]
        return sorted({f"{_anywhere(cause['field'])}: {_plain(cause['message'])}" for cause in causes})

    def close(self) -> None:
        self._connection.close()


def _anywhere(field: str) -> str:
    return re.sub(r"\[\d+\]", "[]", field)


def _plain(message: str) -> str:
    """The text of a rule, without the kind of the error and the value before it."""
    return re.sub(r'^Invalid value: (?:"(?:[^"\\]|\\.)*"|\{.*?\}|-?[0-9.]+|[a-z]+): ', "", message)


@pytest.fixture(scope="module")
def cluster(control_plane: Cluster) -> Iterator[Cluster]:
    """The control plane with the three kinds, and a namespace."""
    there = control_plane.kubectl("get", "crd", *NAMES, "--ignore-not-found", "-o", "name")
    control_plane.kubectl("apply", "-f", str(CRDS))
    control_plane.kubectl("wait", "--for=condition=Established", "--timeout=30s", "crd", *NAMES)
    control_plane.kubectl("create", "namespace", NAMESPACE)
    try:
        yield control_plane
    finally:
        control_plane.kubectl("delete", "namespace", NAMESPACE)
        if not there:
            control_plane.kubectl("delete", "crd", *NAMES)


@pytest.fixture
def server(cluster: Cluster) -> Iterator[Server]:
    with contextlib.closing(Server(cluster.api)) as found:
        wait("the kinds are served", lambda: cluster.api.exists(path("ResourcePool")), 30.0)
        yield found


@pytest.fixture
def stored(cluster: Cluster) -> Iterator[Object]:
    """The pool `shell` in the cluster."""
    cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=yaml.safe_dump(OBJECTS["ResourcePool"]))
    try:
        yield cluster.api.get(f"{path('ResourcePool')}/shell")
    finally:
        cluster.kubectl("delete", "rpool", "--all", "-n", NAMESPACE)


def path(kind: str) -> str:
    return f"/apis/agentfly.dev/v1alpha1/namespaces/{NAMESPACE}/{KINDS[kind].plural}"


def table(cluster: Cluster, *flags: str) -> list[list[str]]:
    text = cluster.kubectl("get", "rpool", "-n", NAMESPACE, *flags)
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]


# The definitions are accepted.


@pytest.mark.parametrize("name", NAMES)
def test_the_definition_is_served_without_a_complaint(cluster: Cluster, name: str) -> None:
    found = json.loads(cluster.kubectl("get", "crd", name, "-o", "json"))
    conditions = {each["type"]: each["status"] for each in found["status"]["conditions"]}
    assert conditions == {"NamesAccepted": "True", "Established": "True"}  # not NonStructuralSchema
    applied = found["metadata"]["annotations"]["kubectl.kubernetes.io/last-applied-configuration"]
    assert len(applied) < LAST_APPLIED_MAX / 2


def test_server_side_apply_and_ten_repetitions_change_nothing(cluster: Cluster) -> None:
    def versions() -> list[str]:
        listed = json.loads(cluster.kubectl("get", "crd", *NAMES, "-o", "json"))["items"]
        return [each["metadata"]["resourceVersion"] for each in listed]

    before = versions()
    for _ in range(10):
        cluster.kubectl("apply", "-f", str(CRDS))
    assert versions() == before


# Rules: every one refuses, in the words of the model.


@pytest.mark.parametrize(("kind", "changes", "refusals"), REFUSED.values(), ids=REFUSED.keys())
def test_the_server_refuses_in_the_words_of_the_model(
    server: Server, kind: str, changes: Object, refusals: list[str]
) -> None:
    assert server.refusals("POST", path(kind) + STRICT, made(kind, changes)) == refusals


@pytest.mark.parametrize(("kind", "changes"), ACCEPTED.values(), ids=ACCEPTED.keys())
def test_the_server_accepts_what_the_model_accepts(server: Server, kind: str, changes: Object) -> None:
    assert server.refusals("POST", path(kind) + STRICT, made(kind, changes)) == []


@pytest.mark.parametrize(("kind", "changes", "refusals"), CHANGES.values(), ids=CHANGES.keys())
def test_the_server_refuses_changes_of_what_is_fixed(
    server: Server, kind: str, changes: Object, refusals: list[str]
) -> None:
    name = OBJECTS[kind]["metadata"]["name"]
    assert server.call("POST", path(kind), OBJECTS[kind])[0] == 201
    try:
        was = server.call("GET", f"{path(kind)}/{name}", {})[1]
        changed = {**made(kind, changes), "metadata": was["metadata"]}
        assert server.refusals("PUT", f"{path(kind)}/{name}{STRICT}", changed) == refusals
    finally:
        assert server.call("DELETE", f"{path(kind)}/{name}", {})[0] == 200


@pytest.mark.parametrize(("status", "changes", "refusals"), STATES.values(), ids=STATES.keys())
def test_the_trainer_changes_only_while_nothing_of_the_run_is_there(
    server: Server, status: Object, changes: Object, refusals: list[str]
) -> None:
    where = f"{path('TrainingRun')}/first"
    assert server.call("POST", path("TrainingRun"), OBJECTS["TrainingRun"])[0] == 201
    try:
        was = server.call("GET", where, {})[1]
        assert server.call("PUT", f"{where}/status", {**was, "status": status})[0] == 200
        now = server.call("GET", where, {})[1]
        changed = {**made("TrainingRun", changes), "metadata": now["metadata"]}
        assert server.refusals("PUT", where + STRICT, changed) == refusals
    finally:
        assert server.call("DELETE", where, {})[0] == 200


@pytest.mark.parametrize(("changes", "words"), WRONG_RUNS.values(), ids=WRONG_RUNS.keys())
def test_what_people_get_wrong_in_a_run_is_refused_with_what_to_do(
    cluster: Cluster, changes: Object, words: str
) -> None:
    text = yaml.safe_dump(made("TrainingRun", changes))
    with pytest.raises(ClusterError) as caught:
        cluster.kubectl("create", "-n", NAMESPACE, "-f", "-", "--dry-run=server", stdin=text)
    assert re.search(re.escape(words).replace(r":\ ", ".*"), str(caught.value), re.I | re.S), caught.value


def test_server_and_model_agree_on_every_field_of_a_pool_with_every_nasty_value(server: Server) -> None:
    differ = []
    for where in fields("ResourcePool") + items("ResourcePool"):
        for value in NASTY:
            obj = placed("ResourcePool", where, value)
            status, answer = server.call("POST", path("ResourcePool") + STRICT, obj)
            if (status == 201) != (model_refusals("ResourcePool", obj) == []):
                differ.append(
                    (where, value, status, answer.get("message"), model_refusals("ResourcePool", obj))
                )
    assert differ == []


RANGES = [
    "0.0.0.0/0", "10.0.0.0/8", "10.1.0.0/8", "10.0.0.0/33", "10.0.0.0/08", "010.0.0.0/8", "10.0.0.0/-1",
    "10.0/8", "1.2.3.4/32", "::/0", "2001:db8::/32", "2001:db8::1/32", "2001:DB8::/32", "2001:db8:0::/32",
    "fe80::/10", "::ffff:10.0.0.0/104", "::ffff:0:0/96", "::10.0.0.0/104", "1:0:0:2::/64", "fe80::%1/64",
    "1::2:0:0:0:0/80", "::/129",
]  # fmt: skip


@pytest.mark.parametrize("text", [*RANGES, *NOT_PUBLIC])
def test_server_and_model_agree_on_ranges_of_addresses(server: Server, text: str) -> None:
    pool = made("ResourcePool", {"container.network": True, "security.egress": [{"cidr": text}]})
    refused = server.refusals("POST", path("ResourcePool") + STRICT, pool)
    assert (refused == []) == (model_refusals("ResourcePool", pool) == [])


# What the models accept, the objects that are made of it accept.

POD: Object = {"containers": [{"name": "c", "image": "agentfly-test/none:1"}]}
TOLERATIONS: list[Object] = ACCEPTED["tolerations of all forms"][1]["placement.tolerations"]


def test_tolerations_of_the_model_are_those_of_pods(server: Server) -> None:
    pool = ResourcePool.model_validate(
        made("ResourcePool", {"container.image": "a", "placement.tolerations": TOLERATIONS})
    )
    tolerations = pool_spec(pool, platform="kubernetes").resource.pod.tolerations
    pod = {"metadata": {"name": "p"}, "spec": {**POD, "tolerations": list(tolerations)}}
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods{STRICT}"
    assert server.refusals("POST", pods, pod) == []
    for wrong in ({"effect": "NoSchedule"}, {"key": "a", "operator": "Exists", "value": "b"},
                  {"key": "a", "effect": "NoSchedule", "tolerationSeconds": 1}):  # fmt: skip
        assert server.refusals("POST", pods, {**pod, "spec": {**POD, "tolerations": [wrong]}}) != []


@pytest.mark.parametrize("cidr", ["0.0.0.0/0", "::/0", "168.0.0.0/5", "10.20.0.0/16"])
def test_ranges_of_the_model_are_those_of_network_policies(server: Server, cidr: str) -> None:
    block = {"cidr": cidr, "except": list(left_out(cidr))}
    spec = {"podSelector": {}, "egress": [{"to": [{"ipBlock": block}]}]}
    policies = f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies{STRICT}"
    assert server.refusals("POST", policies, {"metadata": {"name": "p"}, "spec": spec}) == []


def test_the_pools_of_the_guide_are_accepted(server: Server) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "pools.md").read_text()
    pools = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", guide, re.S)]
    assert len(pools) >= 9
    for pool in pools:
        assert server.refusals("POST", path("ResourcePool") + STRICT, pool) == [], pool["metadata"]


KEYS = [
    "a", "a/b", "A.b_c-d", "example.com/A_b", "a.", ".a", "/a", "a/", "a/b/c", "A/b", "a b", "x" * 63,
    "x" * 64, "a..b/c", "ü", "a\n",
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_keys_of_labels_are_those_of_pods(server: Server, key: str) -> None:
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods{STRICT}"
    pod = {"metadata": {"name": "p", "labels": {key: ""}}, "spec": POD}
    matches = re.fullmatch(LABEL_KEY_PATTERN[1:-1], key) is not None
    assert (server.refusals("POST", pods, pod) == []) == matches
    labelled = made("ResourcePool", {"placement.podLabels": {key: ""}})
    assert (server.refusals("POST", path("ResourcePool") + STRICT, labelled) == []) == matches


@pytest.mark.parametrize("name", ["a", "a.b-c", "a..b", "A", "-a", "a.", "x" * 63], ids=repr)
def test_names_of_objects_are_those_of_the_cluster(server: Server, name: str) -> None:
    maps = f"/api/v1/namespaces/{NAMESPACE}/configmaps{STRICT}"
    accepted = server.refusals("POST", maps, {"metadata": {"name": name}}) == []
    assert accepted == (re.fullmatch(OBJECT_PATTERN[1:-1], name) is not None)
    pool = made("ResourcePool", {"placement.schedulerName": name})
    assert (server.refusals("POST", path("ResourcePool") + STRICT, pool) == []) == accepted


# Defaults, and what people see.


def test_the_server_stores_what_the_model_reads(stored: Object) -> None:
    schema = crd.schema(ResourcePool)["properties"]["spec"]
    assert stored["spec"] == complete(schema, OBJECTS["ResourcePool"]["spec"])
    assert stored["status"] == {"observedGeneration": -1}
    read = ResourcePool.model_validate(stored)
    assert read.spec == ResourcePool.model_validate(OBJECTS["ResourcePool"]).spec


CLIENT, SERVER = (), ("--server-side", "--force-conflicts")


@pytest.mark.parametrize("ways", [(CLIENT,), (SERVER,), (CLIENT, SERVER)], ids=["client", "server", "moved"])
def test_ten_applies_of_a_pool_change_nothing(cluster: Cluster, ways: tuple[tuple[str, ...], ...]) -> None:
    """From the second on: what the server stores of a first server-side apply has no defaults in it yet."""
    text = yaml.safe_dump(made("ResourcePool", {"container.image": "python:3.12"}))
    where = f"{path('ResourcePool')}/shell"
    try:
        for flags in (*ways, ways[-1]):
            cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", *flags, stdin=text)
        before = cluster.api.get(where)["metadata"]
        for _ in range(10):
            cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", *flags, stdin=text)
        after = cluster.api.get(where)["metadata"]
        assert (after["resourceVersion"], after["generation"]) == (before["resourceVersion"], 1)
    finally:
        cluster.kubectl("delete", "rpool", "shell", "-n", NAMESPACE)


def test_null_is_absence_to_the_server_too(server: Server) -> None:
    written = made("ResourcePool", {})
    written["spec"] |= {"security": None, "queue": None, "modelService": None}
    status, answer = server.call("POST", path("ResourcePool") + STRICT, written)
    assert status == 201
    assert answer["spec"] == ResourcePool.model_validate(written).to_json()["spec"]


STATUS: Object = {
    "observedGeneration": 1,
    "revision": "3f7e2c3ec31905c3",
    "selector": "agentfly.dev/pool=shell,agentfly.dev/component=member",
    "members": {"total": 7, "ready": 5, "free": 2, "leased": 3, "starting": 1, "resetting": 1, "outdated": 4},
    "queue": {
        "pending": 6,
        "oldestSeconds": 14,
        "byJob": [{"job": "train", "pending": 6, "leased": 3, "share": "1"}],
    },
    "images": {"resident": 2},
    "rates": {"warmHitPercent": "97", "acquireP99Milliseconds": 180, "resetCleanPercent": "99.6"},
    "reset": {"method": "OverlaySharedPID", "reason": ""},
    "conditions": [
        {
            "type": "Ready",
            "status": "True",
            "observedGeneration": 1,
            "lastTransitionTime": "2026-11-30T18:00:00Z",
            "reason": "MinAvailable",
            "message": "5 members are ready",
        }
    ],
}


def written(server: Server) -> None:
    pool = server.call("GET", f"{path('ResourcePool')}/shell", {})[1]
    status, answer = server.call("PUT", f"{path('ResourcePool')}/shell/status", {**pool, "status": STATUS})
    assert status == 200, answer


def test_a_status_is_stored_whole_and_shown_in_columns(
    cluster: Cluster, server: Server, stored: Object
) -> None:
    assert table(cluster)[1][:-1] == ["shell", "Container", "4"]  # before the first look
    written(server)
    found = server.call("GET", f"{path('ResourcePool')}/shell", {})[1]
    assert found["status"] == STATUS
    assert found["metadata"]["generation"] == stored["metadata"]["generation"]
    assert ResourcePoolStatus.model_validate(STATUS).to_json() == {
        **STATUS,
        "members": {**STATUS["members"], "quarantined": 0},
    }
    head, row = table(cluster)
    assert head == ["NAME", "TYPE", "READY", "FREE", "LEASED", "STARTING", "QUEUED", "MAX", "REASON", "AGE"]
    assert row[:-1] == ["shell", "Container", "5", "2", "3", "1", "6", "4", "MinAvailable"]
    head, row = table(cluster, "-o", "wide")
    assert dict(zip(head, row, strict=True)) | {"AGE": ""} == {
        "NAME": "shell", "TYPE": "Container", "READY": "5", "FREE": "2", "LEASED": "3", "STARTING": "1",
        "QUEUED": "6", "MAX": "4", "REASON": "MinAvailable", "HIT%": "97", "P99": "180", "AGE": "",
    }  # fmt: skip


def test_kubectl_waits_for_conditions(cluster: Cluster, server: Server, stored: Object) -> None:
    written(server)
    cluster.kubectl("wait", "--for=condition=Ready", "rpool/shell", "-n", NAMESPACE, "--timeout=10s")
    described = cluster.kubectl("describe", "rpool/shell", "-n", NAMESPACE)
    assert "MinAvailable" in described
    assert "Warm Hit Percent:" in described


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("spec.security.egress", "but no private, link-local or cluster address"),
        ("spec.capacity.quota", "max is lowered to what fits"),
        ("spec.container.runtime", "In a cluster members are pods, and this is not read"),
        ("spec.container.reset.method", "ENUM: Auto Overlay OverlaySharedPID"),
        ("status.queue.byJob", "The 16 jobs"),
    ],
)
def test_explain_says_what_a_field_is(cluster: Cluster, field: str, words: str) -> None:
    text = cluster.kubectl("explain", f"resourcepool.{field}", "--api-version=agentfly.dev/v1alpha1")
    assert words in re.sub(r"\s+", " ", text)


# Scale.


def test_scale_sets_min_within_the_rules(cluster: Cluster, server: Server, stored: Object) -> None:
    written(server)
    cluster.kubectl("scale", "rpool/shell", "--replicas=3", "-n", NAMESPACE)
    pool = cluster.api.get(f"{path('ResourcePool')}/shell")
    assert pool["spec"]["capacity"] == {**stored["spec"]["capacity"], "min": 3}
    scale = cluster.api.get(f"{path('ResourcePool')}/shell/scale")
    assert scale["spec"] == {"replicas": 3}
    assert scale["status"] == {"replicas": 7, "selector": STATUS["selector"]}
    refused = server.refusals(
        "PUT", f"{path('ResourcePool')}/shell/scale", {**scale, "spec": {"replicas": 5}}
    )
    assert refused == ["spec.capacity.max: max is less than min; raise max or lower min"]
