"""Sections follow the guarantees of `agentfly.training.nodes`; Ray is replaced."""

import os
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from agentfly.training import nodes


class Ended(BaseException):
    """What os._exit does to a thread."""


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []

    def fake(code: int) -> None:
        codes.append(code)
        raise Ended

    monkeypatch.setattr(os, "_exit", fake)
    monkeypatch.setattr(nodes, "_POLL_S", 0.01)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    return codes


def ray(monkeypatch: pytest.MonkeyPatch, alive: Callable[[], list[bool]], connected: bool = True) -> None:
    def listed() -> list[dict[str, bool]]:
        return [{"Alive": each} for each in alive()]

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: connected, nodes=listed))


def watch(nodes_wanted: int, seconds: float) -> None:
    with nodes.watched(nodes_wanted):
        time.sleep(seconds)


def until(exits: list[int]) -> None:
    end = time.monotonic() + 5
    while not exits and time.monotonic() < end:
        time.sleep(0.01)


# 1. the loop runs on the head


def test_the_loop_asks_for_what_only_the_head_has() -> None:
    runner = SimpleNamespace(options=lambda **options: options)
    assert nodes.on_head(runner) == {"resources": {"trainer_head": 0.01}}


# 2. a lost node ends the process


def test_a_lost_node_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, exits: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    ray(monkeypatch, lambda: [True, False])
    with nodes.watched(2):
        until(exits)
    assert exits == [1]
    assert caplog.records[-1].getMessage() == "1 of 2 Ray nodes are alive, ending"


def test_all_nodes_alive_or_no_ray_yet_is_fine(monkeypatch: pytest.MonkeyPatch, exits: list[int]) -> None:
    ray(monkeypatch, lambda: [True, True, False])
    watch(2, 0.1)
    ray(monkeypatch, lambda: [], connected=False)
    watch(2, 0.1)
    assert exits == []


# 3. not without the thread


def test_a_watch_that_breaks_ends_the_process(monkeypatch: pytest.MonkeyPatch, exits: list[int]) -> None:
    ray(monkeypatch, broken)
    with nodes.watched(2):
        until(exits)
    assert exits == [1]


def broken() -> list[bool]:
    raise ConnectionError("GCS")


# 4. nothing is watched once verl has ended


def test_nodes_may_go_afterwards(monkeypatch: pytest.MonkeyPatch, exits: list[int]) -> None:
    asked, left = threading.Event(), threading.Event()

    def gone() -> list[bool]:
        asked.set()
        assert left.wait(5)
        raise ConnectionError("GCS")

    ray(monkeypatch, gone)
    with nodes.watched(2):
        assert asked.wait(5)
    left.set()
    time.sleep(0.1)
    assert exits == []
