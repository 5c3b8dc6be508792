"""Requests through a gateway to a real server that misbehaves, by the guarantees of ``external_proxy``."""

import asyncio
import contextlib
import gzip
import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from agentfly.resources.runners.external import limits as external_limits
from agentfly.resources.runners.external import proxy as external_proxy
from agentfly.resources.spec import CircuitBreaker, ExternalAPISpec
from tests.unit.resources.runners.misbehaving_api import (
    API,
    CHAT,
    KEY,
    hang,
    held,
    misbehaving,
    raw,
    slow,
    spec,
    status,
    stream,
    until,
)

JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
EVENTS = [b'data: {"choices": [{"delta": {"content": "%d"}}]}\n\n' % n for n in range(3)]
LAST = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}\n\ndata: [DONE]\n\n'


# What is passed on.


async def test_request_arrives_with_the_key_in_place_of_the_token_and_the_answer_comes_back(api: API) -> None:
    async with held(spec(api)) as holder:
        answer, body = await holder.ask(headers={"X-Mine": "1", "Cookie": "a=b", "OpenAI-Beta": "v2"})
    assert (answer, body["usage"]["total_tokens"]) == (200, 15)
    sent = api.seen[0]
    assert (sent.method, sent.path_qs) == ("POST", "/v1/chat/completions")
    assert sent.headers["Authorization"] == f"Bearer {KEY}"
    assert (sent.headers["X-Mine"], sent.headers["OpenAI-Beta"]) == ("1", "v2")
    assert "Cookie" not in sent.headers
    assert sent.headers["Host"] in api.url
    assert json.loads(api.bodies[0]) == CHAT


async def test_method_query_and_escapes_are_as_the_holder_wrote_them(api: API) -> None:
    async with held(spec(api)) as holder:
        for method in ("GET", "DELETE"):
            url = f"{holder.member.address}/files/a%20b%2Fc?after=x%26y&limit=2"
            async with holder.session.request(
                method, URL(url, encoded=True), headers={"Authorization": "Bearer token-of-a-lease"}
            ) as answer:
                assert answer.status == 200
    assert [(each.method, each.raw_path) for each in api.seen] == [
        ("GET", "/v1/files/a%20b%2Fc?after=x%26y&limit=2"),
        ("DELETE", "/v1/files/a%20b%2Fc?after=x%26y&limit=2"),
    ]


@pytest.mark.parametrize("path", ["/../admin", "/%2e%2e/admin", "/a/..%2f..%2fadmin", "/..\\admin", "/.."])
async def test_path_cannot_leave_the_base_url(api: API, path: str) -> None:
    async with held(spec(api)) as holder:
        reader, writer = await asyncio.open_connection(*_endpoint(holder.member.address))
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer token-of-a-lease\r\n\r\n".encode()
        )
        line = await reader.readline()
        writer.close()
    assert b" 400 " in line
    assert api.seen == []


@pytest.mark.parametrize("target", ["@evil.example/", "http://evil.example/", "*"])
async def test_request_target_cannot_name_another_host(api: API, target: str) -> None:
    async with held(spec(api)) as holder:
        reader, writer = await asyncio.open_connection(*_endpoint(holder.member.address))
        writer.write(
            f"GET {target} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer token-of-a-lease\r\n\r\n".encode()
        )
        line = await reader.readline()
        writer.close()
    assert b" 40" in line
    assert api.seen == []


async def test_model_is_filled_in_only_where_it_is_absent(api: API) -> None:
    async with held(spec(api, model="judge")) as holder:
        await holder.ask()
        await holder.ask({**CHAT, "model": "other"})
        await holder.ask([1, 2])
    assert [json.loads(body) for body in api.bodies] == [
        {**CHAT, "model": "judge"},
        {**CHAT, "model": "other"},
        [1, 2],
    ]


async def test_answer_without_cookies_and_what_is_for_one_connection(api: API) -> None:
    headers = {
        "Set_Cookie": "a=b",
        "Connection": "x-secret-hop, keep-alive",
        "X_Secret_Hop": "1",
        "X_Request_Id": "r1",
    }
    api.script = [status(200, **headers)]
    async with held(spec(api)) as holder, holder.post() as answer:
        assert (answer.status, answer.headers["X-Request-Id"]) == (200, "r1")
        assert not {"Set-Cookie", "X-Secret-Hop"} & set(answer.headers)


@pytest.mark.parametrize("code", [400, 404, 409, 422])
async def test_errors_of_the_caller_pass_and_count_neither_as_failures_nor_as_tokens(
    api: API, code: int
) -> None:
    api.default = status(code, "no such thing")
    async with held(spec(api, circuit_breaker=CircuitBreaker(failures=1))) as holder:
        for _ in range(3):
            assert await holder.ask() == (code, {"error": {"message": "no such thing"}})
        usage = holder.usage
    assert (usage.calls, usage.failures, usage.input_tokens, usage.breaker) == (3, 0, 0, "closed")


async def test_request_that_is_too_large_is_refused(api: API, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentfly.resources.runners.door.REQUEST_MAX", 1000)
    async with held(spec(api)) as holder:
        assert await holder.code(body={"messages": "x" * 2000}) == (413, "size")
    assert api.seen == []


# 1. Each try and all waits end at ``timeout_s``.


async def test_server_that_hangs_costs_no_more_than_the_timeout(api: API) -> None:
    api.script = [hang]
    async with held(spec(api, timeout_s=0.1, max_retries=0)) as holder:
        assert await holder.code() == (502, "failed")
        await asyncio.wait_for(api.cut.wait(), 2)
        assert holder.usage.failures == 1
        assert (await holder.ask())[0] == 200


async def test_server_that_hangs_once_is_tried_again(api: API) -> None:
    api.script = [hang]
    async with held(spec(api, timeout_s=0.1)) as holder:
        assert (await holder.ask())[0] == 200
        assert (holder.usage.calls, holder.usage.failures) == (2, 1)


async def test_slow_drip_breaks_off_at_the_timeout(api: API) -> None:
    api.script = [stream(*[b"data: x\n\n"] * 1000, pause=0.02)]
    async with held(spec(api, timeout_s=0.3)) as holder:
        async with holder.post() as answer:
            assert answer.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        await asyncio.wait_for(api.cut.wait(), 2)
        assert holder.usage.failures == 0, "it may have been its reader that was slow"


async def test_wait_for_a_place_ends_at_the_timeout_with_the_limit_named(api: API) -> None:
    api.default = slow(0.15)
    async with held(spec(api, concurrency=1, timeout_s=0.2)) as holder:
        served = [asyncio.create_task(holder.ask()) for _ in range(2)]
        await until(lambda: holder.usage.waiting == 1)
        async with holder.post() as answer:
            error = json.loads(await answer.read())["error"]
            assert (answer.status, error["code"]) == (503, "busy")
            assert int(answer.headers["Retry-After"]) >= 1
        assert "concurrency (1)" in error["message"]
        assert [(await each)[0] for each in served] == [200, 200], "the wait is not taken from the try"


@pytest.mark.parametrize(("connect_s", "timeout_s"), [(0.05, 30.0), (30.0, 0.05)])
async def test_server_that_takes_no_connection_is_tried_again_soon_and_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, connect_s: float, timeout_s: float
) -> None:
    monkeypatch.setattr(external_limits, "BACKOFF_S", (0.001, 0.01))
    monkeypatch.setattr(external_proxy, "CONNECT_S", connect_s)
    with _deaf() as url:
        async with held(ExternalAPISpec(base_url=url, timeout_s=timeout_s, max_retries=2)) as holder:
            answer, body = await asyncio.wait_for(holder.ask(), 20)
            assert (answer, body["error"]["code"]) == (502, "failed")
            assert "3 tries: no connection" in body["error"]["message"]
            assert (holder.usage.failures, holder.usage.calls) == (3, 0)


# 5. Answers in pieces.


async def test_stream_is_passed_on_as_it_comes_and_its_last_word_on_usage_counts(api: API) -> None:
    go = asyncio.Event()

    async def behave(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(EVENTS[0])
        await go.wait()
        await response.write(EVENTS[1] + LAST)
        return response

    api.script = [behave]
    async with held(spec(api)) as holder:
        async with holder.post({**CHAT, "stream": True}) as answer:
            assert await answer.content.readuntil(b"\n\n") == EVENTS[0], "before there was more"
            go.set()
            assert await answer.read() == EVENTS[1] + LAST
        usage = holder.usage
    assert (usage.input_tokens, usage.output_tokens) == (7, 3)


async def test_stream_without_usage_is_counted_at_its_estimate(api: API) -> None:
    api.script = [stream(*EVENTS)]
    async with held(spec(api)) as holder:
        async with holder.post() as answer:
            await answer.read()
        assert holder.usage.output_tokens == CHAT["max_tokens"]


async def test_holder_that_hangs_up_after_the_last_word_pays_what_it_said(api: API) -> None:
    async def behave(request: web.Request) -> web.StreamResponse:
        await stream(*EVENTS, LAST)(request)
        return await hang(request)

    api.script = [behave]
    async with held(spec(api)) as holder:
        answer = await holder.post()
        await answer.content.readuntil(b"[DONE]\n\n")
        answer.close()
        await until(lambda: holder.usage.in_flight == 0)
        usage = holder.usage
    assert (usage.input_tokens, usage.output_tokens) == (7, 3)


async def test_large_answer_does_not_stay_in_memory(api: API, monkeypatch: pytest.MonkeyPatch) -> None:
    block = b"x" * 65536
    api.script = [stream(*[block] * 128, kind="application/json")]
    held_back: list[int] = []
    write = external_proxy.Answering.write

    async def spy(self: Any, like: Any, chunk: bytes) -> None:
        held_back.append(len(chunk))
        await write(self, like, chunk)

    monkeypatch.setattr(external_proxy.Answering, "write", spy)
    async with held(spec(api)) as holder, holder.post() as answer:
        assert len(await answer.read()) == 128 * len(block)
    assert max(held_back) <= external_proxy.WHOLE_MAX + 2**18


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
async def test_endless_answer_breaks_off(api: API, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(external_proxy, "ANSWER_MAX", 1 << 20)
    api.script = [stream(*[b"x" * 65536] * 200, kind=kind)]
    async with held(spec(api)) as holder, holder.post() as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
        assert holder.usage.in_flight == 0


async def test_compressed_bomb_is_bounded_and_a_compressed_answer_is_opened(
    api: API, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_proxy, "ANSWER_MAX", 1 << 20)

    def packed(data: bytes) -> Any:
        head = JSON_HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
        return raw(head % len(gzip.compress(data)) + gzip.compress(data))

    api.script = [packed(b'{"a": 1}'), packed(b" " * (8 << 20))]
    async with held(spec(api)) as holder:
        assert await holder.ask() == (200, {"a": 1})
        async with holder.post() as answer:
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
    assert api.seen[0].headers["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("ending", ["reset", "short"])
async def test_answer_that_breaks_off_there_breaks_off_for_the_holder(api: API, ending: str) -> None:
    async def behave(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(EVENTS[0])
        await asyncio.sleep(0.02)
        assert request.transport is not None
        request.transport.abort() if ending == "reset" else request.transport.close()
        return response

    api.script = [behave]
    async with held(spec(api)) as holder, holder.post() as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
        assert holder.usage.failures == 1
    assert len(api.seen) == 1, "not sent again: a part of it has reached the holder"


# 6. Holders that go away.


async def test_holder_that_hangs_up_in_a_stream_ends_it_there_and_frees_its_place(api: API) -> None:
    api.script = [stream(*[b"data: x\n\n"] * 1000, pause=0.01)]
    async with held(spec(api, concurrency=1)) as holder:
        answer = await holder.post()
        await answer.content.readuntil(b"\n\n")
        answer.close()
        await asyncio.wait_for(api.cut.wait(), 2)
        assert (await holder.ask())[0] == 200
        assert holder.usage.failures == 0
    assert api.most == 1


async def test_holder_that_hangs_up_while_it_waits_leaves_the_queue(api: API) -> None:
    api.script = [hang]
    async with held(spec(api, concurrency=1)) as holder:
        running = asyncio.create_task(holder.ask())
        await until(lambda: api.in_flight == 1)
        waiting = asyncio.create_task(holder.ask())
        await until(lambda: holder.usage.waiting == 1)
        waiting.cancel()
        await until(lambda: holder.usage.waiting == 0)
        running.cancel()
        await until(lambda: holder.usage.in_flight == 0)
        await asyncio.gather(running, waiting, return_exceptions=True)
    assert len(api.seen) == 1


# 7. Redirects, cookies, keys.


@pytest.mark.parametrize("code", [301, 302, 307, 308])
async def test_redirect_is_not_followed_with_the_key(api: API, code: int) -> None:
    async with misbehaving() as elsewhere:
        api.script = [status(code, Location=f"{elsewhere.url}/chat?key={KEY}")]
        async with held(spec(api)) as holder:
            answer, body = await holder.ask()
        assert (answer, body["error"]["code"]) == (502, "answer")
        assert elsewhere.url in body["error"]["message"]
        assert KEY not in str(body)
        assert elsewhere.seen == []


async def test_cookies_of_one_holder_are_not_sent_for_another(api: API) -> None:
    api.script = [status(200, Set_Cookie="session=1")]
    async with held(spec(api)) as holder:
        await holder.ask()
        await holder.ask()
    assert "Cookie" not in api.seen[1].headers


@pytest.mark.parametrize("code", [200, 400, 500])
async def test_key_that_is_echoed_is_masked(api: API, code: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    api.default = status(code, f"you said {KEY}", X_Echo=f"Bearer {KEY}")
    async with held(spec(api, max_retries=1)) as holder, holder.post() as answer:
        text = await answer.text()
        assert "you said ***" in text
        assert KEY not in str(answer.headers)
    assert KEY not in text + caplog.text


@pytest.mark.parametrize(
    ("before", "filler", "sizes"),
    [
        pytest.param(b"HTTP/1.1 500 no\r\n\r\n", b" ", range(1170, 1200, 8), id="body"),
        pytest.param(b"", b"x", range(200, 300, 8), id="garbage"),
    ],
)
async def test_no_part_of_a_key_is_quoted_where_the_quote_ends(
    api: API, before: bytes, filler: bytes, sizes: range
) -> None:
    api.script = [raw(before + filler * size + KEY.encode() + b"\r\n\r\n") for size in sizes]
    async with held(spec(api, max_retries=0, circuit_breaker=CircuitBreaker(failures=99))) as holder:
        for _ in sizes:
            _, body = await holder.ask()
            assert body["error"]["code"] == "failed"
            assert KEY[:8] not in str(body)


async def test_bytes_that_are_no_text_break_nothing(api: API) -> None:
    api.script = [raw(b"HTTP/1.1 200 OK\r\nX-Bad: \xff\r\nX-Good: 1\r\nContent-Length: 2\r\n\r\nok")]
    async with held(spec(api)) as holder:
        async with holder.post() as answer:
            assert (answer.status, await answer.read(), answer.headers["X-Good"]) == (200, b"ok", "1")
        reader, writer = await asyncio.open_connection(*_endpoint(holder.member.address))
        writer.write(
            b"GET /a HTTP/1.1\r\nHost: a\r\nX: \xff\r\nAuthorization: Bearer token-of-a-lease\r\n\r\n"
        )
        assert b" 400 " in await reader.readline()
        writer.close()


async def test_key_that_is_echoed_across_pieces_of_a_stream_is_masked(api: API) -> None:
    api.script = [stream(b"data: " + KEY[:9].encode(), KEY[9:].encode() + b"\n\n", pause=0.02)]
    async with held(spec(api)) as holder, holder.post() as answer:
        assert await answer.read() == b"data: ***\n\n"


@contextlib.contextmanager
def _deaf() -> Iterator[str]:
    """A URL where connections are never accepted: the kernel's queue for them is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


def _endpoint(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("http://").partition(":")
    return host, int(port)
