"""A broker that is asked from outside the cluster; numbers are those of proxied.py."""

import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentfly import cli
from agentfly.broker import proxied
from agentfly.broker.wire import NO_POOL
from tests.unit.kube.api_stub import ApiStub, status
from tests.unit.kube.test_forward import pod_says

TOKEN = "open-sesame"
SECRET = {"data": {"client-token": base64.b64encode(TOKEN.encode()).decode()}}
POOLS = {
    "shell": NO_POOL.model_dump()
    | {"kind": "container", "max": 4, "ready": 2, "leased": 1, "reason": "Ready"},
    "wrong": NO_POOL.model_dump()
    | {"message": "spec.type: is missing", "problems": ["spec.type: is missing"]},
}
POD = {"metadata": {"name": "agentfly-broker-1", "creationTimestamp": "2026-01-02T00:00:00Z"}}
PODS = {
    "metadata": {},
    "items": [
        {"metadata": {"name": "agentfly-broker-0", "creationTimestamp": "2026-01-01T00:00:00Z"}},
        POD,
        {
            "metadata": {
                "name": "agentfly-broker-2",
                "creationTimestamp": "2026-01-03T00:00:00Z",
                "deletionTimestamp": "2026-01-03T00:00:01Z",
            }
        },
    ],
}
LEASE = {
    "lease_id": "l1", "pool": "shell", "member_id": "shell-ab12-1", "owner": "rollout-7", "key": "default",
    "share": "job", "image": "", "held_s": 61.0, "expires_in_s": 20.0,
}  # fmt: skip


class Served:
    """An API server in a thread of its own, with a kubeconfig."""

    def __init__(self, folder: Path) -> None:
        self.stub = ApiStub()
        self.kubeconfig = folder / "kubeconfig"
        self._up, self._end = threading.Event(), asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))
        self._thread.start()
        assert self._up.wait(10)
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.stub.url}}],
            "users": [{"name": "u", "user": {"token": "users-own"}}],
            "contexts": [
                {"name": "one", "context": {"cluster": "c", "user": "u", "namespace": "of-context"}},
                {"name": "two", "context": {"cluster": "c", "user": "u", "namespace": "of-two"}},
            ],
            "current-context": "one",
        }
        self.kubeconfig.write_text(yaml.safe_dump(content))

    async def _serve(self) -> None:
        async with self.stub.serving():
            self._up.set()
            await self._end.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(proxied, "ANSWER_S", 0.5)
    made = Served(tmp_path)
    yield made
    made.close()


def run(served: Served, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main([*arguments, "--kubeconfig", str(served.kubeconfig)])
    said = capsys.readouterr()
    return code, said.out, said.err


def answer(served: Served, *answers: Any) -> None:
    served.stub.answers += answers


def broker_says(content: Any, code: int = 200, asked: list[bytes] | None = None) -> Any:
    return pod_says(f"HTTP/1.0 {code} Any\r\n\r\n{json.dumps(content)}".encode(), asked=asked)


def test_pools_of_a_namespace_are_shown_as_those_of_this_machine(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[bytes] = []
    answer(served, (200, SECRET), (200, PODS), broker_says(POOLS, asked=asked))
    code, out, err = run(served, capsys, "pools", "-n", "team")
    assert (code, err) == (0, "")
    head, shell, wrong = out.splitlines()
    assert head.split()[:5] == ["Pool", "Type", "Ready", "Free", "Leased"]
    assert shell.split()[:5] == ["shell", "container", "3", "2", "1"]
    assert "InvalidSpec: spec.type: is missing" in wrong
    secret, pods, line = served.stub.seen
    assert secret.path == "/api/v1/namespaces/team/secrets/agentfly-broker-client"
    assert pods.query["labelSelector"] == "agentfly.dev/component=broker"
    assert line.path == "/api/v1/namespaces/team/pods/agentfly-broker-1/portforward"
    assert line.headers["Authorization"] == "Bearer users-own"
    assert asked == [f"\0GET /pools HTTP/1.0\r\nX-Agentfly-Token: {TOKEN}\r\n\r\n".encode()]
    assert {each.method for each in served.stub.seen} == {"GET"}


def test_leases_are_shown_as_json_too(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    answer(served, (200, SECRET), (200, PODS), broker_says([LEASE]))
    code, out, _ = run(served, capsys, "leases", "-n", "team", "-o", "json")
    assert (code, json.loads(out)) == (0, [{"broker": "namespace team", "leases": [LEASE]}])
    answer(served, (200, SECRET), (200, PODS), broker_says([LEASE]))
    _, out, _ = run(served, capsys, "leases", "-n", "team")
    assert out.splitlines()[1].split() == [
        "l1",
        "shell",
        "shell-ab12-1",
        "rollout-7",
        "job",
        "1m01s",
        "20.0s",
    ]
    assert TOKEN not in out


@pytest.mark.parametrize(
    ("arguments", "namespace"),
    [((), "of-context"), (("--context", "two"), "of-two"), (("--context", "two", "-n", "team"), "team")],
)
def test_namespace_is_that_of_the_flag_or_the_context(
    served: Served, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], namespace: str
) -> None:
    answer(served, (200, SECRET), (200, PODS), broker_says({}))
    assert run(served, capsys, "pools", *arguments)[0] == 0
    assert f"/namespaces/{namespace}/" in served.stub.seen[0].path


FORBIDDEN = (403, status(403, "Forbidden", 'secrets "agentfly-broker-client" is forbidden'))
MISSING = (404, status(404, "NotFound", "there is none"))
NONE: dict[str, Any] = {"metadata": {}, "items": []}
RUNS = (200, PODS)
GIVEN = (200, SECRET)


@pytest.mark.parametrize(
    ("answers", "text", "hint"),
    [
        ([MISSING], "namespace team: has no broker", "kubectl get rpool"),
        ([FORBIDDEN], "namespace team: its broker may not be asked", "grant your user get on the Secret"),
        ([(200, {"data": {}})], "namespace team: Secret agentfly-broker-client has no", "delete"),
        ([GIVEN, FORBIDDEN], "is forbidden", "list on pods"),
        ([GIVEN, RUNS, FORBIDDEN], "403", "pods/portforward"),
        ([GIVEN, (200, NONE)], "no pod of it runs", "kubectl -n team get pods"),
        ([GIVEN, RUNS, "hang"], "its broker does not answer", "kubectl -n team get pods"),
        ([GIVEN, RUNS, MISSING], "its broker does not answer", "kubectl -n team get pods"),
        ([GIVEN, RUNS, broker_says("no", 401)], "does not answer: 401", "kubectl -n team get pods"),
    ],
)
def test_what_is_missing_is_said_with_what_to_do(
    served: Served, capsys: pytest.CaptureFixture[str], answers: list[Any], text: str, hint: str
) -> None:
    answer(served, *answers)
    code, out, err = run(served, capsys, "pools", "-n", "team")
    assert (code, out) == (2, "")
    assert text in err
    assert hint in err
    assert TOKEN not in err


def test_without_a_kubeconfig_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pools", "-n", "team", "--kubeconfig", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


def test_broker_and_cluster_are_not_named_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pools", "-n", "team", "--broker", "unix:///x"]) == 2
    assert "--broker: names a broker" in capsys.readouterr().err
