"""The runners of pods on a real API server, with a real scheduler and nodes that only claim to be some.

The daemons in the pods are those of ``tests.unit...daemons``: this machine answers at every pod's address.
"""

import asyncio
import contextlib

import pytest

from agentfly.kube import PODS, Informer, Kube, KubeError, project_pod
from agentfly.resources.errors import StartFailed
from agentfly.resources.runners.kubernetes import MEMBER_LABELS, KubernetesRunner, PodCluster, Signer
from agentfly.resources.runners.kubernetes.model_pod import model_pod
from agentfly.resources.runners.kubernetes.pod import Start, sandbox_pod
from agentfly.resources.spec import ContainerSpec, ModelServiceSpec, PodOptions, ResetSpec
from tests.cluster.fake_kubelet import FakeKubelet
from tests.integration.namespaces import namespace
from tests.unit.kube.object_server import until
from tests.unit.resources.runner_contract import RunnerContract
from tests.unit.resources.runners.kubernetes.daemons import Daemons

pytestmark = pytest.mark.timeout(240)
OWNER = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "name": "kube-root-ca.crt",  # every namespace has it: a pool that does not need its CRD
    "controller": True,
}
NAME = "pool-0a1b-0"


def sandbox(**fields):
    return ContainerSpec(**({"runtime": "kubernetes", "image": "python:3.12"} | fields))


class World:
    def __init__(self, cluster, kube, daemons):
        self.cluster, self.kube, self.daemons = cluster, kube, daemons
        self.per_node = None
        self.owner = None

    def pods(self):
        found = self.cluster.api.get(f"/api/v1/namespaces/{self.kube.namespace}/pods")["items"]
        return {each["metadata"]["name"] for each in found}


@contextlib.asynccontextmanager
async def world(cluster, monkeypatch):
    daemons = Daemons()

    def follow(kind, pod):
        address = pod["status"].get("podIP")
        if kind == "DELETED":
            daemons.end(address)
        elif address and address not in daemons.living:
            daemons.begin(address, pod)

    async with daemons.serving(), namespace(cluster, "agentfly-broker/1") as kube:
        monkeypatch.setattr("agentfly.resources.runners.kubernetes.runner.PORT", daemons.port)
        made = World(cluster, kube, daemons)
        config_map = cluster.api.get(f"/api/v1/namespaces/{kube.namespace}/configmaps/{OWNER['name']}")
        made.owner = OWNER | {"uid": config_map["metadata"]["uid"]}
        async with (
            Kube.connect("agentfly-test/1", kubeconfig=cluster.kubeconfig) as other,
            Informer(other, PODS, kube.namespace) as everything,
            Informer(kube, PODS, kube.namespace, MEMBER_LABELS, project=project_pod) as informer,
        ):
            everything.subscribe(follow)
            await informer.synced()
            pods = PodCluster(
                kube, informer, kube.namespace, lambda pool: made.owner, lambda pool: made.per_node
            )
            made.runner = KubernetesRunner(pods, Signer(b"k" * 32), sandboxd_image="agentfly/sandboxd:dev")  # type: ignore[attr-defined]
            try:
                yield made
            finally:
                await made.runner.close()  # type: ignore[attr-defined]


@pytest.fixture
async def cluster(control_plane, fake_kubelet, monkeypatch):
    async with world(control_plane, monkeypatch) as made:
        yield made


class TestContract(RunnerContract):
    @pytest.fixture
    async def runner(self, cluster):
        self.cluster = cluster
        return cluster.runner

    @pytest.fixture
    def spec(self):
        return sandbox()

    def left(self, runner):
        return self.cluster.pods()


async def test_life_of_a_member_in_requests(cluster, control_plane):
    """One creation, one deletion, and nothing between: neither leases nor resets reach the API server."""
    runner, member = cluster.runner, None
    with control_plane.audit() as audit:
        member = await runner.start(sandbox(), NAME)
        for n in range(5):
            await runner.lease(member, f"owner-{n}", 0, "t", 30, "note")
            assert (await runner.probe(member)).alive
            member = await runner.reset(member)
        await runner.stop(member)
    assert audit.counts(agent="agentfly-broker") == {("create", "pods"): 1, ("delete", "pods"): 1}


async def test_pod_without_room_is_kept_and_starts_when_there_is_some(cluster, fake_kubelet):
    fake_kubelet.cordon()
    start = asyncio.create_task(cluster.runner.start(sandbox(), NAME))
    try:
        await until(lambda: "unschedulable" in _why(cluster, NAME), 20)
        assert not start.done()
    finally:
        fake_kubelet.cordon(False)
    member = await asyncio.wait_for(start, 60)
    await cluster.runner.stop(member)


async def test_deadline_says_what_the_scheduler_said(cluster):
    cluster.runner._lives._start_s = 3.0
    with pytest.raises(StartFailed) as caught:
        await cluster.runner.start(sandbox(cpu=1_000_000), NAME)
    assert caught.value.reason.startswith("Unschedulable: ")
    assert "Insufficient cpu" in caught.value.reason
    assert cluster.pods() == set()


async def test_image_that_cannot_be_pulled_is_named_with_its_error(cluster, fake_kubelet):
    fake_kubelet.fail("ImagePullBackOff", "Back-off pulling image: not found", case="broken")
    try:
        with pytest.raises(StartFailed) as caught:
            await cluster.runner.start(
                sandbox(image="no/such:1", pod=PodOptions(labels={"case": "broken"})), NAME
            )
    finally:
        fake_kubelet.clear()
    assert caught.value.reason == "ImagePullBackOff: image no/such:1: Back-off pulling image: not found"
    assert cluster.pods() == set()


async def test_quota_that_is_used_up_is_the_reason(cluster, control_plane):
    control_plane.kubectl("create", "quota", "none", "--hard=pods=0", "-n", cluster.kube.namespace)
    await asyncio.sleep(1.0)
    with pytest.raises(StartFailed) as caught:
        await cluster.runner.start(sandbox(), NAME)
    assert caught.value.reason.startswith("Forbidden: ")
    assert "exceeded quota" in caught.value.reason


async def test_node_that_is_silent_does_not_keep_a_pod(cluster, fake_kubelet, monkeypatch):
    monkeypatch.setattr("agentfly.resources.runners.kubernetes.lives.STOP_S", 1.0)
    member = await cluster.runner.start(sandbox(pod=PodOptions(labels={"case": "slow"})), NAME)
    fake_kubelet.linger(case="slow")
    try:
        await cluster.runner.stop(member)
    finally:
        fake_kubelet.clear()
    assert cluster.pods() == set()


async def test_starts_go_on_over_a_killed_api_server(cluster, control_plane):
    starts = asyncio.gather(*(cluster.runner.start(sandbox(), f"pool-0a1b-{n}") for n in range(30)))
    await asyncio.sleep(0.3)
    await asyncio.to_thread(control_plane.restart, "kube-apiserver")
    members = await asyncio.wait_for(starts, 90)
    assert cluster.pods() == {member.id for member in members}
    await asyncio.gather(*(cluster.runner.stop(member) for member in members))
    assert cluster.pods() == set()


async def test_pods_of_a_pool_that_is_gone_are_collected(cluster, control_plane):
    member = await cluster.runner.start(sandbox(), NAME)
    control_plane.kubectl("delete", "configmap", OWNER["name"], "-n", cluster.kube.namespace)
    await until(lambda: cluster.pods() == set(), 60)
    assert not (await cluster.runner.probe(member)).alive
    await cluster.runner.stop(member)


async def test_no_node_has_more_than_its_bound(control_plane, monkeypatch):
    with FakeKubelet(control_plane.kubeconfig, nodes=3) as kubelet:
        async with world(control_plane, monkeypatch) as cluster:
            cluster.per_node = 2
            runner = cluster.runner
            members = await asyncio.gather(*(runner.start(sandbox(), f"pool-0a1b-{n}") for n in range(6)))
            nodes = sorted(runner._lives.find(m.id, m.handle.life.uid)["spec"]["nodeName"] for m in members)
            assert nodes == sorted(kubelet.nodes * 2)
            seventh = asyncio.create_task(runner.start(sandbox(), "pool-0a1b-7"))
            await until(lambda: "pool-0a1b-7" in cluster.pods(), 10)
            await asyncio.sleep(1.0)
            assert not seventh.done()
            seventh.cancel()
            await asyncio.wait({seventh})
            await asyncio.gather(*(runner.stop(member) for member in members))


def _why(cluster, name):
    path = f"/api/v1/namespaces/{cluster.kube.namespace}/pods/{name}"
    status, found = cluster.cluster.api.call("GET", path)
    conditions = found["status"].get("conditions", []) if status == 200 else []
    return " ".join(each.get("message", "") for each in conditions)


# What the API server says of every shape, under the Pod Security Standard that it is for.

GIT = ResetSpec(method="git", git="/repo")
SHAPES = [
    sandbox(),
    sandbox(disk_mb=100, network=True, pids=10),
    sandbox(reset=GIT),
    sandbox(reset=ResetSpec(method="recreate")),
    sandbox(reset=ResetSpec(method="paths", paths=("/workspace/repo",))),
    sandbox(env={"A": "$(B)"}, workdir="/w"),
    ModelServiceSpec(
        model="org/m", max_model_len=8, runtime="kubernetes", image="vllm:1", memory_mb=4096, cpu=2
    ),
    ModelServiceSpec(
        model="org/m",
        max_model_len=8,
        runtime="kubernetes",
        image="vllm:1",
        gpus=2,
        shm_mb=64,
        cache_claim="models",
        hub_token="secret/hub/token",
    ),
]
EVERYTHING = {
    "pull_policy": "Always",
    "pull_secrets": ("registry",),
    "node_selector": {"disk": "ssd"},
    "tolerations": ({"key": "a", "operator": "Exists", "tolerationSeconds": 5, "effect": "NoExecute"},),
    "labels": {"team": "a"},
    "annotations": {"note": "b"},
}


def render(spec, kube):
    owner = OWNER | {"uid": "00000000-0000-0000-0000-000000000000"}
    start = Start("pool", NAME, kube.namespace, owner, "n", excluded=frozenset({"node-1"}))
    if isinstance(spec, ModelServiceSpec):
        return model_pod(start, spec)
    return sandbox_pod(start, spec, admin_key=Signer(b"k" * 32).public_key, sandboxd_image="s:1")


@pytest.mark.parametrize("security", ["restricted", "baseline", "privileged"])
async def test_every_shape_is_admitted_under_its_standard(control_plane, security):
    async with namespace(control_plane, enforce=security) as kube:
        for spec in SHAPES:
            for options in ({}, EVERYTHING, {"user_namespace": True} if security == "privileged" else {}):
                pod = PodOptions(security=security, **options)
                rendered = render(spec.model_copy(update={"pod": pod}), kube)
                admitted = await kube.create(PODS, rendered, dry_run=True)
                _kept(rendered, admitted)


@pytest.mark.parametrize(
    ("security", "namespace_of"), [("baseline", "restricted"), ("privileged", "baseline")]
)
async def test_wider_shape_is_refused_under_a_narrower_standard(control_plane, security, namespace_of):
    async with namespace(control_plane, enforce=namespace_of) as kube:
        spec = sandbox(pod=PodOptions(security=security, user_namespace=security == "privileged"))
        with pytest.raises(KubeError, match="violates PodSecurity"):
            await kube.create(PODS, render(spec, kube), dry_run=True)


def _kept(wanted, found, path=""):
    """What was rendered is there: no field is unknown to the API server, which would drop it."""
    if isinstance(wanted, dict):
        for name, value in wanted.items():
            assert name in found, f"{path}.{name} was dropped"
            _kept(value, found[name], f"{path}.{name}")
    elif isinstance(wanted, list):
        for n, value in enumerate(wanted):
            _kept(value, found[n], f"{path}[{n}]")
