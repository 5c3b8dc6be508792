"""Many holders of an API that does anything, while they hang up and leases end: nothing is left."""

import asyncio
import contextlib
import random
import re

import aiohttp
import pytest
from aiohttp import web

from agentfly.resources.runners.external.wire import STATUS
from agentfly.resources.spec import Budget, CircuitBreaker
from tests.unit.resources.runners.misbehaving_api import (
    API,
    CHAT,
    KEY,
    OTHER,
    completion,
    hang,
    held,
    raw,
    reset,
    slow,
    spec,
    status,
    stream,
    until,
)

WAYS = [
    *[completion] * 6,
    slow(0.02),
    hang,
    reset,
    raw(b"nonsense\r\n\r\n"),
    status(400),
    status(500, f"echo {KEY} {OTHER}"),
    status(429, Retry_After="0.05"),
    status(503, Retry_After="0"),
    stream(*[b"data: x\n\n"] * 5, pause=0.005),
    raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"),
]


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_nothing_is_left_and_no_limit_was_passed(api: API, seed: int) -> None:
    chance = random.Random(seed)

    async def anything(request: web.Request) -> web.StreamResponse:
        return await chance.choice(WAYS)(request)

    api.default = anything
    wanted = spec(
        api,
        "env:FIRST",
        "env:OTHER",
        concurrency=4,
        requests_per_second=300.0,
        timeout_s=0.3,
        max_retries=2,
        budget=Budget(calls=250),
        circuit_breaker=CircuitBreaker(failures=4, open_s=0.05),
    )
    async with held(wanted) as holder:
        statuses: list[int] = []

        async def ask(token: str) -> None:
            with contextlib.suppress(aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError):
                async with (
                    asyncio.timeout(chance.uniform(0.005, 2)),
                    holder.post(CHAT, token=token) as answer,
                ):
                    text = await answer.text()
                    statuses.append(answer.status)
                    assert not re.search(f"{KEY}|{OTHER}", text)

        async def life(number: int) -> None:
            token = f"token-{number}"
            for _ in range(8):
                ttl = chance.uniform(0.02, 1)
                await holder.runner.lease(holder.member, f"owner-{number}", 0, token, ttl)
                with contextlib.suppress(TimeoutError):
                    await ask(token)

        await asyncio.gather(*[life(number) for number in range(24)])
        await until(lambda: holder.usage.in_flight == holder.usage.waiting == 0)
        await until(lambda: api.in_flight == 0)
        usage = holder.usage
    assert api.most <= 4
    assert len(api.seen) <= usage.calls <= 250, "what it saw was counted"
    assert set(statuses) <= {200, 400, *STATUS.values()}
    assert 200 in statuses
