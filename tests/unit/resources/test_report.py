"""What a status says of a pool, for those who turn it into conditions; and how long an acquire waits.

Time is virtual.
"""

import asyncio

import pytest

from agentfly.resources.engine import ResourceEngine
from agentfly.resources.errors import StartFailed, Timeout
from agentfly.resources.lease import PoolStatus, Request
from agentfly.resources.report import REASON_LENGTH, SHOWN
from agentfly.resources.runners.base import Member
from tests.unit.resources.engines import engine_of, now, pool
from tests.unit.resources.harness import FakeRunner, virtual


def status(engine: ResourceEngine) -> PoolStatus:
    return engine.pool_status()["swe"]


async def waiters(engine: ResourceEngine, count: int, **fields: object) -> list["asyncio.Task[object]"]:
    tasks = [
        asyncio.create_task(engine.acquire("swe", f"{fields}{i}", **fields))  # type: ignore[arg-type]
        for i in range(count)
    ]
    await asyncio.sleep(0.001)
    return list(tasks)


async def over(*tasks: "asyncio.Task[object]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# Waiters.


@virtual
async def test_oldest_wait_is_that_of_the_first_who_still_waits():
    async with engine_of(FakeRunner(), pool(max=1)) as engine:
        assert status(engine).oldest_wait_s == 0.0
        held = await engine.acquire("swe", "a")
        first = await waiters(engine, 1, share="one")
        await asyncio.sleep(9)
        second = await waiters(engine, 1, share="two")
        await asyncio.sleep(3)
        assert status(engine).oldest_wait_s == pytest.approx(12, abs=0.1)
        await held.release()
        await asyncio.sleep(1)
        assert status(engine).oldest_wait_s == pytest.approx(4, abs=0.1)
        await over(*first, *second)


@virtual
async def test_shares_are_shown_with_what_they_have_and_the_largest_only():
    async with engine_of(FakeRunner(), pool(max=2)) as engine:
        await engine.acquire("swe", "a", share="train")
        await engine.acquire("swe", "b", share="eval")
        tasks = await waiters(engine, 3, share="train")
        assert {name: each.model_dump() for name, each in status(engine).by_share.items()} == {
            "train": {"pending": 3, "leased": 1},
            "eval": {"pending": 0, "leased": 1},
        }
        for number in range(SHOWN + 4):
            tasks += await waiters(engine, 1, share=f"s{number}")
        shown = status(engine).by_share
        assert len(shown) == SHOWN
        assert next(iter(shown)) == "train"
        await over(*tasks)


@virtual
async def test_full_queue_is_saturated():
    async with engine_of(FakeRunner(), pool(max=1, max_pending=2)) as engine:
        await engine.acquire("swe", "a")
        tasks = await waiters(engine, 1)
        assert not status(engine).saturated
        tasks += await waiters(engine, 1, share="x")
        assert status(engine).saturated
        await over(*tasks)


# Members.


@virtual
async def test_images_are_counted_by_the_names_that_people_know():
    async with engine_of(FakeRunner(), pool(max=4, per_image=True), pool("plain")) as engine:
        for owner, image in (("a", "x"), ("b", "x"), ("c", None)):
            await engine.acquire("swe", owner, image=image)
        assert status(engine).images == {"x": 2, "host": 1}
        assert engine.pool_status()["plain"].images == {}


@virtual
async def test_time_below_the_buffer_is_counted_until_it_is_full_again():
    runner = FakeRunner(start_s=5)
    async with engine_of(runner, pool(max=3, buffer=1)) as engine:
        await asyncio.sleep(6)
        assert status(engine).short_s is None
        runner.start_s = 100
        await engine.acquire("swe", "a")
        await asyncio.sleep(40)
        assert status(engine).short_s == pytest.approx(40, abs=0.1)
        await asyncio.sleep(61)
        assert status(engine).short_s is None


@virtual
async def test_method_of_reset_is_what_the_last_member_says():
    class Says(FakeRunner):
        async def start(self, spec, member_id):
            made = await super().start(spec, member_id)
            return Member(
                made.id, spec, 1, made.address, reset_method="overlay-shared-pid", reset_reason="why"
            )

    async with engine_of(Says(), pool(max=1)) as engine:
        assert status(engine).reset_method == ""
        await engine.acquire("swe", "a")
        assert (status(engine).reset_method, status(engine).reset_reason) == ("overlay-shared-pid", "why")


@virtual
async def test_resets_and_acquires_are_counted():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=1)) as engine:
        for _ in range(3):
            await (await engine.acquire("swe", "a")).release()
            await asyncio.sleep(1)
        lease = await engine.acquire("swe", "a")
        runner.unclean.add(lease.info.member_id)
        await lease.release()
        await asyncio.sleep(1)
        seen = status(engine)
        assert (seen.resets_clean, seen.resets_dirty, seen.clean_ratio) == (3, 1, 0.75)
        assert (seen.acquires, seen.acquires_warm) == (4, 3)


# Starts that fail.


@virtual
async def test_breaker_opens_after_five_failures_and_says_when_it_tries_again():
    runner = FakeRunner()
    runner.fail_starts = lambda number: True
    async with engine_of(runner, pool(min=1, max=1)) as engine:
        await asyncio.sleep(0.5)
        seen = status(engine)
        assert (seen.breaker, seen.reason, seen.failing) == (
            "closed",
            "StartFailing",
            {"host": "image is broken"},
        )
        assert seen.retry_in_s == pytest.approx(0.51, abs=0.01)
        await asyncio.sleep(15)
        assert (status(engine).breaker, status(engine).failures) == ("open", 5)
        delays = []
        for _ in range(6):
            retry_in_s = status(engine).retry_in_s
            assert retry_in_s is not None
            await asyncio.sleep(retry_in_s + 0.1)
            delays.append(round((status(engine).retry_in_s or 0) + 0.1))
        assert delays == [32, 64, 128, 256, 300, 300]
        runner.fail_starts = ()
        await engine.acquire("swe", "a", deadline=400)
        seen = status(engine)
        assert (seen.breaker, seen.retry_in_s, seen.failing, seen.reason) == ("closed", None, {}, "Ready")


@virtual
async def test_long_reasons_are_cut():
    class Talks(FakeRunner):
        async def start(self, spec, member_id):
            raise StartFailed("x", reason="pull: " * 1000)

    async with engine_of(Talks(), pool(min=1, max=1)) as engine:
        await asyncio.sleep(0.1)
        (reason,) = status(engine).failing.values()
        assert len(reason) == REASON_LENGTH


# How long an acquire waits.


@pytest.mark.parametrize(
    ("own", "bound", "waits", "says"),
    [
        (9.0, 4.0, 4.0, r"gave no member in 4 s \(acquire_timeout_s of the pool\): 1 of 1 leased"),
        (3.0, 4.0, 3.0, r"gave no member in 3 s: 1 of 1 leased"),
        (3.0, None, 3.0, r"gave no member in 3 s: 1 of 1 leased"),
    ],
)
def test_shorter_of_the_two_bounds_ends_the_wait(own, bound, waits, says):
    @virtual
    async def scenario() -> None:
        async with engine_of(FakeRunner(), pool(max=1, acquire_timeout_s=bound)) as engine:
            await engine.acquire("swe", "a")
            began = now()
            with pytest.raises(Timeout, match=says) as late:
                await engine.acquire("swe", "b", deadline=own)
            assert now() - began == pytest.approx(waits)
            named = "acquire_timeout_s of the pool" if waits == bound else "the deadline"
            assert late.value.hints == (f"raise max (1) or {named}, or lower the concurrency",)

    scenario()


@virtual
async def test_shortest_bound_of_several_pools_ends_the_wait_for_all():
    pools = [pool(max=1), pool("fast", max=1, acquire_timeout_s=2)]
    async with engine_of(FakeRunner(), *pools) as engine:
        await engine.acquire("fast", "a")
        with pytest.raises(Timeout, match=r"pool fast: gave no member in 2 s \(acquire_timeout_s"):
            await engine.acquire_many([Request("swe"), Request("fast")], "b", deadline=60)
        await asyncio.sleep(1)
        assert status(engine).leased == 0
