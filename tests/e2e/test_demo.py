"""`make cluster-demo`, smaller, with a policy that knows its task: its figures, and that they can be others.

Everything but the policy's server is what the demo runs: the operator, the broker, sandboxes, a worker pod.
"""

import dataclasses
import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from agentfly.local import environments
from tests.cluster import images, product
from tests.cluster.api import Api, wait
from tests.cluster.audit import Audit
from tests.cluster.cluster import Cluster
from tests.cluster.demo import image, scripted, storage
from tests.cluster.demo.figures import Bounds, Figures, broker_writes, metric, summary, tool_requests
from tests.cluster.demo.scene import AGENT
from tests.cluster.demo.stage import Play, Seen, Stage
from tests.cluster.machine import ClusterError, Unavailable

PLAY = Play(namespace="demo", rollouts=40, sandboxes=4, makes_model=False)
BOUNDS = Bounds(rollouts=40, pods=4)
GONE_S = 120.0
TOKENIZER_S = 120.0
TOKENIZER = f"""
import json, sys
from pathlib import Path
sys.path.insert(0, {str(AGENT)!r})
from model import make_tokenizer
tokenizer, folder = make_tokenizer(), Path(sys.argv[1])
tokenizer.save_pretrained(folder)
pieces = [tokenizer.decode([number]) for number in range(len(tokenizer))]
script = {{"pieces": pieces, "end": tokenizer.eos_token_id}}
(folder / {scripted.SCRIPT!r}).write_text(json.dumps(script))
(folder / "config.json").write_text(json.dumps({{"model_type": "qwen2"}}))
"""


@pytest.fixture(scope="module")
def environment() -> Path:
    if environments.find("inference") is None:
        pytest.skip("inference environment: is not built: make setup")
    try:
        return storage.environment("inference")
    except Unavailable as error:
        pytest.skip(error.render())


@pytest.fixture(scope="module")
def stage(product_node: Cluster, environment: Path) -> Iterator[Cluster]:
    """A cluster with a policy on its claim, from which the demo is gone afterwards."""
    archive = image.role_image("inference", product.agentfly_image(), scripted.files(image.SITE))
    product_node.import_image(archive)
    folder = storage.folder(product_node, PLAY.namespace, "models") / "policy"
    folder.mkdir(parents=True)
    python = str(environment / "bin" / "python")
    subprocess.run([python, "-c", TOKENIZER, str(folder)], check=True, timeout=TOKENIZER_S)
    try:
        yield product_node
    finally:
        product_node.kubectl("delete", "namespace", PLAY.namespace, "--ignore-not-found", timeout_s=GONE_S)
        storage.withdraw(product_node, PLAY.namespace, "models")


@pytest.fixture(scope="module")
def seen(stage: Cluster, environment: Path) -> Seen:
    return Stage(stage, PLAY, print).run(environment)


def test_every_figure_is_what_the_demo_promises(seen: Seen) -> None:
    acquires = seen.figures.acquires
    expected = Figures(
        rollouts=40,
        scored=40,
        reward=1.0,
        pods=4,
        acquires=acquires,
        warm=seen.figures.warm,
        resets=acquires,
        verified=acquires,
        tool_requests=0,
        writes=0,
    )
    assert seen.figures == expected
    assert 40 <= acquires <= 44  # a rollout that the machine was too busy for is played again
    assert seen.figures.warm > acquires / 2
    assert seen.figures.broken(BOUNDS) == []


def test_the_operator_was_heard_meanwhile(seen: Seen) -> None:
    """A log in which nobody is seen would show no request either."""
    assert any(event["userAgent"].startswith("agentfly-operator/") for event in seen.requests)


def test_a_command_through_the_api_server_counts(seen: Seen, stage: Cluster) -> None:
    here = ("-n", PLAY.namespace)
    pods = stage.kubectl("get", "pods", "-l", "agentfly.dev/pool=shell", "-o", "name", *here).split()
    with stage.audit() as audit:
        stage.kubectl("exec", pods[0], *here, "--", "true")
    assert [event["objectRef"]["subresource"] for event in counted(audit)] == ["exec"]


def test_a_write_of_the_broker_counts(seen: Seen, stage: Cluster, tmp_path: Path) -> None:
    namespace = PLAY.namespace
    config = yaml.safe_load(stage.kubeconfig.read_text())
    token = stage.kubectl("create", "token", "agentfly-broker", "-n", namespace).strip()
    config["users"][0]["user"] = {"token": token}
    (tmp_path / "broker.kubeconfig").write_text(yaml.safe_dump(config))
    api = Api(tmp_path / "broker.kubeconfig")
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "shell-0000-1"},
        "spec": {"containers": [{"name": "c", "image": images.BUSYBOX}]},
    }
    with stage.audit() as audit:
        status, _ = api.call("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod)
    assert status == 201
    assert [event["verb"] for event in broker_writes(audit.events, namespace)] == ["create"]
    assert len(counted(audit)) == 1


def test_a_request_from_a_workers_pod_counts(seen: Seen, stage: Cluster) -> None:
    here = ("-n", PLAY.namespace)
    code = (
        "import ssl, urllib.request as u, urllib.error as e\n"
        "context = ssl._create_unverified_context()\n"
        "try: u.urlopen('https://kubernetes.default/api', timeout=30, context=context)\n"
        "except e.HTTPError as error: print(error.code)\n"
    )
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "asks", "labels": {"agentfly.dev/component": "worker"}},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "containers": [{"name": "c", "image": images.PYTHON, "command": ["python3", "-c", code]}],
        },
    }
    with stage.audit() as audit:
        stage.kubectl("apply", "-f", "-", *here, stdin=yaml.safe_dump(pod))
        wait("the request", lambda: found(stage, "asks")["status"]["phase"] == "Succeeded", 60, every_s=0.5)
    address = found(stage, "asks")["status"]["podIP"]
    assert len(tool_requests(audit.events, PLAY.namespace, [address])) == 1
    assert tool_requests(audit.events, PLAY.namespace, seen.workers) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rollouts": 39}, "rollouts: 39 is not 40"),
        ({"scored": 39}, "rollouts scored: 39 is not 40"),
        ({"pods": 5}, "sandbox pods created: 5 is not 1 to 4"),
        ({"pods": 0}, "sandbox pods created: 0 is not 1 to 4"),
        ({"acquires": 39, "resets": 39, "verified": 39}, "acquires: 39 is less than 40"),
        ({"resets": 39, "verified": 39}, "resets: 39 is not one for each of 40 acquires"),
        ({"verified": 39}, "resets verified: 39 is not 40"),
        ({"tool_requests": 1}, "API-server requests for tool calls: 1 is not 0"),
        ({"writes": 1}, "API-server writes for acquires: 1 is not 0"),
        ({"warm": 0}, "warm acquires: there was none, and their cost is to be shown"),
    ],
)
def test_a_figure_that_breaks_its_bound_is_named(change: dict[str, int], sentence: str) -> None:
    good = Figures(40, 40, 1.0, 4, 40, 38, 40, 40, 0, 0)
    assert dataclasses.replace(good, **change).broken(BOUNDS) == [sentence]


def test_the_last_line_says_them() -> None:
    assert Figures(200, 200, 0.085, 8, 200, 190, 200, 200, 0, 0).line() == (
        "cluster-demo: 200/200 rollouts scored, reward 0.085; 8 sandbox pods created; "
        "200/200 resets verified; API server: 0 requests for tool calls, 0 writes for 200 acquires (190 warm)"
    )


def test_metrics_and_the_workers_line_are_read() -> None:
    text = (
        '# HELP a b\na_count{pool="shell",warm="true"} 3.0\n'
        'a_count{pool="shell",warm="false"} 4.0\na_count{pool="x"} 9.0\n'
    )
    assert metric(text, "a_count", pool="shell") == 7
    assert metric(text, "a_count", pool="shell", warm="true") == 3
    assert metric(text, "b_count", pool="shell") == 0
    log = "q: Pending\nq: Succeeded rollouts=8 scored=7 masked=1 failed=0 reward=0.143\n"
    assert summary(log) == (8, 7, 0.143)
    with pytest.raises(ValueError, match="no summary"):
        summary("Traceback")


class Failing:
    """A cluster of which every Job has failed."""

    def kubectl(self, *words: str, **_: Any) -> str:
        job = {
            "metadata": {"name": "quickstart"},
            "status": {"conditions": [{"type": "Failed", "status": "True"}]},
        }
        answers = {
            "apply": "applied",
            "get": json.dumps({"items": [job]}),
            "logs": "pool polciy: does not exist",
        }
        return answers[words[0]]


def test_a_worker_that_fails_is_told_with_its_last_words() -> None:
    stage = Stage(cast(Cluster, Failing()), PLAY, print)
    with pytest.raises(ClusterError, match=r"^job quickstart: failed: pool polciy: does not exist$"):
        stage._rollouts()


def test_an_image_gets_a_layer_and_keeps_those_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = {"config": {"Env": ["A=1"]}, "rootfs": {"type": "layers", "diff_ids": ["sha256:one"]}}
    listed = [{"Config": "c.json", "RepoTags": ["base"], "Layers": ["one.tar"]}]
    files = {
        "one.tar": b"one",
        "c.json": json.dumps(config).encode(),
        "manifest.json": json.dumps(listed).encode(),
    }
    with tarfile.open(tmp_path / "base.tar", "w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    made = image.with_layer(tmp_path / "base.tar", "new:1", {"/x/y": b"z"}, ["B=2"])
    assert image.with_layer(tmp_path / "base.tar", "new:1", {"/x/y": b"z"}, ["B=2"]) == made
    assert image.with_layer(tmp_path / "base.tar", "new:1", {"/x/y": b"other"}, ["B=2"]) != made
    with tarfile.open(made) as tar:
        (manifest,) = json.loads(member(tar, "manifest.json"))
        written = json.loads(member(tar, manifest["Config"]))
        first, added = manifest["Layers"]
        assert (first, member(tar, first), manifest["RepoTags"]) == ("one.tar", b"one", ["new:1"])
        layer = member(tar, added)
    assert written["config"]["Env"] == ["A=1", "B=2"]
    assert written["rootfs"]["diff_ids"] == ["sha256:one", f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        assert member(tar, "x/y") == b"z"


def member(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    assert file is not None
    return file.read()


def test_the_scripted_policy_looks_edits_and_ends() -> None:
    said = "<|im_start|>user\nset port to 26<|im_end|>\n"
    assert '"grep -r port ."' in scripted.turn(said)
    said += "<tool_response>\n./web.conf:port=53\n./db.conf:report=53\n</tool_response>"
    assert '"sed -i s/port=53/port=26/ web.conf"' in scripted.turn(said)
    assert scripted.turn(f"{said}<tool_response>\n\n</tool_response>") == "done"


def counted(audit: Audit) -> list[Any]:
    return tool_requests(audit.events, PLAY.namespace, ())


def found(cluster: Cluster, pod: str) -> dict[str, Any]:
    got: dict[str, Any] = json.loads(cluster.kubectl("get", "pod", pod, "-n", PLAY.namespace, "-o", "json"))
    return got
