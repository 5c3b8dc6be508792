"""Waiting at the gate of an external API, by its guarantees."""

import asyncio
import random
import threading

import pytest

from agentfly.resources.runners.external import gate as external_gate
from agentfly.resources.runners.external import limits as external_limits
from agentfly.resources.runners.external.account import Refused
from agentfly.resources.runners.external.gate import Gate
from agentfly.resources.runners.external.limits import Tokens
from agentfly.resources.spec import ExternalAPISpec
from tests.unit.resources.runners.misbehaving_api import until


def gate(**fields: object) -> Gate:
    return Gate(ExternalAPISpec.model_validate({"base_url": "http://api/v1", **fields}))


async def one(gate: Gate, tokens: int = 1, *, patience: float = 60.0, takes: float = 0.0) -> None:
    with gate.request(Tokens(tokens, 0), patience) as admission:
        await admission.admitted()
        try:
            await asyncio.sleep(takes)
        finally:
            admission.settle(used=Tokens(tokens, 0), ok=True)


# 1. Patience.


async def test_all_waits_of_a_request_share_one_patience() -> None:
    api = gate(concurrency=1)
    holding = asyncio.create_task(one(api, takes=0.1))
    await until(lambda: api.usage().in_flight == 1)
    with api.request(Tokens(1, 0), 1.0) as admission:
        await admission.admitted()
        admission.settle(used=None, ok=None)
        assert not await admission.pause(0.95), "a part of the second was waited for already"
        assert await admission.pause(0.001)
    await holding


async def test_wait_ends_with_the_patience() -> None:
    api = gate(concurrency=1)
    holding = asyncio.create_task(one(api, takes=0.2))
    await until(lambda: api.usage().in_flight == 1)
    with pytest.raises(Refused, match=r"not sent in 0.05 s: waits for concurrency \(1\)") as error:
        await one(api, patience=0.05)
    assert error.value.code == "busy"
    await holding


# 2. Nothing is held.


async def test_those_behind_one_that_gives_up_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_limits, "BURST_S", 1000.0)
    api = gate(tokens_per_second=0.001)
    await one(api, 1)
    large = asyncio.create_task(one(api, 1, patience=5000))  # for a thousand seconds
    await until(lambda: api.usage().waiting == 1)
    small = asyncio.create_task(one(api, 0, patience=5000))
    await until(lambda: api.usage().waiting == 2)
    large.cancel()
    await asyncio.wait_for(small, 3)
    await asyncio.gather(large, return_exceptions=True)


@pytest.mark.parametrize("seed", range(5))
async def test_cancelled_at_any_moment_it_holds_nothing(seed: int) -> None:
    chance = random.Random(seed)
    api = gate(concurrency=2)
    tasks = [asyncio.create_task(one(api, takes=chance.random() / 500)) for _ in range(60)]
    while not all(task.done() for task in tasks):
        chance.choice(tasks).cancel()
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(result) for result in done} <= {type(None), asyncio.CancelledError}
    usage = api.usage()
    assert (usage.in_flight, usage.waiting) == (0, 0)
    assert usage.calls >= done.count(None)
    await asyncio.wait_for(one(api), 3)


# 3. Keys are read again.


async def test_references_are_read_once_in_a_while_and_block_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, go = [], threading.Event()

    def read(references: list[str]) -> tuple[dict[str, str], list[str]]:
        reads.append(references)
        go.wait(5)
        return {"env:A": "value-a"}, []

    api = gate(credentials=("env:A",))
    api.account.keys.know({"env:A": "value-0"})
    monkeypatch.setattr(external_gate, "read_keys", read)
    slow = asyncio.create_task(one(api))
    await until(lambda: api.usage().waiting == 1)
    await asyncio.wait_for(asyncio.gather(*[one(api) for _ in range(5)]), 3)
    go.set()
    await slow
    assert reads == [["env:A"]]
    monkeypatch.setattr(external_gate, "REREAD_S", 0.0)
    await one(api)
    assert len(reads) == 2


# 4. Loops.


def test_gate_may_be_used_from_one_loop_after_another():
    api = gate(requests_per_second=100.0, concurrency=1)
    for _ in range(2):
        asyncio.run(asyncio.wait_for(_several(api), 5))


async def _several(gate: Gate) -> None:
    await asyncio.gather(*[one(gate) for _ in range(5)])
