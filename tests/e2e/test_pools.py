"""Fields of pools of sandboxes that only a real node shows, and what kubectl and agentfly show of them."""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import images
from tests.cluster.api import wait
from tests.e2e import objects
from tests.e2e.objects import apply, as_json, condition, get, in_pod, is_so, members, pool_of
from tests.e2e.world import UP_S, Refused, Worker, World

SMALL: dict[str, Any] = {"image": images.PYTHON, "cpu": "20m", "memory": "64Mi"}


@pytest.fixture(scope="module")
def worker(installed: World) -> Worker:
    return installed.worker()


def sandboxes(name: str, *, container: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    return pool_of(name, container=SMALL | (container or {}), **spec)


def ready(world: World, name: str, count: int) -> None:
    wait(
        f"{count} members of {name}",
        lambda: world.status(name).get("members", {}).get("ready") == count,
        UP_S,
        every_s=0.2,
    )


# -- capacity


def test_a_pool_grows_with_its_holders_keeps_its_buffer_and_shrinks(installed: World, worker: Worker) -> None:
    capacity = {"min": 1, "max": 4, "buffer": 1, "maxStarting": 1}
    apply(installed, sandboxes("grows", capacity=capacity))
    ready(installed, "grows", 1)
    worker.acquire("grows", "g1")
    ready(installed, "grows", 2)  # one is held, one is free beside it
    most = 0

    def scaled() -> bool:
        nonlocal most
        most = max(most, worker.ask("pools")["grows"]["starting"])
        return installed.status("grows")["members"]["ready"] == 4

    installed.cluster.kubectl("scale", "-n", installed.namespace, "rpool/grows", "--replicas=4")
    wait("4 members", scaled, UP_S, every_s=0.05)
    assert most == 1
    assert get(installed, "grows")["spec"]["capacity"] == capacity | {"min": 4}
    # A smaller maximum ends free members at once, and never one that is held.
    text = json.dumps({"spec": {"capacity": {"min": 0, "max": 1, "buffer": 0}}})
    installed.cluster.kubectl(
        *("patch", "-n", installed.namespace, "rpool/grows", "--type=merge", "-p", text)
    )
    ready(installed, "grows", 1)
    wait("one pod", lambda: len(members(installed, "grows")) == 1, UP_S, every_s=0.2)
    assert worker.exec("g1", "echo still")["stdout"] == "still\n"
    worker.release("g1")
    objects.delete(installed, "grows")


def test_a_quota_and_a_node_bound_what_there_is(installed: World, worker: Worker) -> None:
    apply(
        installed,
        sandboxes("quota", capacity={"min": 1, "max": 9, "quota": {"cpu": "70m"}}),
        sandboxes("spread", capacity={"min": 3, "max": 3, "perNode": 2}),
    )
    held = [f"q{number}" for number in range(3)]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda owner: worker.acquire("quota", owner), held))
    with pytest.raises(Refused, match="Timeout"):
        worker.acquire("quota", "q3", deadline=3.0)
    assert len(members(installed, "quota")) == 3
    ready(installed, "spread", 2)  # there is one node
    is_so(installed, "spread", "Unschedulable")
    placed = [pod["spec"].get("nodeName") for pod in members(installed, "spread").values()]
    assert sorted(map(bool, placed)) == [False, True, True]
    for owner in held:
        worker.release(owner)
    objects.delete(installed, "quota", "spread")


def test_a_change_of_the_template_waits_for_the_holder(installed: World, worker: Worker) -> None:
    apply(installed, sandboxes("rolls", capacity={"min": 2, "max": 2}))
    ready(installed, "rolls", 2)
    lease = worker.acquire("rolls", "stays")
    worker.exec("stays", "echo mine >/tmp/mine")
    old = members(installed, "rolls")
    apply(installed, sandboxes("rolls", container={"env": {"NEW": "1"}}, capacity={"min": 2, "max": 2}))
    wait(
        "the idle one",
        lambda: (
            len(set(members(installed, "rolls")) - set(old)) == 1 and len(members(installed, "rolls")) == 2
        ),
        UP_S,
        every_s=0.2,
    )
    assert lease["member_id"] in members(installed, "rolls")
    wait("outdated", lambda: installed.status("rolls")["members"]["outdated"] == 1, 20.0, every_s=0.2)
    assert condition(installed, "rolls", "Reconciling")["status"] == "True"
    assert worker.exec("stays", "cat /tmp/mine; echo $NEW")["stdout"] == "mine\n\n"
    worker.release("stays")
    wait("the last", lambda: not set(members(installed, "rolls")) & set(old), UP_S, every_s=0.2)
    ready(installed, "rolls", 2)
    wait("current", lambda: installed.status("rolls")["members"]["outdated"] == 0, 20.0, every_s=0.2)
    for owner in ("one", "two"):
        worker.acquire("rolls", owner)
        assert worker.exec(owner, "echo $NEW")["stdout"] == "1\n"
        worker.release(owner)
    objects.delete(installed, "rolls")


# -- images


def test_images_take_turns_and_the_next_one_is_warm_before_it_is_asked_for(
    installed: World, worker: Worker
) -> None:
    spec = {"images": {"policy": "PerAcquire", "maxResident": 1}, "capacity": {"min": 0, "max": 2}}
    apply(installed, sandboxes("tasks", **spec))
    is_so(installed, "tasks", "Ready")

    def image_of(owner: str) -> str:
        name = worker.ask("info", owner=owner)["member_id"]
        pods = members(installed, "tasks")
        return str(pods[name]["spec"]["containers"][0]["image"])

    worker.acquire("tasks", "first", image=images.PYTHON)
    assert image_of("first") == images.PYTHON
    worker.release("first")
    worker.acquire("tasks", "second", image=images.BUSYBOX)
    assert image_of("second") == images.BUSYBOX
    assert worker.exec("second", "python3 -c 1")["exit_code"] == 127
    worker.release("second")

    def resident() -> set[str]:
        return {pod["spec"]["containers"][0]["image"] for pod in members(installed, "tasks").values()}

    # Free members have one image at a time, the one that was used last or that is announced.
    wait("the last image", lambda: resident() == {images.BUSYBOX}, UP_S, every_s=0.2)
    worker.ask("demand", pool="tasks", wanted={images.PYTHON: 1}, owner="epoch")

    def warm() -> bool:
        found = worker.ask("pools")["tasks"]
        return bool(found["images"] == {images.PYTHON: 1} and found["ready"] == 1)

    wait("the image of the next task", warm, UP_S, every_s=0.2)
    begun = time.monotonic()
    worker.acquire("tasks", "third", image=images.PYTHON)
    assert time.monotonic() - begun < 1.0
    assert image_of("third") == images.PYTHON
    worker.release("third")
    objects.delete(installed, "tasks")


# -- resets

LEVELS = {"Baseline": "baseline", "Privileged": "privileged", "Restricted": "restricted"}
RESETS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "baseline": ({"podSecurity": "Baseline"}, {}, "OverlaySharedPID"),
    "baseline-user": ({"podSecurity": "Baseline", "userNamespace": True}, {}, "OverlaySharedPID"),
    "privileged": ({"podSecurity": "Privileged"}, {}, "OverlaySharedPID"),
    "privileged-user": ({"podSecurity": "Privileged", "userNamespace": True}, {}, "Overlay"),
    "restricted": ({"podSecurity": "Restricted"}, {}, "Scratch"),
    "git": ({"podSecurity": "Baseline"}, {"method": "Git", "git": "/repo"}, "Git"),
    "command": (
        {"podSecurity": "Baseline"},
        {"method": "Command", "command": ["sh", "-c", "rm -rf /srv/data/*"], "paths": ["/srv/data"]},
        "Command",
    ),
    "recreate": ({"podSecurity": "Baseline"}, {"method": "Recreate"}, "Recreate"),
}
WRITTEN = {"git": "/repo", "command": "/srv/data"}


@pytest.fixture(scope="module")
def resets(installed: World) -> Iterator[None]:
    installed.cluster.import_image(tools_image())
    pools = [
        sandboxes(
            f"r-{name}",
            container={"image": TOOLS, "reset": reset or {"method": "Auto"}},
            security=security,
            capacity={"min": 1, "max": 1},
        )
        for name, (security, reset, _) in RESETS.items()
    ]
    spaces = {level: f"{installed.namespace}-{level}" for level in LEVELS.values()}
    for level, space in spaces.items():
        labels = {"pod-security.kubernetes.io/enforce": level}
        installed.cluster.api.create("/api/v1/namespaces", {"metadata": {"name": space, "labels": labels}})
    apply(installed, *pools)
    for space in spaces.values():
        account = f"/api/v1/namespaces/{space}/serviceaccounts/default"
        wait("account", lambda a=account: installed.cluster.api.exists(a), UP_S)
    yield
    objects.delete(installed, *(f"r-{name}" for name in RESETS))
    for space in spaces.values():
        installed.cluster.api.call("DELETE", f"/api/v1/namespaces/{space}")


TOOLS = "agentfly-test/tools:1"


def tools_image() -> Path:
    """The Python image with a repository and a folder that are reset."""
    git = ("git", "-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "init.defaultBranch=main")
    with tempfile.TemporaryDirectory() as folder:
        repo = Path(folder)
        (repo / "kept.txt").write_text("kept\n")
        for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
            when = {"GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}
            subprocess.run([*git, *words], cwd=repo, check=True, env=when | {"PATH": "/usr/bin:/bin"})
        files = {
            f"/repo/{path.relative_to(repo)}": path.read_bytes()
            for path in sorted(repo.rglob("*"))
            if path.is_file() and "hooks" not in path.parts
        }
    return images.with_files(TOOLS, images.python(), files | {"/srv/data/.keep": b""})


@pytest.mark.parametrize("name", RESETS)
def test_each_way_of_a_reset_in_the_pod_security_it_is_promised_for(
    installed: World, worker: Worker, resets: None, name: str
) -> None:
    security, _, method = RESETS[name]
    pool, owner = f"r-{name}", f"reset-{name}"
    ready(installed, pool, 1)
    assert installed.status(pool)["reset"]["method"] == method
    (before,) = members(installed, pool).values()
    allowed(installed, before, LEVELS[security["podSecurity"]])
    folder = WRITTEN.get(name, "/tmp")
    lease = worker.acquire(pool, owner)
    assert worker.exec(owner, f"echo dirt >{folder}/dirt; cat {folder}/dirt")["stdout"] == "dirt\n"
    worker.exec(owner, "(setsid sleep 987 &)")
    worker.release(owner)
    worker.acquire(pool, owner)
    found = worker.exec(owner, f"ls -A {folder}; cat /proc/[0-9]*/cmdline | tr '\\0' ' '")["stdout"]
    assert "dirt" not in found
    assert "sleep 987" not in found
    after = worker.ask("info", owner=owner)
    assert after["member_id"] == lease["member_id"]
    assert after["incarnation"] == lease["incarnation"] + 1
    same = members(installed, pool)[lease["member_id"]]["metadata"]["uid"] == before["metadata"]["uid"]
    assert same is (method != "Recreate")
    worker.release(owner)


def allowed(world: World, pod: dict[str, Any], level: str) -> None:
    """The API server admits a pod like this one to a namespace that enforces the level."""
    namespace = f"{world.namespace}-{level}"
    path = f"/api/v1/namespaces/{namespace}"
    meta = {key: pod["metadata"][key] for key in ("name", "labels", "annotations")}
    spec = {key: value for key, value in pod["spec"].items() if key != "nodeName"}
    status, answer = world.cluster.api.call(
        "POST", f"{path}/pods?dryRun=All", {"metadata": meta, "spec": spec}
    )
    assert status == 201, answer


# -- what a member may do

CONNECT = (
    "import socket, sys\n"
    "for place in sys.argv[1:]:\n"
    "    host, port = place.rsplit(':', 1)\n"
    "    try:\n"
    "        socket.create_connection((host, int(port)), timeout=3).close(); print('yes')\n"
    "    except OSError as error:\n"
    "        print('no')\n"
)
SERVER = (
    "import http.server as h; h.ThreadingHTTPServer(('', 8080), h.SimpleHTTPRequestHandler).serve_forever()"
)


def test_a_network_is_none_the_public_one_or_what_is_named(installed: World, worker: Worker) -> None:
    target = objects.served_by(installed, "target", SERVER)
    other = objects.served_by(installed, "other", SERVER)
    on = {"network": True}
    one = {"capacity": {"min": 1, "max": 1}}
    apply(
        installed,
        sandboxes("net-none", **one),
        sandboxes("net-public", container=on, **one),
        sandboxes(
            "net-named",
            container=on,
            security={"egress": [{"cidr": f"{target}/32", "ports": [8080]}], "dns": False},
            **one,
        ),
    )
    reached = {}
    for pool in ("net-none", "net-public", "net-named"):
        worker.acquire(pool, pool)
        places = f"{target}:8080 {other}:8080 10.250.0.1:6443"
        said = worker.exec(pool, f'python3 -c "{CONNECT}" {places}')["stdout"].split()
        names = worker.exec(pool, "getent hosts kubernetes.default.svc.cluster.local")
        reached[pool] = (said, names["exit_code"] == 0)
        worker.release(pool)
    assert reached == {
        "net-none": (["no", "no", "no"], False),
        "net-public": (["no", "no", "no"], True),
        "net-named": (["yes", "no", "no"], False),
    }
    objects.delete(installed, "net-none", "net-public", "net-named")


def test_a_sandbox_has_its_environment_and_its_bounds(installed: World, worker: Worker) -> None:
    bounds = {"memory": "96Mi", "disk": "16Mi", "workdir": "/deep/here"}
    env = {"GREETING": "$(HOME) it's", "EMPTY": ""}
    apply(installed, sandboxes("bounds", container=bounds | {"env": env}, capacity={"min": 1, "max": 1}))
    lease = worker.acquire("bounds", "b")
    assert worker.exec("b", 'echo "$GREETING|$EMPTY|$PWD"')["stdout"] == "$(HOME) it's||/deep/here\n"
    assert worker.exec("b", "dd if=/dev/zero of=small bs=1M count=8")["exit_code"] == 0
    full = worker.exec("b", "dd if=/dev/zero of=large bs=1M count=32")
    assert full["exit_code"] != 0
    assert "No space left" in full["stderr"]
    assert worker.exec("b", "rm small large")["exit_code"] == 0
    grown = worker.exec("b", "python3 -c 'x = bytearray(300 << 20)'; echo $?")
    assert grown["oom"] or grown["stdout"] in ("137\n", "1\n")
    # Whoever takes too much loses that process: the sandbox, its files and the lease stay.
    assert worker.exec("b", "echo $PWD")["stdout"] == "/deep/here\n"
    worker.release("b")
    again = worker.acquire("bounds", "b")
    assert (again["member_id"], again["incarnation"]) == (lease["member_id"], lease["incarnation"] + 1)
    worker.release("b")
    objects.delete(installed, "bounds")


def test_processes_are_bounded_where_the_user_is_the_pods_own(installed: World, worker: Worker) -> None:
    container, own = {"memory": "96Mi", "pids": 24}, {"userNamespace": True}
    apply(installed, sandboxes("few", container=container, capacity={"min": 1, "max": 1}, security=own))
    worker.acquire("few", "f")
    many = worker.exec("f", "for i in $(seq 60); do sleep 30 & done")
    assert "fork" in many["stderr"]
    assert worker.exec("f", "exec pkill sleep")["exit_code"] == 0
    assert worker.exec("f", "echo lives")["stdout"] == "lives\n"
    worker.release("f")
    objects.delete(installed, "few")


# -- the queue

ASK = """
import asyncio, json, sys, urllib.error, urllib.request
from agentfly.broker.client import BrokerClient
from agentfly.resources.errors import Saturated

async def main():
    client = BrokerClient(sys.argv[1])
    try:
        await client.acquire("queue", "third", deadline=20)
    except Saturated as error:
        print(json.dumps({"retry_after": error.retry_after, "message": error.message}))

asyncio.run(main())
"""


def test_a_queue_has_an_end_in_length_and_in_time(installed: World, worker: Worker) -> None:
    apply(
        installed,
        sandboxes(
            "queue",
            capacity={"min": 1, "max": 1},
            queue={"maxPending": 1, "acquireTimeoutSeconds": 8},
        ),
    )
    ready(installed, "queue", 1)
    worker.acquire("queue", "holder")
    with ThreadPoolExecutor(1) as thread:
        begun = time.monotonic()
        second = thread.submit(worker.acquire, "queue", "second", deadline=60.0)
        wait("a waiter", lambda: worker.ask("pools")["queue"]["queued"] == 1, 5.0)
        broker = f"http://agentfly-broker.{installed.namespace}.svc:7080"
        third = as_json(in_pod(installed, "worker", "python", "-c", ASK, broker))
        assert third["retry_after"] > 0
        assert "maxPending" in third["message"] or "1" in third["message"]
        with pytest.raises(Refused, match="Timeout"):
            second.result(30)
        assert 7.0 < time.monotonic() - begun < 15.0
    worker.release("holder")
    objects.delete(installed, "queue")


# -- what one sees


def test_kubectl_and_agentfly_show_pools_and_leases(installed: World, worker: Worker) -> None:
    apply(installed, sandboxes("seen", capacity={"min": 2, "max": 3}))
    ready(installed, "seen", 2)
    worker.acquire("seen", "viewer")
    wait("leased", lambda: installed.status("seen")["members"]["leased"] == 1, 20.0, every_s=0.2)
    namespace = ("-n", installed.namespace)
    head, line = installed.cluster.kubectl("get", "rpool", "seen", *namespace).splitlines()
    columns = "NAME TYPE READY FREE LEASED STARTING QUEUED MAX REASON AGE"
    assert head.split() == columns.split()
    assert re.fullmatch(r"seen +Container +2 +1 +1 +0 +0 +3 +\w+ +\d+s", line.strip()), line
    head, line = installed.cluster.kubectl("get", "rpool", "seen", *namespace, "-o", "wide").splitlines()
    assert head.split()[-3:] == ["HIT%", "P99", "AGE"]
    assert re.fullmatch(r"\d+", line.split()[-3]), line
    said = installed.cluster.kubectl("describe", "rpool", "seen", *namespace)
    for text in ("Conditions:", "Ready", "Reset:", "OverlaySharedPID", "Events:", "Leased:"):
        assert text in said, text
    assert installed.cluster.kubectl("wait", "--for=condition=Ready", "rpool/seen", *namespace)
    assert "FIELDS" in installed.cluster.kubectl("explain", "rpool.spec.capacity")

    def agentfly(*words: str) -> str:
        command = [sys.executable, "-m", "agentfly.cli", *words, *namespace]
        done = subprocess.run(
            [*command, "--kubeconfig", str(installed.cluster.kubeconfig)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    (pool,) = [line for line in agentfly("pools").splitlines() if line.startswith("seen")]
    assert pool.split()[:5] == ["seen", "container", "2", "1", "1"]
    (lease,) = [line for line in agentfly("leases").splitlines() if " viewer" in line]
    assert lease.split()[1:4] == ["seen", worker.ask("info", owner="viewer")["member_id"], "viewer"]
    worker.release("viewer")
    objects.delete(installed, "seen")
