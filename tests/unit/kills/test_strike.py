"""Strikes at real processes, which are said to be a pod's."""

import os
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import faults
from tests.cluster.api import wait
from tests.cluster.machine import ClusterError
from tests.kills import strike
from tests.kills.matrix import Part, Strike

ENGINE = "import time; time.sleep(600)  # VLLM::EngineCore"


class Pod:
    """A pod of two processes."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.found = 200
        api = types.SimpleNamespace(call=self._call)
        self.cluster: Any = types.SimpleNamespace(api=api)
        self.main = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.engine = subprocess.Popen([sys.executable, "-c", ENGINE])
        wait("its name", lambda: "EngineCore" in strike._title(self.engine.pid), 10)

    def struck(self, part: Part, how: Strike) -> Any:
        return strike.struck(self.cluster, "n", "p", part, how)

    def state(self, process: subprocess.Popen[bytes]) -> str:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def _call(self, method: str, path: str) -> tuple[int, Any]:
        self.asked.append((method, path))
        return self.found, {}


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pod]:
    made = Pod()
    pids = {made.main.pid, made.engine.pid}
    monkeypatch.setattr(faults, "container_pids", lambda *_: set(pids))
    yield made
    for process in (made.main, made.engine):
        process.kill()
        process.wait(10)


def test_a_container_is_killed_with_all_its_processes(pod: Pod) -> None:
    assert pod.struck(Part.HEAD, Strike.KILL) == frozenset()
    assert {pod.main.wait(10), pod.engine.wait(10)} == {-signal.SIGKILL}


def test_who_stands_still_goes_on_when_told(pod: Pod) -> None:
    still = pod.struck(Part.BROKER, Strike.STOP)
    wait("both stand still", lambda: pod.state(pod.main) == pod.state(pod.engine) == "T", 10)
    strike.go_on(still)
    wait("both go on", lambda: "T" not in (pod.state(pod.main), pod.state(pod.engine)), 10)


def test_an_engine_is_struck_alone(pod: Pod) -> None:
    pod.struck(Part.ENGINE, Strike.KILL)
    assert pod.engine.wait(10) == -signal.SIGKILL
    assert pod.main.poll() is None


def test_a_server_is_struck_at_the_first_process_of_its_container(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strike, "_number_inside", lambda pid: 1 if pid == pod.main.pid else 7)
    pod.struck(Part.SERVER, Strike.KILL)
    assert pod.main.wait(10) == -signal.SIGKILL
    assert pod.engine.poll() is None


def test_a_pod_is_deleted_with_its_own_grace(pod: Pod) -> None:
    assert pod.struck(Part.HEAD, Strike.DELETE) == frozenset()
    assert pod.asked == [("DELETE", "/api/v1/namespaces/n/pods/p")]
    pod.found = 404
    assert pod.struck(Part.HEAD, Strike.DELETE) is None


def test_where_nothing_is_there_nothing_is_struck(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "container_pids", lambda *_: set())
    assert pod.struck(Part.HEAD, Strike.KILL) is None

    def gone(*_: Any) -> None:
        raise ClusterError("pod: is gone")

    monkeypatch.setattr(faults, "container_pids", gone)
    assert pod.struck(Part.HEAD, Strike.STOP) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="root: makes the namespace of a container")
def test_a_process_knows_its_number_in_its_own_namespace() -> None:
    inner = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", "import time; time.sleep(600)"]
    )
    try:
        children = Path(f"/proc/{inner.pid}/task/{inner.pid}/children")
        wait("a child", lambda: bool(children.read_text().split()), 10)
        (child,) = children.read_text().split()
        assert strike._number_inside(int(child)) == 1
        assert strike._number_inside(inner.pid) != 1
    finally:
        inner.kill()
        inner.wait(10)
    assert strike._number_inside(inner.pid) == 0
