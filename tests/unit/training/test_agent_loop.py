"""Which server a rollout of a training step asks, and what comes of its answer; verl is replaced."""

import asyncio
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from agentfly.api.algorithm import Algorithm
from agentfly.models import Sampled, Sampling
from agentfly.training.pinned import StaleWeights

SAMPLING = Sampling(max_tokens=4)


class Server:
    """Answers with weights of one version, and remembers who asked."""

    def __init__(self, number: int, version: str) -> None:
        self.base_url = f"http://m:{number}"
        self.version = version
        self.asked: list[str] = []

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        deadline: float,
        images: Any = (),
    ) -> Sampled:
        self.asked.append(request_id)
        return Sampled([1], [0.0], "stop", self.version)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, over a verl that has what it imports, with two turns and a second attempt a rollout."""
    verl = SimpleNamespace(AgentLoopBase=type("Base", (), {"processor": None}), AgentLoopOutput=dict)
    monkeypatch.setitem(sys.modules, "verl.experimental.agent_loop.agent_loop", verl)
    monkeypatch.delitem(sys.modules, "agentfly.training.agent_loop", raising=False)
    module = importlib.import_module("agentfly.training.agent_loop")

    async def rollout_one(*_: object, model: Any, rollout_id: str, **__: object) -> None:
        for attempt, turn in ((0, 0), (0, 1), (1, 0)):
            request = f"{rollout_id}.{attempt}.nonce.{turn}.0"
            await model.generate([1], SAMPLING, request_id=request, deadline=1.0)

    monkeypatch.setattr(module, "rollout_one", rollout_one)
    monkeypatch.setattr(module, "verl_rows", lambda trajectory, version, overlong: [])
    return module


async def play(
    loop: ModuleType, servers: list[Server], session: int, own: Any = None, ahead: int = 0
) -> None:
    nothing: Any = None
    worker = SimpleNamespace(
        config=SimpleNamespace(max_infra_retries=1, algorithm=Algorithm(), servers=own, ahead=ahead),
        models=tuple(servers),
        slots=asyncio.Semaphore(1),
        write=lambda step, trajectory: None,
        **dict.fromkeys(("agent", "strategy", "deadlines", "resources"), nothing),
    )
    loop._worker = lambda: worker  # type: ignore[attr-defined]
    one = loop.AgentflyLoop()
    one.tokenizer, one.server_manager = None, own
    fields = {"global_steps": 7, "index": 3, "session_id": session, "task": "{}"}
    await one.run({"temperature": 1.0, "top_p": 1.0}, **fields)


async def test_turns_of_an_attempt_ask_one_server_and_the_next_attempt_the_next(loop: ModuleType) -> None:
    servers = [Server(0, "6"), Server(1, "7")]
    for session in range(8):
        await play(loop, servers, session)
    for session in range(8):
        first, second = ({r[-11:] for r in s.asked if f"-r{session}." in r} for s in servers)
        assert {frozenset(first), frozenset(second)} == {
            frozenset({"0.nonce.0.0", "0.nonce.1.0"}),
            frozenset({"1.nonce.0.0"}),
        }


async def test_weights_of_another_step_end_the_attempt_and_name_the_server(loop: ModuleType) -> None:
    async def swallow(*_: object, model: Any, rollout_id: str, **__: object) -> None:
        with pytest.raises(StaleWeights):
            await model.generate([1], SAMPLING, request_id=f"{rollout_id}.0.n.0.0", deadline=1.0)

    loop.rollout_one = swallow  # type: ignore[attr-defined]
    with pytest.raises(StaleWeights, match=r"model http://m:[01]: answered with weights '2', not 6 to 7"):
        await play(loop, [Server(0, "2"), Server(1, "2")], 0)


async def test_a_rollout_that_runs_ahead_may_be_answered_by_weights_of_the_steps_before(
    loop: ModuleType,
) -> None:
    await play(loop, [Server(0, "4"), Server(1, "6")], 0, ahead=2)
    with pytest.raises(StaleWeights, match="answered with weights '3', not 4 to 7"):
        await play(loop, [Server(0, "3"), Server(1, "3")], 0, ahead=2)
    await play(loop, [Server(0, "0")], 0, ahead=16)  # no weights are older than those


class Client:
    """verl's client of its own servers."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.asked: list[str] = []

    async def generate(self, request_id: str, **_: object) -> SimpleNamespace:
        self.asked.append(request_id)
        fields = {"stop_reason": "completed", "extra_fields": {"global_steps": self.step}}
        return SimpleNamespace(token_ids=[1], log_probs=[0.0], **fields)


async def test_where_the_trainer_serves_the_policy_verls_client_is_asked(loop: ModuleType) -> None:
    client = Client(6)
    await play(loop, [], 0, client)
    assert client.asked == ["s7-t3-r0.0", "s7-t3-r0.0", "s7-t3-r0.1"]


async def test_weights_of_another_step_end_the_attempt_there_too(loop: ModuleType) -> None:
    with pytest.raises(StaleWeights, match="model verl's servers: answered with weights '5', not 6 to 7"):
        await play(loop, [], 0, Client(5))
