"""The eight rules of the engine, each in the words in which it is promised, shown from outside.

What the modules guarantee in detail is tested beside them; here a rule that no longer holds has a name. Time
is virtual: every number of seconds is exact.
"""

import asyncio
from collections import Counter
from typing import Any

import pytest

from agentfly.errors import AgentflyError
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.errors import (
    Infra,
    LeaseLost,
    PoolNotFound,
    ResourceError,
    Saturated,
    SpecMismatch,
    StartFailed,
    Timeout,
)
from agentfly.resources.events import Event, EventKind
from agentfly.resources.lease import Request
from agentfly.resources.runners.base import Member, Vitals
from agentfly.resources.spec import ContainerSpec
from tests.unit.resources.engines import MODEL, SETTLE, engine_of, now, pool, shape
from tests.unit.resources.harness import FakeRunner, run, virtual


class TestRule1:
    """Identity is the canonical hash of the whole spec. The same (owner, key) with the same spec returns
    the same live member; with another spec it is an error; if the member died it is
    ``LeaseLost(incarnation)``, never a silent blank one."""

    @pytest.mark.parametrize(
        "change",
        [
            {"image": "other"},
            {"cpu": 2.0},
            {"memory_mb": 1},
            {"disk_mb": 1},
            {"pids": 9},
            {"env": {"A": "1"}},
            {"network": True},
            {"workdir": "/w"},
            {"reset": {"method": "recreate"}},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_every_field_is_part_of_the_identity(self, change):
        @virtual
        async def scenario() -> None:
            other = ContainerSpec.model_validate(change)
            async with engine_of(FakeRunner()) as engine:
                mine = await engine.acquire(ContainerSpec(), "o", key="box")
                assert await engine.acquire(ContainerSpec(), "o", key="box") is mine
                with pytest.raises(SpecMismatch):
                    await engine.acquire(other, "o", key="box")
                theirs = await engine.acquire(other, "o", key="other box")
                assert theirs.info.member_id != mine.info.member_id

        scenario()

    @virtual
    async def test_dead_member_is_lost_with_its_incarnation_as_long_as_its_owner_holds_on(self):
        runner = FakeRunner()
        async with engine_of(runner, pool(max=2)) as engine:
            await (await engine.acquire("swe", "before")).release()
            lease = await engine.acquire("swe", "o")
            runner.kill(lease.info.member_id)
            for _ in range(3):
                with pytest.raises(LeaseLost) as lost:
                    await engine.acquire("swe", "o", deadline=5)
                assert lost.value.incarnation == lease.info.incarnation == 2


class TestRule2:
    """Every state change wakes the waiters that it concerns, in FIFO order within their share. Waits have
    deadlines. A cancelled waiter or start leaves no trace: no slot, no process, no container."""

    @virtual
    async def test_a_hundred_waiters_are_served_in_order(self):
        served: list[int] = []
        async with engine_of(FakeRunner(), pool(max=1)) as engine:

            async def rollout(number: int) -> None:
                async with await engine.acquire("swe", f"r{number}"):
                    served.append(number)
                    await asyncio.sleep(0.01)

            await asyncio.gather(*(rollout(i) for i in range(100)))
        assert served == list(range(100))

    @virtual
    async def test_order_holds_within_a_share_whatever_the_others_do(self):
        served: list[str] = []
        async with engine_of(FakeRunner(), pool(max=2)) as engine:

            async def rollout(owner: str, share: str) -> None:
                async with await engine.acquire("swe", owner, share=share):
                    served.append(owner)
                    await asyncio.sleep(0.01)

            await asyncio.gather(*(rollout(f"{share}{i}", share) for i in range(20) for share in "ab"))
        for share in "ab":
            assert [owner for owner in served if owner.startswith(share)] == [
                f"{share}{i}" for i in range(20)
            ]

    @pytest.mark.parametrize("change", ["release", "dirty", "death", "expiry", "reset", "resize", "start"])
    def test_change_wakes_who_waits_at_once(self, change):
        @virtual
        async def scenario() -> None:
            runner = FakeRunner()
            async with engine_of(runner, pool(max=1, lease_ttl_s=6)) as engine:
                if change == "start":
                    runner.start_s = 3
                    began = now()
                    await engine.acquire("swe", "w")
                    assert now() - began == pytest.approx(3, abs=0.1)
                    return
                (info,) = await engine.claim_many([Request("swe")], "holder")
                if change == "reset":
                    runner.unclean.add(info.member_id)
                waiting = asyncio.create_task(engine.acquire("swe", "w", deadline=60))
                await asyncio.sleep(1)
                began = now()
                match change:
                    case "release" | "reset":
                        await engine.release(info.lease_id)
                    case "dirty":
                        await engine.release(info.lease_id, dirty=True)
                    case "death":
                        runner.kill(info.member_id)
                        await engine.heartbeat([info.lease_id])
                    case "resize":
                        engine.set_pool(pool(max=2, lease_ttl_s=6))
                await waiting
                assert now() - began == pytest.approx(5 if change == "expiry" else 0, abs=0.1)

        scenario()

    @virtual
    async def test_wait_ends_at_its_deadline_and_a_cancelled_one_leaves_nothing(self):
        runner = FakeRunner(start_s=50)
        async with engine_of(runner, pool(max=1)) as engine:
            with pytest.raises(Timeout):
                await engine.acquire("swe", "late", deadline=7)
            assert now() == 7
            waiting = asyncio.create_task(engine.acquire("swe", "cut off"))
            await asyncio.sleep(1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await asyncio.sleep(SETTLE)
            assert (shape(engine.pool_status()["swe"]), runner.existing) == ({}, set())


class TestRule3:
    """Capacity counts members that are starting, leased, resetting and ready. ``max`` is never exceeded,
    not for a moment."""

    @virtual
    async def test_crowd_never_has_more_than_max_of_any_kind(self):
        runner = FakeRunner(start_s=0.3)
        runner.reset_s, runner.stop_s = 0.2, 0.5
        async with engine_of(runner, pool(max=3, max_reuses=1)) as engine:

            async def rollout(number: int) -> None:
                async with asyncio.timeout(0.7 * (number % 9) + 0.05):
                    lease = await engine.acquire("swe", f"r{number}")
                    await asyncio.sleep(0.1)
                    if number % 4 == 0:
                        runner.kill(lease.info.member_id)
                    await lease.release(dirty=number % 5 == 0)

            await asyncio.gather(*(rollout(i) for i in range(60)), return_exceptions=True)
            status = engine.pool_status()["swe"]
            assert (runner.peak, status.queued) == (3, 0)
            assert runner.starts > 10


class Weighed(FakeRunner):
    """Members hold as much memory as they are told."""

    memory_mb = 1.0

    async def probe(self, member: Member) -> Vitals:
        vitals = await super().probe(member)
        return Vitals(alive=vitals.alive, memory_mb=self.memory_mb)


class TestRule4:
    """Free means verified. A member returns to free only through reset and a check that it is pristine; a
    failed check quarantines or deletes it; a member is retired after ``max_reuses``, ``max_lifetime``, or
    memory over its limit."""

    @virtual
    async def test_member_comes_back_through_its_reset_alone(self):
        runner = FakeRunner()
        runner.reset_s = 4
        async with engine_of(runner, pool(max=1)) as engine:
            await (await engine.acquire("swe", "a")).release()
            began = now()
            lease = await engine.acquire("swe", "b", deadline=9)
            assert now() - began == pytest.approx(4, abs=0.1)
            assert (lease.info.incarnation, runner.resets) == (2, 1)

    @virtual
    async def test_dirty_member_is_not_used_again(self):
        runner = FakeRunner()
        async with engine_of(runner, pool(max=1)) as engine:
            lease = await engine.acquire("swe", "a")
            await lease.release(dirty=True)
            second = await engine.acquire("swe", "b", deadline=3)
            assert second.info.member_id != lease.info.member_id
            assert runner.resets == 0

    @pytest.mark.parametrize("kept", [0, 1])
    def test_member_that_is_not_pristine_is_deleted_or_kept_for_a_look(self, kept):
        @virtual
        async def scenario() -> None:
            runner, events = FakeRunner(), []
            spec = pool(max=2, quarantine=kept)
            async with ResourceEngine([runner], [spec], observer=events.append) as engine:
                lease = await engine.acquire("swe", "a")
                runner.unclean.add(lease.info.member_id)
                await lease.release()
                await asyncio.sleep(SETTLE)
                status = engine.pool_status()["swe"]
                why = {lease.info.member_id: f"member {lease.info.member_id}: a file is left"}
                assert status.quarantined == (why if kept else {})
                assert (lease.info.member_id in runner.existing) == bool(kept)
                told = [event for event in events if event.kind is EventKind.MEMBER_QUARANTINED]
                assert [(event.member, event.reason) for event in told] == [
                    (lease.info.member_id, "ResetFailed")
                ] * kept
                for owner in "bcd":
                    other = await engine.acquire("swe", owner, deadline=5)
                    assert other.info.member_id != lease.info.member_id
                    await other.release()
            assert runner.existing == set()

        scenario()

    @pytest.mark.parametrize(
        ("limit", "reason"),
        [
            ({"max_reuses": 2}, "MaxReuses"),
            ({"max_lifetime_s": 50.0}, "MaxLifetime"),
            ({"max_memory_mb": 100}, "MaxMemory"),
        ],
        ids=lambda case: case if isinstance(case, str) else "",
    )
    def test_member_is_retired_between_two_holders(self, limit, reason):
        @virtual
        async def scenario() -> None:
            runner = Weighed()
            events: list[Event] = []
            async with ResourceEngine([runner], [pool(max=1, **limit)], observer=events.append) as engine:
                for number in range(3):
                    lease = await engine.acquire("swe", f"r{number}", deadline=5)
                    await asyncio.sleep(20)
                    assert not lease.lost, "never under its holder"
                    if number == 2:
                        runner.memory_mb = 200.0
                    await lease.release()
                    await asyncio.sleep(1)
                assert (runner.starts, runner.existing) == (1, set())
                stopped = [event for event in events if event.kind is EventKind.MEMBER_STOPPED]
                assert [event.reason for event in stopped] == [reason]

        scenario()


class TestRule5:
    """Shared members (scope global) are reference-counted."""

    @pytest.mark.parametrize("wanted", ["judge", MODEL], ids=["a pool", "a spec"])
    def test_member_stays_for_its_last_holder_and_longer_where_its_pool_has_a_name(self, wanted):
        async def scenario() -> None:
            runner = FakeRunner("model-service", shared=True)
            pools = [pool("judge", shared=True, resource=MODEL)] if wanted == "judge" else []
            async with engine_of(runner, *pools) as engine:
                leases = [await engine.acquire(wanted, f"r{i}", scope="global") for i in range(5)]
                assert (runner.starts, len({lease.info.member_id for lease in leases})) == (1, 1)
                for lease in leases:
                    assert (runner.stops, runner.resets) == (0, 0)
                    await lease.release()
                    await lease.release()
                    await asyncio.sleep(SETTLE)
                assert (runner.stops, runner.resets) == ((0, 1) if pools else (1, 0))
                await engine.acquire(wanted, "next", scope="global")
                assert runner.starts == (1 if pools else 2)

        run(scenario())

    @virtual
    async def test_new_holder_gets_the_member_with_the_fewest(self):
        runner = FakeRunner("model-service", shared=True)
        spec = pool("judge", shared=True, resource=MODEL, min=2, max=2)
        async with engine_of(runner, spec) as engine:
            leases = [await engine.acquire("judge", f"r{i}") for i in range(4)]
            held = Counter(lease.info.member_id for lease in leases)
            assert sorted(held.values()) == [2, 2]
            await leases[0].release()
            fifth = await engine.acquire("judge", "r5", deadline=5)
            assert fifth.info.member_id == leases[0].info.member_id

    @virtual
    async def test_dead_shared_member_is_lost_for_every_holder(self):
        runner = FakeRunner("model-service", shared=True)
        async with engine_of(runner, pool("judge", shared=True, resource=MODEL)) as engine:
            a, b = await engine.acquire("judge", "a"), await engine.acquire("judge", "b")
            runner.kill(a.info.member_id)
            await asyncio.sleep(20)
            assert (a.lost, b.lost) == (True, True)
            with pytest.raises(LeaseLost):
                _ = a.base_url
            assert (await engine.acquire("judge", "c", deadline=3)).base_url.startswith("unix://")


class TestRule6:
    """A lease has an owner, an attempt, a TTL and a heartbeat. No heartbeat, no lease: the sandbox kills
    what runs in it and marks itself dirty, even if the broker is dead. (The sandbox's own part:
    tests/local.)"""

    @virtual
    async def test_lease_lives_by_its_heartbeat(self):
        runner = FakeRunner()
        async with engine_of(runner, pool(max=1, lease_ttl_s=9)) as engine:
            (info,) = await engine.claim_many([Request("swe")], "o", attempt=3)
            assert runner.holders[info.member_id] == ("o", 3, info.token)
            assert info.ttl_s == 9
            for _ in range(4):
                await asyncio.sleep(8)
                assert await engine.heartbeat([info.lease_id]) == {info.lease_id: True}
            await asyncio.sleep(9.1)
            assert await engine.heartbeat([info.lease_id]) == {info.lease_id: False}

    @virtual
    async def test_later_attempt_takes_over_and_an_earlier_one_cannot(self):
        async with engine_of(FakeRunner(), pool(max=1)) as engine:
            old = await engine.acquire("swe", "o", attempt=1)
            new = await engine.acquire("swe", "o", attempt=2, deadline=5)
            assert (old.lost, new.info.incarnation) == (True, 2)
            with pytest.raises(LeaseLost, match="attempt 1 is over, attempt 2 has begun"):
                await engine.acquire("swe", "o", attempt=1)


class TestRule7:
    """Fairness: waiters are served by weighted share of their job; ``reserved`` members for verifiers
    cannot be taken by rollouts; above ``max_pending`` an acquire fails at once with
    ``Saturated(retry_after)``."""

    @virtual
    async def test_jobs_are_served_by_their_weights_within_five_percent(self):
        served: Counter[str] = Counter()
        runner = FakeRunner()
        spec = pool(min=4, max=4, weights={"train": 3, "eval": 1})
        async with engine_of(runner, spec) as engine:

            async def rollout(share: str, number: int) -> None:
                while now() < 8:
                    async with await engine.acquire("swe", f"{share}{number}", share=share):
                        served[share] += 1
                        await asyncio.sleep(0.1)

            await asyncio.gather(*(rollout(share, i) for share in ("train", "eval") for i in range(12)))
        assert served["train"] / served.total() == pytest.approx(0.75, abs=0.05)

    @virtual
    async def test_lone_job_has_all_that_is_not_reserved_and_verifiers_find_theirs(self):
        async with engine_of(FakeRunner(), pool(max=4, reserved={"verifier": 1})) as engine:
            rollouts = [await engine.acquire("swe", f"r{i}", share="job", deadline=5) for i in range(3)]
            with pytest.raises(Timeout):
                await engine.acquire("swe", "r3", share="job", deadline=5)
            began = now()
            async with await engine.acquire(
                "swe", rollouts[0].info.owner, key="v", share="verifier", deadline=1
            ):
                assert now() - began < 0.1, "a rollout that holds one gets its verifier without waiting"

    @virtual
    async def test_full_queue_refuses_at_once_and_says_when_to_come_back(self):
        async with engine_of(FakeRunner(), pool(max=1, max_pending=2)) as engine:
            held = await engine.acquire("swe", "a")
            waiting = [asyncio.create_task(engine.acquire("swe", f"w{i}")) for i in range(2)]
            await asyncio.sleep(20)
            began = now()
            with pytest.raises(Saturated) as full:
                await engine.acquire("swe", "b")
            assert now() == began
            assert 1 <= full.value.retry_after <= 60
            await held.release()
            for task in waiting:
                await (await task).release()


class TestRule8:
    """Errors are typed: ``Timeout``, ``Saturated``, ``LeaseLost``, ``StartFailed(reason)``, ``Infra``. A
    non-zero exit code is a result, not an error."""

    @pytest.mark.parametrize(
        "kind", [Timeout, Saturated, LeaseLost, StartFailed, Infra, SpecMismatch, PoolNotFound]
    )
    def test_each_is_one_thing_that_a_caller_does_differently(self, kind):
        assert kind.__mro__[1:3] == (ResourceError, AgentflyError), "none is caught by a handler of another"

    @virtual
    async def test_each_is_raised_with_what_code_needs_to_act(self):
        runner = FakeRunner()
        async with engine_of(runner, pool(max=1, max_pending=1)) as engine:

            async def error_of(owner: str, **options: Any) -> ResourceError:
                with pytest.raises(ResourceError) as raised:
                    await engine.acquire("swe", owner, **options)
                return raised.value

            runner.fail_starts = lambda _: True
            failed = await error_of("a", deadline=2)
            assert isinstance(failed, StartFailed)
            assert failed.reason == "image is broken"
            runner.fail_starts = ()
            await asyncio.sleep(60)
            lease = await engine.acquire("swe", "a", deadline=60)
            assert type(await error_of("b", deadline=2)) is Timeout
            waiting = asyncio.create_task(engine.acquire("swe", "c"))
            await asyncio.sleep(0.1)
            full = await error_of("d")
            assert isinstance(full, Saturated)
            assert full.retry_after >= 1
            runner.kill(lease.info.member_id)
            lost = await error_of("a")
            assert isinstance(lost, LeaseLost)
            assert lost.incarnation == 1
            await (await waiting).release()
        runner.fail_stops = 10**9
        engine = ResourceEngine([runner], [pool(max=1)])
        await engine.acquire("swe", "a")
        with pytest.raises(Infra):
            await engine.close()
