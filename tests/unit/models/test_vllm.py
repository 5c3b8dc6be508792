"""The client of vLLM's generate endpoint, against a server that answers what the test says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from agentfly.models import ContextOverflow, ModelUnavailable, Sampled, Sampling, VLLMModel
from agentfly.models.vllm import parse_answer, refusal, request_body

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SAMPLING = Sampling(temperature=0.7, top_p=0.9, max_tokens=5, stop_token_ids=(2,), seed=11)


def answer(ids: list[int], logprobs: list[float], **choice: Any) -> dict[str, Any]:
    content = [{"token_id": i, "logprob": p} for i, p in zip(ids, logprobs, strict=True)]
    fields = {"finish_reason": "stop", "token_ids": ids, "logprobs": {"content": content}, **choice}
    return {"choices": [fields]}


@contextlib.asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/inference/v1/generate", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def ask(model: VLLMModel, deadline: float = 5.0) -> Sampled:
    return await model.generate([7, 8], SAMPLING, request_id="r1", deadline=deadline)


def test_a_request_asks_for_ids_and_the_log_probability_of_each() -> None:
    assert request_body([7, 8], SAMPLING, "r1") == {
        "request_id": "r1",
        "token_ids": [7, 8],
        "sampling_params": {
            "temperature": 0.7,
            "top_p": 0.9,
            "max_tokens": 5,
            "stop_token_ids": [2],
            "seed": 11,
            "logprobs": 0,
            "detokenize": False,
        },
        "stream": False,
    }
    assert "seed" not in request_body([7], Sampling(), "r1")["sampling_params"]


def test_a_request_has_the_images_of_its_placeholders_in_order() -> None:
    assert request_body([7, 8], SAMPLING, "r1", ["data:a", "data:b"])["content_parts"] == [
        {"type": "image_url", "url": "data:a"},
        {"type": "image_url", "url": "data:b"},
    ]


async def test_images_reach_the_server() -> None:
    bodies = list[Any]()

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return web.json_response(answer([5], [-1.0]))

    async with serving(handler) as url, VLLMModel(url) as model:
        await model.generate([7], SAMPLING, request_id="r1", deadline=5.0, images=["data:a"])
    assert bodies == [request_body([7], SAMPLING, "r1", ["data:a"])]


def test_an_answer_says_how_many_tokens_the_prompt_had() -> None:
    told = {**answer([5], [-0.5]), "usage": {"prompt_tokens": 12}}
    assert parse_answer(told).prompt_tokens == 12
    assert parse_answer(answer([5], [-0.5])).prompt_tokens is None


def test_an_answer_gives_ids_log_probabilities_and_the_newest_weights() -> None:
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    got = parse_answer(answer([5, 2], [-0.5, -1.5], weight_versions=spans))
    assert got == Sampled([5, 2], [-0.5, -1.5], "stop", "4")


@pytest.mark.parametrize(
    ("reason", "want"), [("stop", "stop"), ("length", "length"), ("abort", "abort"), (None, "abort")]
)
def test_every_finish_reason_is_one_of_three(reason: str | None, want: str) -> None:
    got = parse_answer(answer([5], [-1.0], finish_reason=reason))
    assert (got.finish_reason, got.weight_version) == (want, None)


@pytest.mark.parametrize(
    "broken",
    [{}, {"choices": []}, None, [], {"choices": [{"token_ids": [1]}]}, answer([1], [-1.0], token_ids=[1, 2])],
)
def test_what_is_no_complete_answer_is_the_servers_fault(broken: object) -> None:
    with pytest.raises(ModelUnavailable):
        parse_answer(broken)


@pytest.mark.parametrize("status", [500, 503, 404, 408, 429])
def test_a_server_that_cannot_serve_is_unavailable(status: int) -> None:
    error = refusal("http://m", status, "busy", 3)
    assert isinstance(error, ModelUnavailable)
    assert str(error) == f"model http://m: HTTP {status}: busy"


def test_a_prompt_that_is_too_long_says_how_long_and_what_to_change() -> None:
    text = '{"error":{"message":"The decoder prompt (length 600) is longer than the maximum model length"}}'
    error = refusal("http://m", 400, text, 600)
    assert isinstance(error, ContextOverflow)
    assert str(error).startswith("model http://m: a prompt of 600 tokens does not fit: ")
    assert error.hints == ("set rollout.maxContextTokens to what the model can take",)


def test_another_refusal_is_a_mistake_of_the_caller() -> None:
    assert isinstance(refusal("http://m", 400, "Token id 9999 is out of vocabulary", 1), ValueError)


async def test_calls_share_one_kept_alive_connection() -> None:
    peers = set()

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        return web.json_response(answer([5], [-1.0]))

    async with serving(handler) as url, VLLMModel(url + "/") as model:
        for _ in range(3):
            assert (await ask(model)).ids == [5]
    assert len(peers) == 1


async def test_many_calls_at_a_time_do_not_wait_for_one_another() -> None:
    together = asyncio.Barrier(150)

    async def handler(_: web.Request) -> web.StreamResponse:
        await together.wait()
        return web.json_response(answer([5], [-1.0]))

    async with serving(handler) as url, VLLMModel(url) as model:
        got = await asyncio.gather(*[ask(model, 20.0) for _ in range(150)])
    assert len(got) == 150


async def test_a_silent_server_is_unavailable_at_the_deadline() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(1)
        return web.Response()

    async with serving(handler) as url, VLLMModel(url) as model:
        with pytest.raises(ModelUnavailable, match=r"no answer within 0\.2 s to a prompt of 2 tokens"):
            await ask(model, 0.2)


async def test_a_cancelled_call_hangs_up() -> None:
    started, gone = asyncio.Event(), asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        started.set()
        while request.transport is not None:  # noqa: ASYNC110 - aiohttp tells it in no other way
            await asyncio.sleep(0.01)
        gone.set()
        return web.Response()

    async with serving(handler) as url, VLLMModel(url) as model:
        call = asyncio.create_task(ask(model, 20.0))
        await started.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(gone.wait(), 5)


async def test_a_server_that_hangs_up_or_is_not_there_is_unavailable() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with serving(handler) as url, VLLMModel(url) as model:
        with pytest.raises(ModelUnavailable):
            await ask(model)
    async with VLLMModel(url) as model:
        with pytest.raises(ModelUnavailable):
            await ask(model)


async def test_text_instead_of_json_is_unavailable() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>", content_type="text/html")

    async with serving(handler) as url, VLLMModel(url) as model:
        with pytest.raises(ModelUnavailable):
            await ask(model)


@pytest.mark.parametrize("body", [b"", b'{"choices": [', b"\xff\xfe", b"not json"])
async def test_a_body_that_is_no_json_is_unavailable(body: bytes) -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type="application/json")

    async with serving(handler) as url, VLLMModel(url) as model:
        with pytest.raises(ModelUnavailable):
            await ask(model)


async def test_a_mistake_of_the_caller_is_not_the_servers() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(status=400, text="Token id 9999 is out of vocabulary")

    async with serving(handler) as url, VLLMModel(url) as model:
        with pytest.raises(ValueError, match="out of vocabulary"):
            await ask(model)


async def test_a_closed_model_can_be_used_again() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.json_response(answer([5], [-1.0]))

    async with serving(handler) as url:
        model = VLLMModel(url)
        await ask(model)
        await model.close()
        await model.close()
        assert (await ask(model)).ids == [5]
        await model.close()
