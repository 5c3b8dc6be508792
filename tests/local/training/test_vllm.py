"""The client and the runner against a real vLLM server."""

import asyncio
import re

import aiohttp
import pytest

from agentfly.models import ContextOverflow, Sampling, VLLMModel
from agentfly.resources.runners.base import Member

pytestmark = pytest.mark.timeout(400)


async def requests(url: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        found = re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", await response.text(), re.MULTILINE)
    assert found is not None
    return float(found[1])


async def until(seconds: float, url: str, *, running: bool) -> None:
    async with asyncio.timeout(seconds):
        while bool(await requests(url)) != running:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.02)


async def test_ids_come_back_with_a_log_probability_each_and_the_weights_name(server: Member) -> None:
    async with VLLMModel(server.address) as model:
        got = await model.generate([5, 6, 7], Sampling(max_tokens=8), request_id="a", deadline=30)
    assert len(got.ids) == len(got.logprobs) == 8
    assert all(logprob <= 0 for logprob in got.logprobs)
    assert got.finish_reason == "length"
    assert got.weight_version is not None


async def test_a_stop_token_ends_the_answer_and_is_part_of_it(server: Member) -> None:
    async with VLLMModel(server.address) as model:
        sampling = Sampling(max_tokens=200, stop_token_ids=tuple(range(100)), seed=1)
        got = await model.generate([5, 6, 7], sampling, request_id="b", deadline=30)
    assert got.finish_reason == "stop"
    assert got.ids[-1] < 100
    assert all(token >= 100 for token in got.ids[:-1])


async def test_a_seed_gives_the_same_answer_again(server: Member) -> None:
    async with VLLMModel(server.address) as model:
        sampling = Sampling(max_tokens=20, seed=3)
        one = await model.generate([5], sampling, request_id="c", deadline=30)
        other = await model.generate([5], sampling, request_id="d", deadline=30)
    assert one.ids == other.ids


async def test_a_prompt_longer_than_the_context_is_named_so(server: Member) -> None:
    async with VLLMModel(server.address) as model:
        with pytest.raises(ContextOverflow, match="a prompt of 600 tokens does not fit"):
            await model.generate([5] * 600, Sampling(), request_id="e", deadline=30)
        with pytest.raises(ValueError, match="out of vocabulary"):
            await model.generate([10**6], Sampling(), request_id="f", deadline=30)


async def test_cancelled_calls_free_the_server(server: Member) -> None:
    async with VLLMModel(server.address) as model:
        calls = [
            asyncio.create_task(
                model.generate([5], Sampling(max_tokens=500), request_id=f"g{n}", deadline=60)
            )
            for n in range(32)
        ]
        await until(30, server.address, running=True)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await until(5, server.address, running=False)


async def test_64_calls_at_a_time_all_come_back(server: Member) -> None:
    async with VLLMModel(server.address) as model:
        calls = [
            model.generate([5, n], Sampling(max_tokens=16), request_id=f"h{n}", deadline=60)
            for n in range(64)
        ]
        got = await asyncio.gather(*calls)
    assert len(got) == 64
    for sampled in got:  # a random model may draw its end token early
        assert len(sampled.ids) == 16 or sampled.finish_reason == "stop"
