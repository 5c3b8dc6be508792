"""What GitOps tools do to pools that serve: apply again and again, look at their health, and delete."""

import json
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import images
from tests.cluster.api import wait
from tests.cluster.cluster import Cluster
from tests.e2e import objects
from tests.e2e.objects import apply, condition, get, is_so, members, pool_of
from tests.e2e.world import BASE, BROKER, OPERATOR, SYSTEM, UP_S, World
from tests.unit.manifests.kstatus import kstatus
from tests.unit.manifests.test_health import argo, flux

Obj = dict[str, Any]
TIMES = 10
QUIET_S = 3.0
GONE_S = 120.0
OURS = "app.kubernetes.io/managed-by=agentfly"
KINDS = (
    "pods,deployments,replicasets,services,endpointslices,secrets,serviceaccounts,roles,rolebindings,"
    "networkpolicies,poddisruptionbudgets"
)
SMALL = {"image": images.PYTHON, "cpu": "20m", "memory": "64Mi"}


def small(name: str, **capacity: int) -> Obj:
    return pool_of(name, container=SMALL, capacity=capacity or {"min": 1, "max": 1})


def versions(cluster: Cluster, namespace: str, *names: str) -> dict[str, tuple[str, Any]]:
    """resourceVersion and generation of pools, and of everything that is made for them."""
    found: list[Obj] = []
    for what in (("rpool", *names), (KINDS, "-l", OURS)):
        listed = json.loads(cluster.kubectl("get", *what, "-n", namespace, "-o", "json"))
        found += listed.get("items", [listed])
    return {
        f"{each['kind']}/{each['metadata']['name']}": (
            each["metadata"]["resourceVersion"],
            each["metadata"].get("generation"),
        )
        for each in found
    }


def quiet(cluster: Cluster, namespace: str, *names: str) -> dict[str, tuple[str, Any]]:
    """What they are once nothing has changed for ``QUIET_S``."""
    seen = [versions(cluster, namespace, *names), time.monotonic()]

    def still() -> bool:
        now = versions(cluster, namespace, *names)
        if now != seen[0]:
            seen[:] = now, time.monotonic()
        return time.monotonic() - seen[1] >= QUIET_S

    wait("nothing changes", still, UP_S, every_s=0.5)
    found: dict[str, tuple[str, Any]] = seen[0]
    return found


def test_applying_again_changes_nothing_while_members_are_held(installed: World) -> None:
    worker = installed.worker()
    pool = small("again", min=2, max=2)
    apply(installed, pool)
    is_so(installed, "again", "Ready")
    lease = worker.acquire("again", "holder")
    ways = {
        "by its client": (),
        "by the server": ("--server-side", "--field-manager=flux", "--force-conflicts"),
        "by another manager": ("--server-side", "--field-manager=argocd-controller", "--force-conflicts"),
    }
    for more in ways.values():
        apply(installed, pool, more=more)  # the first of a manager is noted in managedFields
        before = quiet(installed.cluster, installed.namespace, "again")
        for _ in range(TIMES):
            apply(installed, pool, more=more)
        time.sleep(1.0)
        assert versions(installed.cluster, installed.namespace, "again") == before, more
    assert worker.ask("info", owner="holder")["lost"] is False
    assert worker.exec("holder", "echo held")["stdout"] == "held\n"
    assert lease["member_id"] in members(installed, "again")
    worker.release("holder")
    objects.delete(installed, "again")


def test_fields_of_others_are_left_to_them(installed: World) -> None:
    pool = small("shared", min=1, max=3)
    apply(installed, pool, more=("--server-side", "--field-manager=flux"))
    is_so(installed, "shared", "Ready")
    namespace = ("-n", installed.namespace)
    kubectl = installed.cluster.kubectl
    for what in (
        "rpool/shared",
        f"deployment/{BROKER}",
        f"service/{BROKER}",
        "networkpolicy/agentfly-members",
    ):
        kubectl("annotate", what, *namespace, "example.com/team=rl", "--field-manager=team")
        kubectl("label", what, *namespace, "cost=rl", "--field-manager=team")
    # An autoscaler writes min, which Git leaves out from then on.
    kubectl("scale", *namespace, "rpool/shared", "--replicas=2")
    without = json.loads(json.dumps(pool))
    del without["spec"]["capacity"]["min"]
    for _ in range(TIMES):
        apply(installed, without, more=("--server-side", "--field-manager=flux"))
    wait("2 members", lambda: installed.status("shared")["members"]["ready"] == 2, UP_S, every_s=0.2)
    assert get(installed, "shared")["spec"]["capacity"]["min"] == 2
    kubectl("delete", "pod", *namespace, installed.broker_pod())  # whoever comes next has all to look at
    objects.broker_serves(installed)
    before = quiet(installed.cluster, installed.namespace, "shared")
    time.sleep(QUIET_S)
    assert versions(installed.cluster, installed.namespace, "shared") == before
    for what in (
        "rpool/shared",
        f"deployment/{BROKER}",
        f"service/{BROKER}",
        "networkpolicy/agentfly-members",
    ):
        meta = json.loads(kubectl("get", what, *namespace, "-o", "json"))["metadata"]
        assert meta["annotations"]["example.com/team"] == "rl"
        assert meta["labels"]["cost"] == "rl"
    managers = {each["manager"] for each in get(installed, "shared")["metadata"].get("managedFields", ())}
    assert "flux" in managers
    objects.delete(installed, "shared")


def test_health_of_live_pools_is_the_same_to_all_tools(installed: World) -> None:
    # A class that no node has leads to a pod that waits; a module that no broker loads waits for a person.
    waiting = small("waits") | {}
    waiting["spec"]["placement"] = {"nodeSelector": {"example.com/none": "here"}}
    stuck = pool_of("stuck", type="InProcess", inProcess={"entrypoint": "nobody:Knows"}, capacity={"max": 1})
    apply(installed, small("serves"), waiting, stuck)
    is_so(installed, "serves", "Ready")
    is_so(installed, "stuck", "Stalled")
    is_so(installed, "waits", "Unschedulable")
    wanted = {
        "serves": ("Current", "Healthy"),
        "waits": ("InProgress", "Progressing"),
        "stuck": ("Failed", "Degraded"),
    }
    for name, (verdict, health) in wanted.items():
        obj = get(installed, name)
        assert (kstatus(obj), flux(obj), argo(obj)[0]) == (verdict, verdict, health), name
        said = installed.cluster.kubectl(
            *("wait", "-n", installed.namespace, f"rpool/{name}", "--for=condition=Ready", "--timeout=1s"),
            check=False,
        )
        assert ("condition met" in said) is (name == "serves")
    assert condition(installed, "stuck", "Stalled")["message"]
    objects.delete(installed, *wanted)


# -- deleting

MODES = {"background": "Background", "foreground": "Foreground", "orphan": "Orphan"}


@pytest.fixture
def base(product_node: Cluster) -> Iterator[Cluster]:
    """Everything of base, before and after."""

    def up() -> None:
        product_node.kubectl("apply", "-k", BASE, timeout_s=UP_S)
        product_node.kubectl("scale", "-n", SYSTEM, f"deployment/{OPERATOR}", "--replicas=1")
        wait("kinds", lambda: product_node.api.exists("/apis/agentfly.dev/v1alpha1/resourcepools"), UP_S)
        product_node.kubectl(
            *("rollout", "status", f"deployment/{OPERATOR}", "-n", SYSTEM, f"--timeout={UP_S:.0f}s"),
            timeout_s=UP_S + 10,
        )

    up()
    yield product_node
    up()


def left(cluster: Cluster, namespace: str) -> set[str]:
    """What there is of ours in a namespace."""
    listed = json.loads(cluster.kubectl("get", KINDS, "-n", namespace, "-l", OURS, "-o", "json"))
    return {f"{each['kind']}/{each['metadata']['name']}" for each in listed["items"]}


def operator_up(_: Cluster) -> None:
    """It goes on."""


def operator_down(cluster: Cluster) -> None:
    cluster.kubectl("scale", "-n", SYSTEM, f"deployment/{OPERATOR}", "--replicas=0")
    pods = f"/api/v1/namespaces/{SYSTEM}/pods"
    wait("no operator", lambda: not cluster.api.get(pods)["items"], GONE_S, every_s=0.2)


def operator_gone(cluster: Cluster) -> None:
    """All of base but the kinds."""
    documents = yaml.safe_load_all(cluster.kubectl("kustomize", str(Path(BASE))))
    rest = [each for each in documents if each["kind"] != "CustomResourceDefinition"]
    cluster.kubectl("delete", "-f", "-", stdin=yaml.safe_dump_all(rest), timeout_s=GONE_S)


@pytest.mark.parametrize(
    ("leave", "kinds_mode"),
    [(operator_up, "background"), (operator_down, "foreground"), (operator_gone, "orphan")],
    ids=["up", "down", "gone"],
)
def test_nothing_is_left_of_pools_namespaces_and_kinds(
    base: Cluster, leave: Callable[[Cluster], None], kinds_mode: str
) -> None:
    tag = secrets.token_hex(3)
    spaces = {name: f"gone-{name}-{tag}" for name in (*MODES, "kinds")}
    for name, space in spaces.items():
        base.api.create("/api/v1/namespaces", {"metadata": {"name": space}})
        base.kubectl("apply", "-n", space, "-f", "-", stdin=yaml.safe_dump(small(name)))
    worlds = {name: World(base, space) for name, space in spaces.items()}
    try:
        for name, world in worlds.items():
            is_so(world, name, "Ready")
        leave(base)
        for mode in MODES:
            base.kubectl(
                *("delete", "rpool", mode, "-n", spaces[mode], f"--cascade={mode}"), timeout_s=GONE_S
            )
        for mode in ("background", "foreground"):
            wait(f"nothing in {mode}", lambda s=spaces[mode]: not left(base, s), GONE_S, every_s=0.5)
        assert any(name.startswith("Deployment/") for name in left(base, spaces["orphan"]))  # as asked
        for mode in MODES:
            base.kubectl(
                "delete", "namespace", spaces[mode], f"--cascade={mode}", "--wait=false", timeout_s=GONE_S
            )
        base.kubectl(
            *("delete", "crd", "-l", "app.kubernetes.io/part-of=agentfly", f"--cascade={kinds_mode}"),
            timeout_s=GONE_S,
        )
        wait("nothing of kinds", lambda: not left(base, spaces["kinds"]), GONE_S, every_s=0.5)
        for mode in MODES:
            wait(
                f"no namespace {mode}",
                lambda m=mode: not base.api.exists(f"/api/v1/namespaces/{spaces[m]}"),
                GONE_S,
                every_s=0.5,
            )
    finally:
        for space in spaces.values():
            base.kubectl("delete", "namespace", space, "--ignore-not-found", "--wait=false", check=False)
