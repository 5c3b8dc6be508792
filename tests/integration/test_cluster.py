"""The test cluster itself: what the other tests of this folder and of tests/e2e rely on."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cluster import state
from tests.cluster.api import Api, wait
from tests.cluster.cluster import Cluster, running, sweep_orphans
from tests.cluster.fake_kubelet import FakeKubelet
from tests.cluster.foreign import ForeignCluster
from tests.cluster.groups import Groups
from tests.cluster.machine import ClusterError, Unavailable
from tests.cluster.traces import NOTHING, traces

PODS = "/api/v1/namespaces/default/pods"
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")


def pod(name: str, **spec: Any) -> dict[str, Any]:
    container = {"name": "c", "image": "agentfly-test/none:1"}
    return {
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"containers": [container], **spec},
    }


def status(api: Api, name: str) -> dict[str, Any]:
    found: dict[str, Any] = api.get(f"{PODS}/{name}")["status"]
    return found


def condition(of: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((one for one in of.get("conditions", ()) if one["type"] == kind), {})


def gone(api: Api, name: str) -> Callable[[], bool]:
    return lambda: api.call("GET", f"{PODS}/{name}")[0] == 404


def request(api: Api, method: str, path: str, agent: str, body: Any = None) -> int:
    api.headers = {**api.headers, "User-Agent": agent}
    return api.call(method, path, body)[0]


def test_answers_with_the_version_that_is_pinned(control_plane: Cluster) -> None:
    assert control_plane.api.get("/version")["gitVersion"] == "v1.34.4"
    assert (
        json.loads(control_plane.kubectl("get", "namespace", "default", "-o", "json"))["kind"] == "Namespace"
    )


def test_the_audit_log_counts_requests_exactly_by_agent_verb_and_resource(control_plane: Cluster) -> None:
    api = control_plane.api
    mine = {"metadata": {"name": "counted"}, "data": {"a": "1"}}
    maps = "/api/v1/namespaces/default/configmaps"
    assert request(api, "GET", f"{maps}?limit=1", "tester/1") == 200
    with control_plane.audit() as audit:
        for _ in range(3):
            assert request(api, "GET", f"{maps}?limit=1", "tester/1") == 200
        assert request(api, "POST", maps, "tester/1", mine) == 201
        assert request(api, "GET", f"{maps}/counted", "other/1") == 200
        watch = f"{maps}?watch=1&timeoutSeconds=1"
        assert request(api, "GET", watch, "tester/1") == 200
        assert request(api, "DELETE", f"{maps}/counted", "tester/1") == 200
    assert audit.counts(agent="tester/") == {
        ("list", "configmaps"): 3,
        ("create", "configmaps"): 1,
        ("watch", "configmaps"): 1,
        ("delete", "configmaps"): 1,
    }
    assert audit.writes(agent="tester/") == {("create", "configmaps"): 1, ("delete", "configmaps"): 1}
    assert audit.counts(agent="other/") == {("get", "configmaps"): 1}
    with control_plane.audit() as nothing:
        pass
    assert nothing.counts(agent="tester/") == {}


def test_a_fake_pod_runs_with_an_address_that_answers_and_goes_when_deleted(
    control_plane: Cluster, fake_kubelet: FakeKubelet
) -> None:
    api = control_plane.api
    api.create(PODS, pod("runs"))
    wait("pod", lambda: condition(status(api, "runs"), "Ready").get("status") == "True", 20.0)
    found = status(api, "runs")
    assert found["phase"] == "Running"
    assert found["podIP"].startswith("127.")
    assert found["containerStatuses"][0]["state"]["running"]["startedAt"]
    assert api.get(f"{PODS}/runs")["spec"]["nodeName"] == "fake-0"
    api.call("DELETE", f"{PODS}/runs")
    wait("pod gone", gone(api, "runs"), 10.0)


def test_fake_pods_can_be_held_failed_and_kept_terminating(
    control_plane: Cluster, fake_kubelet: FakeKubelet
) -> None:
    api = control_plane.api
    fake_kubelet.hold(app="held")
    fake_kubelet.fail("ImagePullBackOff", "Back-off pulling image", app="failed")
    fake_kubelet.linger(app="lingers")
    for name in ("held", "failed", "lingers"):
        api.create(PODS, pod(name))
    wait("lingers", lambda: status(api, "lingers")["phase"] == "Running", 20.0)
    wait("failed", lambda: "containerStatuses" in status(api, "failed"), 20.0)
    wait("held", lambda: "containerStatuses" in status(api, "held"), 20.0)
    waiting = status(api, "failed")["containerStatuses"][0]["state"]["waiting"]
    assert waiting == {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
    assert status(api, "held")["phase"] == "Pending"
    api.call("DELETE", f"{PODS}/lingers")
    time.sleep(0.5)
    assert api.get(f"{PODS}/lingers")["metadata"]["deletionTimestamp"]
    fake_kubelet.clear()
    wait("lingers gone", gone(api, "lingers"), 10.0)
    for name in ("held", "failed"):
        wait(name, lambda name=name: status(api, name)["phase"] == "Running", 10.0)


def test_pods_that_are_deleted_while_they_start_are_no_trouble(control_plane: Cluster) -> None:
    api = control_plane.api
    with FakeKubelet(control_plane.kubeconfig, start_s=0.2) as kubelet:
        for number in range(60):
            body = pod(f"many-{number}", nodeName="fake-0")
            body["metadata"]["labels"] = {"app": "many"}
            api.create(PODS, body)
        assert api.call("DELETE", f"{PODS}?labelSelector=app%3Dmany")[0] == 200
        wait("gone", lambda: not api.get(f"{PODS}?labelSelector=app%3Dmany")["items"], 30.0)
        assert kubelet.nodes == ("fake-0",)


def test_unschedulable_is_the_word_of_the_real_scheduler(
    control_plane: Cluster, fake_kubelet: FakeKubelet
) -> None:
    api = control_plane.api
    wants = {"resources": {"requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "1"}}}
    body = pod("gpu")
    body["spec"]["containers"][0] |= wants
    api.create(PODS, body)
    wait("condition", lambda: bool(condition(status(api, "gpu"), "PodScheduled")), 10.0)
    assert condition(status(api, "gpu"), "PodScheduled")["reason"] == "Unschedulable"
    assert "Insufficient nvidia.com/gpu" in condition(status(api, "gpu"), "PodScheduled")["message"]
    api.call("DELETE", f"{PODS}/gpu")


def test_the_fake_kubelet_survives_a_restart_of_the_api_server(
    control_plane: Cluster, fake_kubelet: FakeKubelet
) -> None:
    api = control_plane.api
    api.create(PODS, pod("before"))
    wait("before", lambda: status(api, "before")["phase"] == "Running", 20.0)
    before = control_plane.pid("kube-apiserver")
    control_plane.kill("kube-apiserver")
    with pytest.raises(OSError):
        api.get("/version")
    assert control_plane.names()["kube-apiserver"] is False
    assert control_plane.restart("kube-apiserver") < 30.0
    assert control_plane.pid("kube-apiserver") != before
    assert status(api, "before")["phase"] == "Running"
    wait("create", lambda: api.call("POST", PODS, pod("after"))[0] in (201, 409), 20.0)
    wait("after", lambda: status(api, "after")["phase"] == "Running", 30.0)
    for name in ("before", "after"):
        api.call("DELETE", f"{PODS}/{name}")
        wait("gone", gone(api, name), 20.0)


async def test_cut_resets_what_is_open_and_what_comes_until_it_is_mended(control_plane: Cluster) -> None:
    api = control_plane.api
    timeout = aiohttp.ClientTimeout(total=20.0)
    async with aiohttp.ClientSession(api.server, headers=api.headers, timeout=timeout) as session:
        async with session.get(
            "/api/v1/pods?watch=1&sendInitialEvents=true&allowWatchBookmarks=true"
            "&resourceVersionMatch=NotOlderThan",
            ssl=api.ssl,
        ) as watch:
            assert await watch.content.readline()
            control_plane.cut()
            with pytest.raises(aiohttp.ClientError):
                await watch.content.read()
        with pytest.raises(aiohttp.ClientError):
            await session.get("/version", ssl=api.ssl)
        control_plane.mend()
        async with session.get("/version", ssl=api.ssl) as answer:
            assert answer.status == 200


def test_nothing_of_a_cluster_is_left_after_it(control_plane: Cluster, tmp_path: Path) -> None:
    """`control_plane` says that this machine can; a second cluster beside it is not disturbed by it."""
    folder = tmp_path / "c"
    with running(folder) as second:
        assert second.api.ready()
        assert traces(folder)["groups"]
        assert traces(folder)["processes"]
        assert traces(folder)["interfaces"] == []
    assert traces(folder) == NOTHING
    assert control_plane.api.ready()


def test_a_cluster_whose_owner_was_killed_is_swept_by_the_next_one(
    control_plane: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "c"
    program = (
        "import os, signal, sys; from pathlib import Path; from tests.cluster.cluster import running\n"
        "with running(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], timeout=90, check=False)
    assert done.returncode == -9
    assert Groups(state.group_name(folder)).pids()
    sweep_orphans()
    assert traces(folder) == NOTHING
    assert control_plane.api.ready()


def test_a_control_plane_that_does_not_come_up_leaves_only_its_logs(
    control_plane: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "c"
    with (
        pytest.raises(ClusterError, match=r"kube-apiserver: ended.*no-such-flag"),
        running(folder, flags=["--no-such-flag"]),
    ):
        pass
    assert traces(folder) == {**NOTHING, "files": [str(folder)]}


def test_the_command_starts_shows_and_stops_a_cluster(control_plane: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "c"

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "tests.cluster", "--dir", str(folder), *words]
        return subprocess.run(line, capture_output=True, text=True, timeout=90, check=False)

    try:
        up = command("up", "--nodes", "")
        assert up.stdout.splitlines()[-1].endswith(f"export KUBECONFIG={folder}/admin.kubeconfig"), up
        before = Cluster(folder).pid("kube-apiserver")
        assert command("up", "--nodes", "").returncode == 0
        assert Cluster(folder).pid("kube-apiserver") == before
        assert [line.split() for line in command("status").stdout.splitlines()] == [
            [name, "runs"] for name in ("forward", *CONTROL_PLANE)
        ]
        assert "10.250.0.1/24" in command("x", "ip", "addr").stdout
        Cluster(folder).kill("kube-scheduler")
        status = command("status")
        assert status.returncode == 1
        assert "dead" in status.stdout
    finally:
        assert command("down").returncode == 0
    assert traces(folder) == NOTHING
    gone = command("status")
    assert gone.returncode == 1
    assert "is not up" in gone.stderr


def test_another_cluster_gives_its_api_and_skips_what_needs_more(control_plane: Cluster) -> None:
    other = ForeignCluster(control_plane.kubeconfig)
    assert other.api.ready()
    assert json.loads(other.kubectl("get", "--raw", "/version"))["major"] == "1"
    with pytest.raises(pytest.skip.Exception, match="restart: needs a cluster of tests/cluster"):
        other.restart("kube-apiserver")


def test_a_folder_with_other_files_is_never_removed(control_plane: Cluster, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for attempt in (Cluster(tmp_path).down, Cluster(tmp_path).up):
        with pytest.raises(ClusterError, match="is not empty and was not made for a cluster"):
            attempt()
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_who_is_not_root_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unavailable) as caught:
        Cluster(tmp_path / "c").up()
    assert caught.value.message.startswith("user: 1000 is not root")
    assert any("AGENTFLY_TEST_KUBECONFIG" in hint for hint in caught.value.hints)
