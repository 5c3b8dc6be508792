"""Requests that fail at the API: tried again, with another key, or given up; and the limits over sockets."""

import asyncio
import json
import logging
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentfly.resources.spec import Budget, CircuitBreaker, ExternalAPISpec
from tests.unit.resources.runners.misbehaving_api import (
    API,
    CHAT,
    KEY,
    OTHER,
    completion,
    held,
    raw,
    reset,
    slow,
    spec,
    status,
    until,
)

JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


# 2. Tried again.


@pytest.mark.parametrize(
    "failure",
    [
        pytest.param(status(500), id="500"),
        pytest.param(status(503), id="503"),
        pytest.param(status(408), id="408"),
        pytest.param(status(429), id="429 without a time"),
        pytest.param(reset, id="connection reset"),
        pytest.param(raw(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"), id="garbage"),
        pytest.param(raw(b"HTTP/1.1 200 OK\r\nContent-Length: banana\r\n\r\n"), id="garbage header"),
        pytest.param(raw(b"HTTP/1.1 200 OK\r\n" + b"A: " + b"x" * 100_000 + b"\r\n\r\n"), id="huge header"),
        pytest.param(
            raw(JSON_HEAD + b"Content-Length: 99\r\n\r\n{"),
            id="short body",
        ),
        pytest.param(
            raw(JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{\r\n"),
            id="truncated chunk",
        ),
        pytest.param(
            raw(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nnope"),
            id="not what it says",
        ),
    ],
)
async def test_failure_is_tried_again_and_the_second_answer_passed_on(api: API, failure: Any) -> None:
    api.script = [failure]
    async with held(spec(api)) as holder:
        answer, body = await holder.ask()
        usage = holder.usage
    assert (answer, body["usage"]["total_tokens"]) == (200, 15)
    assert len(api.seen) == 2
    assert usage.calls == 2, "each try counts"
    assert (usage.in_flight, usage.waiting) == (0, 0)


async def test_tries_end_with_max_retries_and_the_last_answer_is_quoted(api: API) -> None:
    api.default = status(500, "the disk is full")
    async with held(spec(api, max_retries=2)) as holder:
        answer, body = await holder.ask()
    assert (answer, body["error"]["code"]) == (502, "failed")
    assert "3 tries" in body["error"]["message"]
    assert "answered 500" in body["error"]["message"]
    assert "the disk is full" in body["error"]["message"]
    assert len(api.seen) == 3


async def test_lost_answer_may_have_been_carried_out_and_is_paid_for(api: API) -> None:
    api.script = [reset, status(500)]
    async with held(spec(api)) as holder:
        await holder.ask()
        usage = holder.usage
    sent = len(json.dumps(CHAT))
    assert usage.calls == 3
    assert usage.output_tokens == 16 + 0 + 5, "what was asked for, nothing, what was said"
    assert usage.input_tokens == -(-sent // 4) + 0 + 10


@pytest.mark.parametrize("failure", [pytest.param(reset, id="lost"), pytest.param(status(502), id="502")])
async def test_what_is_not_safe_to_repeat_is_not_repeated_once_it_may_have_been_carried_out(
    api: API, failure: Any
) -> None:
    api.script = [failure]
    async with held(spec(api)) as holder:
        assert await holder.code(body={"input_file_id": "f"}, path="/batches") == (502, "failed")
        assert len(api.seen) == 1
        api.script = [status(429, Retry_After="0")]
        assert (await holder.ask({"input_file_id": "f"}, path="/batches"))[0] == 200, (
            "it was refused: not done"
        )


async def test_no_connection_costs_nothing(api: API) -> None:
    async with held(ExternalAPISpec(base_url="http://127.0.0.1:9/v1", max_retries=1)) as holder:
        assert await holder.code() == (502, "failed")
        usage = holder.usage
    assert (usage.calls, usage.failures, usage.input_tokens) == (0, 2, 0)


# 2. 429 and ``Retry-After``.


@pytest.mark.parametrize("code", [429, 503])
async def test_retry_after_seconds_is_waited_for(api: API, code: int) -> None:
    api.script = [status(code, Retry_After="0.15")]
    async with held(spec(api)) as holder:
        began = time.monotonic()
        assert (await holder.ask())[0] == 200
        assert time.monotonic() - began >= 0.15


async def test_retry_after_date_beyond_the_deadline_is_told_at_once(api: API) -> None:
    api.script = [status(429, Retry_After=formatdate(time.time() + 60, usegmt=True))]
    async with held(spec(api)) as holder, holder.post() as answer:
        assert answer.status == 429
        assert json.loads(await answer.read())["error"]["code"] == "limited"
        assert 50 <= int(answer.headers["Retry-After"]) <= 61
    assert len(api.seen) == 1


async def test_key_that_is_limited_is_set_aside_for_the_next(api: API) -> None:
    api.script = [status(429, Retry_After="60")]
    async with held(spec(api, "env:FIRST", "env:OTHER", max_retries=0)) as holder:
        for _ in range(2):
            assert (await holder.ask())[0] == 200
        assert holder.usage.keys == {"env:FIRST": "limited", "env:OTHER": "ready"}
    assert api.keys == [KEY, OTHER, OTHER]


async def test_storm_of_429_on_every_key_ends_with_the_time_to_come_back(api: API) -> None:
    api.default = status(429, Retry_After=formatdate(time.time() + 90, usegmt=True))
    async with held(spec(api, "env:FIRST", "env:OTHER")) as holder:
        answers = await asyncio.gather(*[holder.code() for _ in range(8)])
        assert set(answers) == {(429, "limited")}
        seen = len(api.seen)
        assert await holder.code() == (429, "limited")
        assert len(api.seen) == seen, "nothing is sent while both keys are limited"


@pytest.mark.parametrize(("keys", "tries"), [(["env:FIRST"], 3), (["env:FIRST", "env:OTHER"], 4)])
async def test_retry_after_zero_for_ever_ends_with_max_retries(api: API, keys: list[str], tries: int) -> None:
    api.default = status(429, Retry_After="0")
    async with held(spec(api, *keys, max_retries=2)) as holder:
        assert await holder.code() == (429, "limited")
    assert len(api.seen) == tries


# 3 and 4. Keys.


async def test_key_that_is_refused_is_used_no_more(api: API) -> None:
    api.script = [status(401, f"Incorrect API key provided: {KEY}")]
    async with held(spec(api, "env:FIRST", "env:OTHER", max_retries=0)) as holder:
        for _ in range(2):
            assert (await holder.ask())[0] == 200
        assert holder.usage.keys == {"env:FIRST": "refused", "env:OTHER": "ready"}
    assert api.keys == [KEY, OTHER, OTHER]


async def test_all_keys_refused_is_an_error_that_names_the_references_alone(
    api: API, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    api.default = status(401, f"Incorrect API key provided: {KEY}, not {OTHER}")
    async with held(spec(api, "env:FIRST", "env:OTHER")) as holder:
        answer, body = await holder.ask()
        seen = repr((holder.member, holder.usage, body))
    assert (answer, body["error"]["code"]) == (502, "credentials")
    assert "env:FIRST is refused, env:OTHER is refused" in body["error"]["message"]
    assert "env:FIRST" in caplog.text
    for key in (KEY, OTHER):
        assert key not in seen
        assert key not in caplog.text


async def test_key_that_is_rotated_on_disk_works_without_a_restart(api: API, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    async with held(spec(api, f"file:{path}")) as holder:
        assert (await holder.ask())[0] == 200

        async def rotated(request: web.Request) -> web.StreamResponse:
            path.write_text(f"{OTHER}\n")
            return await status(401)(request)

        api.script = [rotated]
        assert (await holder.ask())[0] == 200, "the file is read again when its key is refused"
        path.unlink()
        assert (await holder.ask())[0] == 200, "what was read last is kept"
    assert api.keys == [KEY, KEY, OTHER, OTHER]


async def test_key_that_was_given_up_is_taken_again_when_it_changes(
    api: API, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentfly.resources.runners.external.gate.REREAD_S", 0.0)
    api.script = [status(401)]
    async with held(spec(api)) as holder:
        assert await holder.code() == (502, "credentials")
        assert await holder.code() == (502, "credentials")
        assert len(api.seen) == 1
        monkeypatch.setenv("FIRST", OTHER)
        assert (await holder.ask())[0] == 200
    assert api.keys == [KEY, OTHER]


async def test_403_on_one_key_of_two_sets_it_aside(api: API) -> None:
    api.script = [status(403)]
    async with held(spec(api, "env:FIRST", "env:OTHER")) as holder:
        assert (await holder.ask())[0] == 200
        assert holder.usage.keys == {"env:FIRST": "refused", "env:OTHER": "ready"}


async def test_403_on_one_key_proves_nothing_if_the_other_does_not_open_the_request(api: API) -> None:
    api.script = [status(403), status(404)]
    async with held(spec(api, "env:FIRST", "env:OTHER")) as holder:
        assert (await holder.ask())[0] == 404
        assert holder.usage.keys == {"env:FIRST": "ready", "env:OTHER": "ready"}


async def test_403_on_every_key_is_the_request_s_own(api: API) -> None:
    api.script = [status(403, "not this model"), status(403, "not this model")]
    async with held(spec(api, "env:FIRST", "env:OTHER")) as holder:
        assert await holder.ask() == (403, {"error": {"message": "not this model"}})
        assert holder.usage.keys == {"env:FIRST": "ready", "env:OTHER": "ready"}
        assert (await holder.ask())[0] == 200
    assert api.keys == [KEY, OTHER, KEY]


async def test_api_without_keys_gets_none_and_one_that_asks_for_one_is_told(api: API) -> None:
    api.script = [completion, status(401)]
    async with held(ExternalAPISpec(base_url=api.url)) as holder:
        assert (await holder.ask())[0] == 200
        assert await holder.code() == (502, "credentials")
        assert (await holder.ask())[0] == 200
    assert all("Authorization" not in request.headers for request in api.seen)


# The limits, seen from outside.


async def test_concurrency_is_shared_by_all_holders_and_kept(api: API) -> None:
    api.default = slow(0.02)
    async with held(spec(api, concurrency=3)) as holder:
        await holder.runner.lease(holder.member, "another", 0, "token-two", 30.0)
        answers = await asyncio.gather(
            *[holder.ask(token=token) for token in ("token-of-a-lease", "token-two") for _ in range(8)]
        )
    assert {answer for answer, _ in answers} == {200}
    assert api.most == 3


async def test_requests_wait_for_their_rate(api: API) -> None:
    async with held(spec(api, requests_per_second=20.0)) as holder:
        began = time.monotonic()
        answers = await asyncio.gather(*[holder.ask() for _ in range(24)])
        assert time.monotonic() - began >= 0.2, "20 at once, and 4 at 20 a second"
        assert {answer for answer, _ in answers} == {200}
        assert holder.usage.waited_s > 0


async def test_those_who_wait_are_served_in_their_order(api: API) -> None:
    go = asyncio.Event()

    async def gated(request: web.Request) -> web.StreamResponse:
        await go.wait()
        return await completion(request)

    api.script = [gated]
    async with held(spec(api, concurrency=1)) as holder:
        tasks = [asyncio.create_task(holder.ask())]
        await until(lambda: api.in_flight == 1)
        for n in range(5):
            tasks.append(asyncio.create_task(holder.ask({**CHAT, "n": n})))
            await until(lambda n=n: holder.usage.waiting == n + 1)
        go.set()
        await asyncio.gather(*tasks)
    assert [json.loads(body)["n"] for body in api.bodies[1:]] == [0, 1, 2, 3, 4]


async def test_tokens_are_estimated_before_and_corrected_after(api: API) -> None:
    body = {"messages": [], "max_tokens": 4000}  # and the answer has 15
    async with held(spec(api, tokens_per_second=4100.0)) as holder:
        began = time.monotonic()
        for _ in range(5):
            assert (await holder.ask(body))[0] == 200
        assert time.monotonic() - began < 4, "5 estimates would take 4 seconds"


async def test_budget_of_calls_ends_them(api: API) -> None:
    api.script = [status(500)]
    async with held(spec(api, budget=Budget(calls=2))) as holder:
        assert (await holder.ask())[0] == 200
        answer, body = await holder.ask()
        assert (answer, body["error"]["code"]) == (402, "budget")
        assert "2 of 2 calls" in body["error"]["message"]
        assert holder.usage.refused == {"budget": 1}
    assert len(api.seen) == 2


async def test_budget_of_money_is_counted_from_the_usage_of_answers(api: API) -> None:
    budget = Budget(usd=0.003, usd_per_million_input=100.0, usd_per_million_output=200.0)  # 0.002 an answer
    async with held(spec(api, budget=budget)) as holder:
        assert (await holder.ask())[0] == 200
        assert holder.usage.usd == pytest.approx(0.002)
        assert (await holder.ask())[0] == 200
        answer, body = await holder.ask()
    assert (answer, body["error"]["code"]) == (402, "budget")
    assert "0.0040 of 0.003 US dollars" in body["error"]["message"]


async def test_breaker_opens_refuses_tries_once_and_closes(api: API) -> None:
    api.default = status(500)
    async with held(
        spec(api, max_retries=0, circuit_breaker=CircuitBreaker(failures=2, open_s=0.2))
    ) as holder:
        for _ in range(2):
            assert await holder.code() == (502, "failed")
        async with holder.post() as answer:
            assert answer.status == 503
            assert json.loads(await answer.read())["error"]["code"] == "breaker"
            assert int(answer.headers["Retry-After"]) == 1
        assert len(api.seen) == 2
        assert (await holder.runner.probe(holder.member)).alive
        await asyncio.sleep(0.25)
        api.default = None
        assert holder.usage.breaker == "half-open"
        assert {answer for answer, _ in await asyncio.gather(*[holder.ask() for _ in range(4)])} == {200}
        assert holder.usage.breaker == "closed"
