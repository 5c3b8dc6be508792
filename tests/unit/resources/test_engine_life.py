"""The life of an engine: resets for the holder, failing starts, closing, configuration. Time is virtual.

Section 6 is guarantee 6 of engine.py.
"""

import asyncio

import pytest

from agentfly.resources.actions import Action
from agentfly.resources.engine import CLOSE_S, ResourceEngine
from agentfly.resources.errors import (
    Infra,
    LeaseLost,
    PoolNotFound,
    ResourceError,
    StartFailed,
)
from agentfly.resources.lease import PoolStatus
from agentfly.resources.pool import Pool
from tests.unit.resources.engines import MODEL, SETTLE, engine_of, now, pool, shape
from tests.unit.resources.harness import FakeRunner, run, virtual

# Reset for the holder.


@virtual
async def test_reset_gives_the_same_holder_a_pristine_member():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=1)) as engine:
        lease = await engine.acquire("swe", "a")
        other = asyncio.create_task(engine.acquire("swe", "b"))
        await asyncio.sleep(0.1)
        before = lease.info
        await lease.reset()
        assert lease.info.member_id == before.member_id
        assert lease.info.incarnation == 2
        assert lease.info.token != before.token
        assert not other.done(), "the member never left its holder"
        await lease.release()
        await other


@pytest.mark.parametrize("order", ["heartbeat first", "reset first"])
def test_heartbeat_and_reset_in_both_orders(order):
    async def scenario() -> None:
        runner = FakeRunner()
        async with engine_of(runner, pool(max=1)) as engine:
            lease = await engine.acquire("swe", "a")
            before = lease.info
            calls = [engine.heartbeat([before.lease_id]), lease.reset()]
            if order == "reset first":
                calls.reverse()
            # The first step of each call, in this order: a renewal is sent only after both.
            answers = await asyncio.gather(*calls)
            assert {before.lease_id: True} in answers
            assert (lease.info.member_id, lease.info.incarnation) == (before.member_id, 2)
            assert runner.starts == 1, "a good member was not condemned"

    run(scenario())


@virtual
async def test_refused_renewal_of_a_lease_that_is_being_reset_condemns_nothing():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=1)) as engine:
        lease = await engine.acquire("swe", "a")
        before = lease.info
        runner.lease_s = 0.5
        beat = asyncio.create_task(engine.heartbeat([before.lease_id]))
        await asyncio.sleep(0.1)
        runner.holders[before.member_id] = ("nobody", 0, "")  # what a daemon says once a lease ran out
        await lease.reset()
        assert await beat == {before.lease_id: True}
        assert (lease.info.member_id, lease.info.incarnation) == (before.member_id, 2)


@virtual
async def test_failed_reset_gives_the_holder_another_member_before_all_waiters():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=1)) as engine:
        lease = await engine.acquire("swe", "a")
        other = asyncio.create_task(engine.acquire("swe", "b"))
        await asyncio.sleep(0.1)
        runner.unclean.add(lease.info.member_id)
        old = lease.info
        await lease.reset()
        assert lease.info.member_id != old.member_id
        assert lease.info.lease_id == old.lease_id
        assert not other.done()
        assert runner.peak == 1
        await lease.release()
        await other


@virtual
async def test_reset_of_what_cannot_be_reset_is_refused():
    model = FakeRunner("model-service", shared=True)
    runner = FakeRunner()
    async with engine_of(
        runner, pool(), pool("judge", shared=True, resource=MODEL), others=[model]
    ) as engine:
        judge = await engine.acquire("judge", "a")
        with pytest.raises(ResourceError, match="a shared member is not reset for one holder"):
            await judge.reset()
        lease = await engine.acquire("swe", "a")
        runner.kill(lease.info.member_id)
        await engine.heartbeat([lease.info.lease_id])
        with pytest.raises(LeaseLost):
            await lease.reset()
        await lease.release()
        with pytest.raises(LeaseLost, match="is over"):
            await engine.reset(lease.info.lease_id)


# Failing starts.


@virtual
async def test_permanent_failure_rejects_the_first_waiter_with_the_reason():
    runner = FakeRunner()
    runner.fail_starts = lambda number: True
    async with engine_of(runner, pool(max=4)) as engine:
        first = asyncio.create_task(engine.acquire("swe", "a"))
        second = asyncio.create_task(engine.acquire("swe", "b"))
        with pytest.raises(StartFailed) as failed:
            await first
        assert failed.value.message == "pool swe: no member could be started: image is broken"
        assert (failed.value.reason, failed.value.hints) == ("image is broken", ("mend it",))
        assert now() == pytest.approx(1 + 2 + 4 + 8, abs=0.1)
        assert not second.done()
        assert engine.pool_status()["swe"].reason == "StartFailing"
        assert engine.pool_status()["swe"].message == "image is broken"
        assert runner.starts <= 6, "it does not spin"
        with pytest.raises(StartFailed):
            await second


@virtual
async def test_deadline_while_starts_fail_tells_why():
    runner = FakeRunner()
    runner.fail_starts = lambda number: True
    async with engine_of(runner, pool()) as engine:
        with pytest.raises(StartFailed, match="image is broken") as failed:
            await engine.acquire("swe", "a", deadline=2)
        assert now() == 2
        assert failed.value.hints == ("mend it",)


@virtual
async def test_start_that_fails_once_is_tried_again_for_the_same_waiter():
    runner = FakeRunner()
    runner.fail_starts = {1}
    async with engine_of(runner, pool()) as engine:
        await engine.acquire("swe", "a", deadline=5)
        assert now() == pytest.approx(1.021)


@virtual
async def test_several_waiters_start_several_members_at_once():
    runner = FakeRunner(start_s=1)
    async with engine_of(runner, pool(max=8)) as engine:
        await asyncio.gather(*(engine.acquire("swe", f"r{i}") for i in range(6)))
        assert now() == pytest.approx(1.001)
        assert runner.starts == 6


# 6. Closing.


@virtual
async def test_close_ends_waiters_starts_resets_and_leases():
    runner = FakeRunner(start_s=1)
    engine = ResourceEngine([runner], [pool(max=3)])
    one = await engine.acquire("swe", "a")
    two = await engine.acquire("swe", "b")
    runner.start_s, runner.reset_s = 500, 500
    waiting = [asyncio.create_task(engine.acquire("swe", f"w{i}")) for i in range(3)]
    await asyncio.sleep(0.1)
    await one.release()
    await asyncio.sleep(0.1)
    assert shape(engine.pool_status()["swe"]) == {"leased": 1, "resetting": 1, "starting": 1, "queued": 3}
    began = now()
    await engine.close()
    assert now() - began < 1
    for task in waiting:
        with pytest.raises(ResourceError, match="the engine was closed"):
            await task
    assert runner.existing == set()
    with pytest.raises(ResourceError, match="is closed"):
        await engine.acquire("swe", "c")
    with pytest.raises(ResourceError, match="is closed"):
        engine.add_pool(pool("late"))
    await two.release()
    await engine.close()


@virtual
async def test_close_cancelled_twice_still_stops_everything():
    runner = FakeRunner()
    runner.stop_s = 1
    engine = ResourceEngine([runner], [pool(min=2, max=2)])
    await engine.acquire("swe", "a")
    closing = asyncio.create_task(engine.close())
    for _ in range(2):
        await asyncio.sleep(0.1)
        closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert runner.existing == set()


@virtual
async def test_failing_stop_is_tried_again_and_keeps_its_place():
    runner = FakeRunner()
    runner.fail_stops = 2
    async with engine_of(runner, pool(max=1, max_reuses=0)) as engine:
        await (await engine.acquire("swe", "a")).release()
        waiting = asyncio.create_task(engine.acquire("swe", "b"))
        await asyncio.sleep(2.5)
        assert shape(engine.pool_status()["swe"]) == {"stopping": 1, "queued": 1}
        await waiting
        assert now() == pytest.approx(3.0, abs=0.1)
        assert runner.peak == 1


@virtual
async def test_close_reports_members_that_do_not_stop():
    runner = FakeRunner()
    runner.fail_stops = 10**9
    engine = ResourceEngine([runner], [pool(min=1, max=1)])
    lease = await engine.acquire("swe", "a")
    began = now()
    with pytest.raises(Infra, match=rf"members {lease.info.member_id}: not stopped in 60 s"):
        await engine.close()
    assert now() - began <= CLOSE_S + 10


# What cannot work is refused when it is configured.


def test_kind_that_cannot_run_here_is_refused_with_the_reason():
    runner = FakeRunner()
    runner.reason = "bwrap: not found"
    with pytest.raises(ResourceError, match="pool swe: runner bubblewrap cannot work here: bwrap: not found"):
        ResourceEngine([runner], [pool()])
    with pytest.raises(ResourceError, match="runner model-service cannot work here: there is no such runner"):
        ResourceEngine([FakeRunner()], [pool(resource=MODEL)])


def test_pool_with_a_conflicting_cap_is_refused():
    engine = ResourceEngine([FakeRunner()], [pool(max=2)])
    engine.add_pool(pool(max=2))
    with pytest.raises(ResourceError, match="pool swe: exists already"):
        engine.add_pool(pool(max=3))


@virtual
async def test_unknown_pool_names_those_that_exist():
    async with engine_of(FakeRunner(), pool()) as engine:
        with pytest.raises(PoolNotFound) as missing:
            await engine.acquire("sew", "a")
        said = "pool sew: does not exist\n  hint: did you mean swe?\n  hint: pools that do: swe"
        assert missing.value.render() == said


@virtual
async def test_pool_added_later_is_warmed_at_once():
    async with engine_of(FakeRunner()) as engine:
        engine.add_pool(pool(min=2, max=2))
        await asyncio.sleep(0.1)
        assert (await engine.status())["swe"] == PoolStatus(
            kind="container",
            max=2,
            min=2,
            ready=2,
            leased=0,
            starting=0,
            resetting=0,
            stopping=0,
            quarantined={},
            queued=0,
            starts=2,
            resets=0,
            failures=0,
            reason="Ready",
        )


@virtual
async def test_member_that_was_looked_at_is_stopped():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=2, quarantine=1)) as engine:
        lease = await engine.acquire("swe", "a")
        runner.unclean.add(lease.info.member_id)
        await lease.release()
        await asyncio.sleep(1)
        with pytest.raises(ResourceError, match="pool swe: member swe-x is not in quarantine") as refused:
            engine.unquarantine("swe", "swe-x")
        assert refused.value.hints == (f"members that are: {lease.info.member_id}",)
        engine.unquarantine("swe", lease.info.member_id)
        await asyncio.sleep(1)
        assert (runner.existing, engine.pool_status()["swe"].quarantined) == (set(), {})


@virtual
async def test_dead_warm_member_is_found_and_replaced():
    runner = FakeRunner()
    async with engine_of(runner, pool(min=1, max=1)) as engine:
        await asyncio.sleep(0.1)
        runner.kill(next(iter(runner.existing)))
        await asyncio.sleep(15)
        assert (runner.starts, shape(engine.pool_status()["swe"])) == (2, {"ready": 1})


# 8. A decision that raises.


@virtual
async def test_pool_that_cannot_decide_fails_its_waiters_and_its_members_are_stopped(monkeypatch, caplog):
    runner = FakeRunner()
    async with engine_of(runner, pool(max=1), pool("other")) as engine:
        held = await engine.acquire("swe", "a")
        waiter = asyncio.create_task(engine.acquire("swe", "b", deadline=900))
        await asyncio.sleep(1)

        def broken(self: Pool, now: float) -> list[Action]:
            if self.spec.name == "swe":
                raise KeyError("p-7")
            return decide(self, now)

        decide = Pool.decide
        monkeypatch.setattr(Pool, "decide", broken)
        began = now()
        await held.release()
        for late in (waiter, engine.acquire("swe", "c", deadline=900)):
            with pytest.raises(Infra, match=r"^pool swe: could not decide: KeyError: 'p-7'$"):
                await late
        assert now() - began < SETTLE, "and not at their deadline"
        assert (await engine.acquire("other", "d")).info.pool == "other"
        assert "could not decide" in caplog.text
