"""The client of OpenAI-compatible APIs, against a server that answers what the test says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from agentfly.errors import AgentflyError
from agentfly.models import ChatAnswer, ChatCall, ChatModel, ModelRefused, ModelUnavailable, Sampling
from agentfly.models.chat import parse_answer, refusal, request_body

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SAID: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}


def answer(message: dict[str, Any], **choice: Any) -> dict[str, Any]:
    fields = {"finish_reason": "stop", "message": {"role": "assistant", **message}, **choice}
    return {"choices": [fields], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}


@contextlib.asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}/v1"
    finally:
        await runner.cleanup()


async def ask(handler: Handler, deadline: float = 10.0, **options: Any) -> ChatAnswer:
    async with serving(handler) as url, ChatModel(url, "judge", api_key="secret") as model:
        return await model.chat(SAID, deadline=deadline, **options)


# what is asked and what is answered


async def test_conversation_is_asked_and_answered() -> None:
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((await request.json(), request.headers["authorization"]))
        return web.json_response(answer({"content": "hi"}))

    assert await ask(handler) == ChatAnswer("hi", (), "stop", 9, 2)
    assert seen == [({"model": "judge", "messages": SAID}, "Bearer secret")]


def test_request_has_tools_and_sampling_where_they_are_given() -> None:
    sampling = Sampling(temperature=0.5, top_p=0.9, max_tokens=7, seed=3, stop_token_ids=(1,))
    assert request_body("m", SAID, [TOOL], sampling) == {
        "model": "m", "messages": SAID, "tools": [TOOL],
        "temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "seed": 3,
    }  # fmt: skip
    assert "seed" not in request_body("m", SAID, [], Sampling())


def test_calls_are_kept_as_the_model_wrote_them() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1'}}]
    got = parse_answer("u", answer({"content": None, "tool_calls": calls}, finish_reason="tool_calls"))
    assert got == ChatAnswer("", (ChatCall("look", '{"at": 1'),), "stop", 9, 2)


def test_answer_that_was_cut_says_so() -> None:
    assert parse_answer("u", answer({"content": "so"}, finish_reason="length")).finish_reason == "length"
    assert parse_answer("u", {"choices": [{"message": {}}]}) == ChatAnswer("")


# 1. deadlines


async def test_silent_server_is_left_at_the_deadline() -> None:
    over = asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        await over.wait()
        return web.json_response(answer({"content": "late"}))

    async with serving(handler) as url, ChatModel(url, "judge") as model:
        with pytest.raises(ModelUnavailable, match=r"no answer within 0.2 s"):
            await model.chat(SAID, deadline=0.2)
        over.set()


# 2. what goes wrong


@pytest.mark.parametrize("broken", [{}, {"choices": []}, None, [], {"choices": [{"message": None}]}])
def test_what_is_no_answer_is_the_servers_fault(broken: object) -> None:
    with pytest.raises(ModelUnavailable, match="model u: an answer without"):
        parse_answer("u", broken)


async def test_what_is_no_json_is_the_servers_fault() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text="<html>")

    with pytest.raises(ModelUnavailable, match="an answer that is no JSON"):
        await ask(handler)


def test_address_without_a_scheme_is_refused_at_once() -> None:
    with pytest.raises(AgentflyError) as error:
        ChatModel("localhost:8000/v1", "m")
    assert error.value.render() == (
        "base_url: localhost:8000/v1 has no scheme\n  hint: write http://localhost:8000/v1"
    )


def test_path_that_is_not_there_wants_v1() -> None:
    assert refusal("http://h", 404, "not found").hints == (
        "end the address with /v1, as most do: http://h/v1",
        "name a model that this API has",
    )
    assert refusal("http://h/v1", 404, "not found").hints == ("name a model that this API has",)


async def test_server_that_is_not_there_is_unavailable() -> None:
    async with serving(lambda request: asyncio.sleep(0)) as url:
        pass
    async with ChatModel(url, "m") as model:
        with pytest.raises(ModelUnavailable):
            await model.chat(SAID)


@pytest.mark.parametrize(
    ("status", "text", "kind", "hint"),
    [
        (500, "broken", ModelUnavailable, None),
        (429, "slow down", ModelUnavailable, None),
        (404, "no such model", ModelRefused, "name a model that this API has"),
        (403, "not you", ModelRefused, "give the key"),
        (401, "who are you", ModelRefused, "give the key"),
        (400, '"auto" tool choice requires --enable-auto-tool-choice', ModelRefused, "--tool-call-parser"),
        (400, "too long", ModelRefused, None),
        (302, "elsewhere", ModelRefused, None),
    ],
)
def test_refusal_is_told_with_its_words(status: int, text: str, kind: type, hint: str | None) -> None:
    error = refusal("u", status, text)
    assert type(error) is kind
    assert error.message == f"model u: HTTP {status}: {text}"
    assert hint is None or hint in " ".join(error.hints)


# 3. the key


async def test_no_redirect_is_followed_and_no_error_shows_the_key() -> None:
    async def handler(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("http://127.0.0.1:9/v1/chat/completions")

    with pytest.raises(ModelRefused, match="HTTP 307") as error:
        await ask(handler)
    assert "secret" not in error.value.render()
