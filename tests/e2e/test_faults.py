"""Faults while leases are held and others come and go, on the real node.

After each of them:
1. Every lease of a holder that lives goes on: it executes on, finds its own files, and is renewed.
2. No holder finds a trace of another.
3. The pool was never larger than its max, and no pod is left that the broker does not know.
4. Within 30 s the status says what is so, and the load went on.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster import faults
from tests.cluster.api import wait
from tests.cluster.cluster import Cluster
from tests.cluster.machine import ClusterError
from tests.cluster.space import CONTROL
from tests.e2e.worker import LOOK, leave
from tests.e2e.world import OPERATOR, SYSTEM, Refused, Worker, World, is_ready

MIN, MAX = 4, 5
TRUE_S = 30.0
KEPT = ("kept-0", "kept-1")
POLL_S = 0.2
BRIEF_S = 6


class Scene:
    """A pool, a worker that keeps two leases of it, and everything that is watched."""

    def __init__(self, world: World, worker: Worker, pool: str, most: int) -> None:
        self.world, self.worker, self.pool, self._most = world, worker, pool, most
        self.cluster: Cluster = world.cluster
        self.kept: dict[str, dict[str, Any]] = {}

    def pods(self) -> dict[str, dict[str, Any]]:
        """Members that nobody deletes."""
        found = self.world.pods(f"agentfly.dev/pool={self.pool}")
        return {name: pod for name, pod in found.items() if "deletionTimestamp" not in pod["metadata"]}

    def keep(self, owner: str) -> None:
        """Acquires a lease whose holder must never lose it."""
        self.kept[owner] = self.worker.acquire(self.pool, owner)
        assert self.worker.exec(owner, LOOK)["stdout"] == ""
        assert self.worker.exec(owner, leave(owner))["stdout"] == f"{owner}\n"

    def give_back(self, owner: str) -> None:
        del self.kept[owner]
        self.worker.release(owner)

    def all_kept(self) -> bool:
        """Whether every kept lease is renewed, is the same, and has its files."""
        alive = self.worker.ask("renew")
        for owner, before in self.kept.items():
            now = self.worker.ask("info", owner=owner)
            assert not now.pop("lost"), f"{owner} lost its lease"
            assert (alive[owner], now) == (True, before)
            assert self.worker.exec(owner, "cat /tmp/mark")["stdout"] == f"{owner}\n"
        return True

    def holds(self, owner: str) -> bool:
        """Whether another lease of the worker is still good for a command."""
        with contextlib.suppress(Refused):
            return bool(self.worker.exec(owner, "cat /tmp/mark")["stdout"] == f"{owner}\n")
        return False

    def truth(self) -> bool:
        """Whether broker, status and pods say the same, and the pool is whole."""
        pods = self.pods()
        leases = [each for each in self.worker.ask("leases") if each["pool"] == self.pool]
        status = self.world.status(self.pool)
        members = status["members"]
        quiet = {key: members[key] for key in ("starting", "resetting", "quarantined", "outdated")}
        return (
            all(is_ready(pod) for pod in pods.values())
            and {each["member_id"] for each in leases} <= set(pods)
            and set(self.kept) <= {each["owner"] for each in leases}
            and set(quiet.values()) == {0}
            and (members["total"], members["leased"]) == (len(pods), len(leases))
            and members["free"] == len(pods) - len(leases)
            and any(each["type"] == "Ready" and each["status"] == "True" for each in status["conditions"])
        )

    def told(self) -> str:
        """What is so, for an error."""
        with contextlib.suppress(OSError, ClusterError, Refused):
            pods = {name: pod["status"].get("phase") for name, pod in self.pods().items()}
            return f"{self.world.status(self.pool).get('members')}, {pods}, {self.worker.ask('leases')}"
        return "nobody answers"

    def becomes(self, what: str, so: Callable[[], bool], within_s: float) -> None:
        """Waits until something is so; nobody answering is no answer."""

        def look() -> bool:
            with contextlib.suppress(OSError, ClusterError, Refused, KeyError):
                return so()
            return False

        try:
            wait(what, look, max(within_s, 0.1), every_s=POLL_S)
        except ClusterError as error:
            raise AssertionError(f"{error}: {self.told()}") from None

    @contextlib.contextmanager
    def watched(self, *, lost: tuple[str, ...] = ()) -> Iterator[Callable[[], None]]:
        """A load for the length of a block, and everything that must be so after it.

        The block calls what it is given when its fault is over. ``lost``: the members that the fault takes.
        """
        ended = 0.0

        def over() -> None:
            nonlocal ended
            ended = time.monotonic()

        self.worker.ask("load", pool=self.pool, loops=2)
        with _sizes(self) as sizes:
            yield over
            assert ended, "the block must say when its fault is over"
            rounds = self.worker.ask("report")["rounds"]
            self.becomes("the load goes on", lambda: self.worker.ask("report")["rounds"] > rounds + 1, TRUE_S)
            self.becomes("kept", self.all_kept, TRUE_S)
            self.keep("extra")  # what was true before is not true now
            report = self.worker.ask("rest")
            self.becomes("status is true", self.truth, TRUE_S + ended - time.monotonic())
        self.give_back("extra")
        missing = [each for each in report["lost"] if not any(f" on {name}:" in each for name in lost)]
        assert (report["found"], missing, report["failed"]) == ([], [], []), report
        assert max(sizes) <= self._most, f"more pods than max: {sizes}"


@contextlib.contextmanager
def _sizes(scene: Scene) -> Iterator[list[int]]:
    """How many pods the pool has, looked at all the time."""
    found, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(POLL_S):
            with contextlib.suppress(OSError, ClusterError):
                found.append(len(scene.pods()))

    thread = threading.Thread(target=look, name="sizes", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join(60)


@pytest.fixture(scope="module")
def stage(installed: World) -> Scene:
    installed.pool("faults", capacity={"min": MIN, "max": MAX})
    made = Scene(installed, installed.worker(), "faults", MAX)
    for owner in KEPT:
        made.keep(owner)
    return made


@pytest.fixture
def scene(stage: Scene) -> Iterator[Scene]:
    yield stage
    stage.worker.ask("rest")
    for owner in set(stage.kept) - set(KEPT):  # of a test that failed
        stage.give_back(owner)


def restarts(scene: Scene, namespace: str, pod: str) -> int:
    found = scene.cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/{pod}")
    return int(sum(each["restartCount"] for each in found["status"]["containerStatuses"]))


def run_again(scene: Scene, namespace: str, pod: str, times: int) -> None:
    """Waits for the kubelet, whose pauses before a start are its own."""
    wait(f"{pod} runs again", lambda: restarts(scene, namespace, pod) >= times, 60.0, every_s=POLL_S)


def operator_pod(scene: Scene) -> str:
    found = scene.cluster.api.get(f"/api/v1/namespaces/{SYSTEM}/pods")["items"]
    (name,) = (pod["metadata"]["name"] for pod in found if "deletionTimestamp" not in pod["metadata"])
    return str(name)


# Killed


def test_shim_of_the_broker_is_killed(scene: Scene) -> None:
    with scene.watched() as over:
        broker = scene.world.broker_pod()
        faults.kill_shim(scene.cluster, scene.world.namespace, broker)
        run_again(scene, scene.world.namespace, broker, 1)
        over()


def test_broker_is_killed(scene: Scene) -> None:
    before = scene.pods()
    with scene.watched() as over:
        broker = scene.world.broker_pod()
        count = restarts(scene, scene.world.namespace, broker)
        faults.kill_container(scene.cluster, scene.world.namespace, broker, "broker")
        assert scene.worker.exec(KEPT[0], "echo no broker in the way")["exit_code"] == 0
        run_again(scene, scene.world.namespace, broker, count + 1)
        over()
    assert {name: pod["metadata"]["uid"] for name, pod in before.items()}.items() <= {
        name: pod["metadata"]["uid"] for name, pod in scene.pods().items()
    }.items()


def test_operator_is_killed(scene: Scene) -> None:
    with scene.watched() as over:
        operator = operator_pod(scene)
        count = restarts(scene, SYSTEM, operator)
        faults.kill_container(scene.cluster, SYSTEM, operator, OPERATOR.removeprefix("agentfly-"))
        run_again(scene, SYSTEM, operator, count + 1)
        over()


def test_kubelet_is_killed(scene: Scene) -> None:
    with scene.watched() as over:
        scene.cluster.kill("node1-kubelet")
        rounds = scene.worker.ask("report")["rounds"]
        scene.becomes(
            "rounds without a kubelet", lambda: scene.worker.ask("report")["rounds"] > rounds + 2, 15.0
        )
        scene.all_kept()
        scene.cluster.restart("node1-kubelet")
        over()


def test_api_server_is_killed(scene: Scene) -> None:
    with scene.watched() as over:
        scene.cluster.kill("kube-apiserver")
        rounds = scene.worker.ask("report")["rounds"]
        scene.becomes(
            "rounds without an API server", lambda: scene.worker.ask("report")["rounds"] > rounds + 2, 15.0
        )
        scene.all_kept()
        scene.cluster.restart("kube-apiserver")
        over()


def test_shim_of_a_sandbox_is_killed(scene: Scene) -> None:
    """Its lease is lost, for there is nothing left of it, and its holder is told; no other is."""
    victim = scene.worker.acquire("faults", "victim")["member_id"]
    scene.worker.exec("victim", leave("victim"))
    with scene.watched(lost=(victim,)) as over:
        faults.kill_shim(scene.cluster, scene.world.namespace, victim)
        over()
        scene.becomes("the holder knows", lambda: scene.worker.ask("renew").get("victim") is not True, 20.0)
        with pytest.raises(Refused, match=r"SandboxUnreachable|LeaseLost"):
            scene.worker.exec("victim", "true")
        scene.worker.release("victim")
        scene.becomes("it is gone", lambda: victim not in scene.pods(), TRUE_S)


def test_worker_is_killed(scene: Scene) -> None:
    """Its leases end with their TTL, and what it left is not there for the next holder."""
    scene.world.pool("brief", capacity={"min": 2, "max": 2}, lease={"ttlSeconds": BRIEF_S})
    brief = Scene(scene.world, scene.worker, "brief", 2)
    doomed = scene.world.worker("doomed", restartPolicy="Never")
    held = [doomed.acquire("brief", f"doomed-{number}") for number in range(2)]
    for number in range(2):
        doomed.exec(f"doomed-{number}", leave("doomed"))
    with scene.watched() as over:
        faults.kill_container(scene.cluster, scene.world.namespace, "doomed")
        began = time.monotonic()
        over()
        with pytest.raises(Refused, match="Timeout"):
            scene.worker.acquire("brief", "early", deadline=BRIEF_S / 3)
        next_ones = [scene.worker.acquire("brief", f"next-{number}") for number in range(2)]
        assert time.monotonic() - began < BRIEF_S + 10
        assert {each["member_id"] for each in next_ones} == {each["member_id"] for each in held}
        for number in range(2):
            assert scene.worker.exec(f"next-{number}", LOOK)["stdout"] == ""
            scene.worker.release(f"next-{number}")
        brief.becomes("status of its pool is true", brief.truth, TRUE_S)
    assert set(brief.pods()) == {each["member_id"] for each in held}


# Cut off

CUT_S = 6.0


@contextlib.contextmanager
def cut(scene: Scene, pod: str, other: str) -> Iterator[None]:
    faults.cut_pod(scene.cluster, scene.world.namespace, pod, other)
    try:
        yield
    finally:
        faults.mend_pod(scene.cluster, scene.world.namespace, pod, other)


def address(scene: Scene, pod: str) -> str:
    found = scene.cluster.api.get(f"{scene.world.path}/pods/{pod}")
    return str(found["status"]["podIP"])


def test_worker_and_broker_are_cut(scene: Scene) -> None:
    with scene.watched() as over:
        with cut(scene, scene.worker.name, address(scene, scene.world.broker_pod())):
            assert scene.worker.exec(KEPT[0], "echo no broker in the way")["exit_code"] == 0
            with pytest.raises(Refused, match="Infra"):
                scene.worker.ask("leases")
            time.sleep(CUT_S)
        over()


def test_broker_and_api_server_are_cut(scene: Scene) -> None:
    with scene.watched() as over:
        with cut(scene, scene.world.broker_pod(), CONTROL):
            rounds = scene.worker.ask("report")["rounds"]
            time.sleep(CUT_S)
            assert scene.worker.ask("report")["rounds"] > rounds, "acquires need no API server"
            scene.all_kept()
        over()


def test_worker_and_sandbox_are_cut(scene: Scene) -> None:
    with scene.watched() as over:
        with cut(scene, scene.worker.name, address(scene, scene.kept[KEPT[0]]["member_id"])):
            with pytest.raises(Refused, match="SandboxUnreachable"):
                scene.worker.exec(KEPT[0], "true")
            assert scene.worker.ask("renew")[KEPT[0]] is True, "the lease is the broker's to renew"
            assert scene.worker.exec(KEPT[1], "echo still")["exit_code"] == 0
        over()


def test_broker_and_sandbox_are_cut(scene: Scene) -> None:
    with scene.watched() as over:
        with cut(scene, scene.world.broker_pod(), address(scene, scene.kept[KEPT[0]]["member_id"])):
            end = time.monotonic() + CUT_S
            while time.monotonic() < end:
                assert scene.worker.exec(KEPT[0], "cat /tmp/mark")["stdout"] == f"{KEPT[0]}\n"
                time.sleep(1)
        over()


# Full


def test_disk_of_a_sandbox_is_full(scene: Scene) -> None:
    with scene.watched() as over:
        before = scene.worker.acquire("faults", "filler")
        full = scene.worker.exec(
            "filler", "dd if=/dev/zero of=/workspace/all bs=1M; dd if=/dev/zero of=/tmp/all bs=64k"
        )
        assert full["stderr"].count("No space left on device") == 2
        assert scene.worker.exec("filler", "echo x >/workspace/more")["exit_code"] != 0
        assert scene.worker.exec("filler", "echo alive; rm -f /tmp/all")["stdout"] == "alive\n"
        assert scene.worker.ask("renew")["filler"] is True
        over()
        after = scene.worker.ask("reset", owner="filler")
        assert (after["member_id"], after["incarnation"]) == (before["member_id"], before["incarnation"] + 1)
        clean = scene.worker.exec(
            "filler", "ls -A /workspace; echo x >/workspace/more && cat /workspace/more"
        )
        assert clean["stdout"] == "x\n"
        scene.worker.exec("filler", "dd if=/dev/zero of=/workspace/all bs=1M")
        scene.worker.release("filler")
    assert before["member_id"] in scene.pods()
