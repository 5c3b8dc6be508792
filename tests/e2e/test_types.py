"""ExternalAPI, InProcess and ModelService on a real node, held by workers in pods."""

import contextlib
import json
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import images
from tests.cluster.api import wait
from tests.cluster.cluster import Cluster
from tests.e2e import objects
from tests.e2e.objects import apply, as_json, broker_serves, condition, in_pod, is_so, members, pool_of
from tests.e2e.world import OPERATOR, SYSTEM, UP_S, Refused, Worker, World

API = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

keys = {"accepted": None, "seen": []}

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):  # /KEY: from now on this one alone is accepted
        keys["accepted"] = self.path.strip("/") or keys["accepted"]
        self.say(200, {"calls": len(keys["seen"])})

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        key = self.headers["authorization"].removeprefix("Bearer ")
        if key != keys["accepted"]:
            return self.say(401, {"error": {"message": "no such key", "type": "invalid_request_error"}})
        keys["seen"].append(key)
        message = {"role": "assistant", "content": f"call {len(keys['seen'])}"}
        usage = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
        self.say(200, {"choices": [{"index": 0, "message": message}], "usage": usage})

    def say(self, status, answer):
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass

ThreadingHTTPServer(("", 8080), Handler).serve_forever()
"""
CALL = """
import json, sys, time, urllib.error, urllib.request
url, token, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
begun, said = time.monotonic(), []
for _ in range(times):
    body = json.dumps({"messages": [{"role": "user", "content": "?"}], "max_tokens": 1}).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
            said.append([answer.status, json.load(answer)])
    except urllib.error.HTTPError as error:
        said.append([error.code, json.load(error)])
print(json.dumps({"said": said, "took_s": time.monotonic() - begun}))
"""
MODEL = """
import json, os, signal, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

begun, asked = time.monotonic(), sys.argv[1:]

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        loaded = time.monotonic() - begun > 2
        if self.path == "/health":
            self.say(200 if loaded else 503, {})
        else:
            name = asked[asked.index("--served-model-name") + 1]
            self.say(200, {"data": [{"id": name}], "arguments": asked, "home": os.environ["HOSTNAME"]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
        time.sleep(body.get("seconds", 0))
        self.say(200, {"home": os.environ["HOSTNAME"], "success": True})

    def say(self, status, answer):
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass

class Server(ThreadingHTTPServer):
    daemon_threads = False  # like vLLM, it answers what it has before it ends

server = Server(("", int(asked[asked.index("--port") + 1])), Handler)
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
server.serve_forever()
server.server_close()
"""
VLLM = "agentfly-test/vllm:fake"


@pytest.fixture(scope="module")
def worker(installed: World) -> Worker:
    return installed.worker()


def call(world: World, lease: dict[str, Any], times: int = 1) -> dict[str, Any]:
    url = f"{lease['address']}/chat/completions"
    found: dict[str, Any] = as_json(
        in_pod(world, "worker", "python", "-c", CALL, url, lease["token"], str(times))
    )
    return found


def processes() -> Iterator[str]:
    """Environment and arguments of every process of this machine, those in the cluster's pods too."""
    for name in ("environ", "cmdline"):
        for path in Path("/proc").glob(f"[0-9]*/{name}"):
            with contextlib.suppress(OSError):  # it ended, or is none of ours
                yield path.read_bytes().decode(errors="replace")


class Judge:
    """An API that knows one key, and the Secret that has it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.url = f"http://{objects.served_by(world, 'judge-server', API)}:8080"
        self.key = ""

    def rotate(self, *, in_secret: bool = True) -> str:
        """A new key, which the API knows from now on as the only one."""
        self.key = f"sk-{secrets.token_hex(16)}"
        if in_secret:
            self.write()
        self.tell(self.key)
        return self.key

    def write(self) -> None:
        """Brings the Secret up to date."""
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "judge"}}
        # Not by an argument or by kubectl apply, whose annotation would have it.
        path = f"{self.world.path}/secrets"
        self.world.cluster.api.create(path, {**secret, "stringData": {"token": self.key}})
        status, answer = self.world.cluster.api.call(
            "PUT", f"{path}/judge", {**secret, "stringData": {"token": self.key}}
        )
        assert status == 200, answer

    def tell(self, path: str = "") -> int:
        """How many calls it has answered."""
        program = (
            "import sys, urllib.request; print(urllib.request.urlopen(sys.stdin.read()).read().decode())"
        )
        said = self.world.cluster.kubectl(
            *("exec", "-i", "-n", self.world.namespace, "worker", "--", "python", "-c", program),
            stdin=f"{self.url}/{path}",
        )
        return int(json.loads(said)["calls"])

    def pool(self, name: str, **fields: Any) -> None:
        key = {"secretKeyRef": {"name": "judge", "key": "token"}}
        api = {"baseUrl": self.url, "credentials": [key], "maxRetries": 1} | fields
        apply(
            self.world,
            pool_of(name, type="ExternalAPI", scope="Global", externalAPI=api, capacity={"min": 1, "max": 1}),
        )
        is_so(self.world, name, "Ready")


@pytest.fixture(scope="module")
def judge(installed: World, worker: Worker) -> Judge:
    made = Judge(installed)
    made.rotate()
    return made


def test_an_api_is_called_by_the_token_of_a_lease_within_its_limits(
    installed: World, worker: Worker, judge: Judge
) -> None:
    judge.pool("judge", requestsPerSecond=2, budget={"calls": 6})
    lease = worker.acquire("judge", "caller")
    assert lease["token"] != judge.key
    answers = call(installed, lease, 5)
    assert [status for status, _ in answers["said"]] == [200] * 5
    assert answers["took_s"] > 1.0  # a burst of two, then two a second
    # Its sixth call is the last that the budget has; the refusal is our own, and the API is not asked.
    before = judge.tell()
    (sixth, seventh) = call(installed, lease, 2)["said"]
    assert sixth[0] == 200
    assert seventh[1]["error"]["type"] == "agentfly"
    assert "budget" in seventh[1]["error"]["message"]
    assert judge.tell() == before + 1
    worker.release("caller")
    # A gateway that just began lets those wait whom its broker is yet to hear of.
    refused: list[Any] = []

    def told() -> bool:
        refused[:] = call(installed, lease)["said"][0]
        return bool(refused[1]["error"]["code"] != "busy")

    wait("an answer", told, 40.0, every_s=1.0)
    assert (refused[0], refused[1]["error"]["code"]) == (401, "lease")
    objects.delete(installed, "judge")


def test_a_lease_outlives_its_broker_and_a_new_key_is_found(
    installed: World, worker: Worker, judge: Judge
) -> None:
    judge.pool("lasting")
    lease = worker.acquire("lasting", "stayer")
    assert call(installed, lease)["said"][0][0] == 200
    # A key that is refused is read again from the Secret; until it is there, the refusal is passed on.
    judge.rotate(in_secret=False)
    assert call(installed, lease)["said"][0][0] != 200
    judge.write()
    wait("the new key", lambda: call(installed, lease)["said"][0][0] == 200, 30.0, every_s=0.5)
    installed.cluster.kubectl("delete", "pod", "-n", installed.namespace, installed.broker_pod())
    broker_serves(installed)
    wait("the lease", lambda: worker.ask("renew")["stayer"], 30.0, every_s=0.2)
    assert call(installed, lease)["said"][0][0] == 200
    assert worker.ask("info", owner="stayer")["token"] == lease["token"]
    worker.release("stayer")
    objects.delete(installed, "lasting")


def test_the_key_is_nowhere_but_in_its_secret_and_its_gateway(
    installed: World, worker: Worker, judge: Judge
) -> None:
    judge.pool("quiet")
    lease = worker.acquire("quiet", "reader")
    used = [judge.key]
    assert call(installed, lease)["said"][0][0] == 200
    used.append(judge.rotate(in_secret=False))  # what is refused is told, and nothing of it
    call(installed, lease)
    namespace = ("-n", installed.namespace)
    kubectl = installed.cluster.kubectl
    said = [
        kubectl("get", "rpool,pods,deployments,configmaps,events,roles", *namespace, "-o", "yaml"),
        kubectl("describe", "rpool,pods", *namespace),
        kubectl("logs", *namespace, installed.broker_pod()),
        kubectl("logs", "-n", SYSTEM, f"deployment/{OPERATOR}"),
        kubectl("logs", *namespace, "worker"),
        json.dumps(worker.ask("pools")) + json.dumps(worker.ask("leases")),
        *processes(),
    ]
    assert "quiet" in said[0]
    assert not [text[:200] for text in said for key in used if key in text]
    worker.release("reader")
    objects.delete(installed, "quiet")


@pytest.fixture
def with_modules(installed: World) -> Iterator[None]:
    """The brokers of this cluster may load `collections`."""

    def told(value: str) -> None:
        installed.cluster.kubectl(
            *("set", "env", "-n", SYSTEM, f"deployment/{OPERATOR}", f"AGENTFLY_IN_PROCESS_MODULES{value}")
        )

    def has_it() -> bool:
        pods = installed.pods("agentfly.dev/component=broker").values()
        return all("AGENTFLY_IN_PROCESS_MODULES" in json.dumps(pod["spec"]) for pod in pods)

    told("=collections")
    try:
        wait("the broker", has_it, UP_S, every_s=0.2)
        broker_serves(installed)
        yield
    finally:
        told("-")


def counter(name: str, **fields: Any) -> dict[str, Any]:
    made = {"entrypoint": "collections:Counter", "kwargs": {"start": 1}, **fields}
    return pool_of(name, type="InProcess", inProcess=made, capacity={"min": 1, "max": 2})


def test_objects_live_beside_the_broker_only_if_its_operator_says_so(
    installed: World, request: pytest.FixtureRequest, worker: Worker
) -> None:
    apply(installed, counter("beside"), counter("apart", isolated=True))
    for name in ("beside", "apart"):
        stalled = is_so(installed, name, "Stalled")
        assert "AGENTFLY_IN_PROCESS_MODULES" in stalled["message"]
    request.getfixturevalue("with_modules")
    for name in ("beside", "apart"):
        is_so(installed, name, "Ready")
        worker.acquire(name, name)
        worker.ask("call", owner=name, method="update", args=[{"move": 2}])
        assert worker.ask("call", owner=name, method="most_common", args=[]) == [["move", 2], ["start", 1]]
        with pytest.raises(Refused, match="TypeError"):
            worker.ask("call", owner=name, method="update", args=[1])
        worker.release(name)
        for owner in ("second", "third"):  # whichever member it is, nothing is left of the first holder
            worker.acquire(name, owner)
            assert worker.ask("call", owner=owner, method="most_common", args=[]) == [["start", 1]]
        worker.release("second")
        worker.release("third")
    # An object apart has a process of its own, which ends with its pool.
    children = "cat /proc/1/task/*/children | wc -w"
    look = ("exec", "-n", installed.namespace, installed.broker_pod(), "--", "sh", "-c", children)
    assert int(installed.cluster.kubectl(*look)) >= 2
    objects.delete(installed, "apart", "beside")
    wait("no process", lambda: int(installed.cluster.kubectl(*look)) <= 1, 30.0, every_s=0.5)


@pytest.fixture(scope="module")
def fake_vllm(product_node: Cluster) -> str:
    """An image in which vLLM is a small server that takes the same arguments."""
    place = "/usr/lib/python3/dist-packages/vllm"
    files = {f"{place}/__init__.py": b"", f"{place}/entrypoints/__init__.py": b""}
    files |= {f"{place}/entrypoints/cli/__init__.py": b""}
    files[f"{place}/entrypoints/cli/main.py"] = MODEL.encode()
    product_node.import_image(images.with_files(VLLM, images.python(), files))
    return VLLM


def model_pool(name: str, image: str, **more: Any) -> dict[str, Any]:
    service = {"model": "org/tiny", "maxModelLen": 1024, "maxNumSeqs": 2, "gpus": 0, "image": image}
    service |= more.pop("modelService", {})
    spec = {"type": "ModelService", "scope": "Global", "modelService": service, **more}
    return pool_of(name, **spec)


def test_model_servers_are_shared_evenly_and_answer_what_they_have_before_they_end(
    installed: World, worker: Worker, fake_vllm: str
) -> None:
    small = {"cpu": "50m", "memory": "128Mi", "sharedMemory": "64Mi"}
    apply(
        installed,
        model_pool(
            "critic",
            fake_vllm,
            modelService=small | {"args": ["--seed", "7"]},
            capacity={"min": 2, "max": 2},
        ),
    )
    is_so(installed, "critic", "Ready")
    wait("both", lambda: installed.status("critic")["members"]["ready"] == 2, UP_S, every_s=0.2)
    pods = members(installed, "critic")
    assert len(pods) == 2
    leases = {owner: worker.acquire("critic", owner) for owner in ("a", "b", "c", "d")}
    held = [lease["member_id"] for lease in leases.values()]
    assert sorted(held.count(name) for name in pods) == [2, 2]
    ask = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
    models = as_json(in_pod(installed, "worker", "python", "-c", ask, f"{leases['a']['address']}/v1/models"))
    assert (models["home"], models["data"][0]["id"]) == (leases["a"]["member_id"], "policy")
    assert models["arguments"][-2:] == ["--seed", "7"]
    # One of its pods had to load first: it was not ready before it said so.
    pod = pods[leases["a"]["member_id"]]
    begun = pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]
    ready = next(each for each in pod["status"]["conditions"] if each["type"] == "Ready")
    assert ready["lastTransitionTime"] > begun
    slow = (
        "import json, sys, urllib.request as u; "
        "r = u.Request(sys.argv[1], json.dumps({'seconds': 7}).encode()); "
        "print(u.urlopen(r, timeout=60).read().decode())"
    )
    url = f"{leases['a']['address']}/v1/slow"
    command = ("exec", "-n", installed.namespace, "worker", "--", "python", "-c", slow, url)
    cluster = installed.cluster
    with subprocess.Popen(
        [str(cluster.kubectl_path), f"--kubeconfig={cluster.kubeconfig}", *command],
        stdout=subprocess.PIPE,
        text=True,
    ) as request:
        time.sleep(2.0)
        cluster.kubectl("delete", "rpool", "-n", installed.namespace, "critic")
        said, _ = request.communicate(timeout=60)
    assert json.loads(said)["home"] == leases["a"]["member_id"]
    for owner in leases:
        worker.release(owner)
    objects.delete(installed, "critic")


GPU = "gpu1"


@pytest.fixture
def gpu_node(installed: World) -> Iterator[str]:
    """A node with eight GPUs as far as the scheduler sees; no kubelet runs there."""
    api = installed.cluster.api
    taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    node = {"metadata": {"name": GPU, "labels": {"gpu": "yes"}}, "spec": {"taints": [taint]}}
    api.create("/api/v1/nodes", node)
    room = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": "8"}
    ready = {"type": "Ready", "status": "True", "reason": "Test", "message": ""}
    status, answer = api.call(
        "PATCH",
        f"/api/v1/nodes/{GPU}/status",
        {"status": {"capacity": room, "allocatable": room, "conditions": [ready]}},
        kind="application/strategic-merge-patch+json",
    )
    assert status == 200, answer
    try:
        yield GPU
    finally:
        api.call("DELETE", f"/api/v1/nodes/{GPU}")


def test_a_server_with_gpus_goes_where_they_are(
    installed: World, request: pytest.FixtureRequest, worker: Worker
) -> None:
    spec = model_pool(
        "large",
        "vllm/vllm-openai:none",
        modelService={"gpus": 4, "tensorParallel": 4, "memory": "64Gi", "cacheClaim": None},
        capacity={"min": 1, "max": 1},
    )
    del spec["spec"]["modelService"]["cacheClaim"]
    apply(installed, spec)
    unschedulable = is_so(installed, "large", "Unschedulable")
    assert "nvidia.com/gpu" in unschedulable["message"]
    (pod,) = members(installed, "large").values()
    assert "nodeName" not in pod["spec"]
    assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "4"
    request.getfixturevalue("gpu_node")

    def placed() -> str:
        (one,) = members(installed, "large").values()
        return str(one["spec"].get("nodeName", ""))

    try:
        wait("a node", lambda: placed() != "", UP_S, every_s=0.2)
        assert placed() == GPU
    finally:
        names = list(members(installed, "large"))
        installed.cluster.kubectl("delete", "rpool", "-n", installed.namespace, "large")
        for name in names:  # there is no kubelet to say that it is gone
            installed.cluster.kubectl(
                *("delete", "pod", "-n", installed.namespace, name, "--force", "--grace-period=0"),
                check=False,
            )
    assert condition(installed, "shell", "Ready")["status"] == "True"
