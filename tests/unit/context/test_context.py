"""What one rollout may acquire, and that it gives everything back."""

import asyncio
import logging
import time

import pytest

from agentfly.context import Context, ContextClosed, Deadlines
from agentfly.errors import AgentflyError
from agentfly.resources.errors import Infra, StartFailed
from agentfly.resources.lease import Lease, Request
from agentfly.resources.spec import ContainerSpec
from tests.unit.rollout.toys import FakeResources

FIRST = Deadlines()


def make(resources: FakeResources | None = None) -> tuple[Context, FakeResources]:
    resources = resources or FakeResources()
    return Context("r", {"id": 7}, resources), resources


# 1. same pool and key: same lease


async def test_second_acquire_gives_the_same_lease() -> None:
    ctx, resources = make()
    first = await ctx.acquire("shell")
    assert await ctx.acquire("shell") is first
    assert resources.acquired() == ["shell default rollout"]
    await ctx.close()


async def test_acquires_at_the_same_time_become_one() -> None:
    ctx, resources = make()
    leases = await asyncio.gather(*(ctx.acquire("shell") for _ in range(20)))
    assert len({id(lease) for lease in leases}) == 1
    assert len(resources.acquired()) == 1
    await ctx.close()


async def test_other_key_is_another_lease() -> None:
    ctx, resources = make()
    first = await ctx.acquire("shell")
    assert await ctx.acquire("shell", key="judge", scope="global") is not first
    assert resources.acquired()[1:] == ["shell judge global"]
    await ctx.close()


async def test_one_cancelled_waiter_does_not_cancel_the_others() -> None:
    ctx, resources = make()
    resources.gate = asyncio.Event()
    impatient = asyncio.create_task(ctx.acquire("shell"))
    patient = asyncio.create_task(ctx.acquire("shell"))
    await asyncio.sleep(0.001)
    impatient.cancel()
    await asyncio.sleep(0.001)
    resources.gate.set()
    assert isinstance(await patient, Lease)
    assert impatient.cancelled()
    await ctx.close()
    assert resources.held == {}


async def test_failed_acquire_may_be_tried_again() -> None:
    error = StartFailed("no image", reason="no image")
    ctx, _ = make(FakeResources(error))
    with pytest.raises(StartFailed):
        await ctx.acquire("shell")
    assert ctx.acquire_error is error
    assert isinstance(await ctx.acquire("shell"), Lease)
    await ctx.close()


async def test_all_waiters_get_the_error_of_a_failed_acquire() -> None:
    ctx, _ = make(FakeResources(Infra("gone")))
    results = await asyncio.gather(ctx.acquire("shell"), ctx.acquire("shell"), return_exceptions=True)
    assert [str(result) for result in results] == ["gone", "gone"]


async def test_share_and_image_are_passed_on() -> None:
    ctx, resources = make()
    await ctx.acquire("shell", share="verifier", image="task-7")
    await ctx.acquire_many([Request("judge", share="verifier"), Request("shell", "k", image="task-8")])
    assert resources.acquired() == [
        "shell default rollout verifier task-7",
        "judge default rollout verifier",
        "shell k rollout task-8",
    ]
    await ctx.close()


# 2. two pools, specs or images under the default key are two resources


async def test_two_images_of_a_pool_under_the_default_key_are_two_resources() -> None:
    ctx, _ = make()
    one, two = await ctx.acquire("shell", image="a"), await ctx.acquire("shell", image="b")
    assert one is not two
    assert await ctx.acquire("shell", image="a") is one
    await ctx.close()


async def test_two_pools_under_the_default_key_are_two_resources() -> None:
    ctx, resources = make()
    assert await ctx.acquire("shell") is not await ctx.acquire("judge")
    assert resources.acquired() == ["shell default rollout", "judge default rollout"]
    await ctx.close()


async def test_specs_that_differ_in_anything_are_two_resources() -> None:
    ctx, resources = make()
    one = await ctx.acquire(ContainerSpec(image="host"))
    two = await ctx.acquire(ContainerSpec(image="host", env={"A": "1"}))
    assert one is not two
    assert await ctx.acquire(ContainerSpec(image="host")) is one
    assert len(resources.acquired()) == 2
    await ctx.close()


async def test_chosen_key_is_passed_on_as_it_is() -> None:
    ctx, resources = make()
    await ctx.acquire("shell", key="mine")
    await ctx.acquire("judge", key="mine")
    assert [what.split()[1] for what in resources.acquired()] == ["mine", "mine"]
    await ctx.close()


# 3. close releases everything


async def test_close_releases_every_lease() -> None:
    ctx, resources = make()
    for pool in ("a", "b", "c"):
        await ctx.acquire(pool)
    await ctx.close()
    assert resources.held == {}
    await ctx.close()


async def test_close_releases_the_rest_when_one_release_fails(caplog: pytest.LogCaptureFixture) -> None:
    ctx, resources = make()
    leases = [await ctx.acquire(pool) for pool in ("a", "b", "c")]
    resources.sticky = {leases[1].info.lease_id}
    with caplog.at_level(logging.WARNING):
        await ctx.close()
    assert f"{leases[1].info.lease_id}: not released, its TTL will" in caplog.text
    released = {what for verb, what in resources.log if verb == "release"}
    assert released == {lease.info.lease_id for lease in leases}
    # The net: one more request for whatever the owner still holds.
    assert ("release_owner", ctx.owner) in resources.log
    assert resources.held == {}


async def test_close_withdraws_a_pending_acquire() -> None:
    ctx, resources = make()
    await ctx.acquire("a")
    resources.gate = asyncio.Event()
    waiter = asyncio.create_task(ctx.acquire("b"))
    await asyncio.sleep(0.001)
    assert ctx.waiting_for == ("b",)
    await ctx.close()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert resources.held == {}
    assert ("release_owner", ctx.owner) in resources.log


async def test_close_goes_on_however_often_it_is_cancelled() -> None:
    class Slow(FakeResources):
        async def release(self, lease_id: str, *, dirty: bool = False) -> None:
            await asyncio.sleep(0.02)
            await super().release(lease_id, dirty=dirty)

    ctx, resources = make(Slow())
    await ctx.acquire("a")
    await ctx.acquire("b")
    closing = asyncio.create_task(ctx.close())
    for _ in range(3):
        await asyncio.sleep(0.001)
        closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert resources.held == {}


async def test_close_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(FakeResources):
        async def release(self, lease_id: str, *, dirty: bool = False) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr("agentfly.context.context.RELEASE_SECONDS", 0.02)
    ctx, resources = make(Silent())
    await ctx.acquire("a")
    began = time.monotonic()
    await ctx.close()
    assert time.monotonic() - began < 1
    assert resources.held == {}


async def test_leaving_the_block_closes_it() -> None:
    resources = FakeResources()

    async def leave() -> None:
        async with Context("r", {}, resources) as ctx:
            await ctx.acquire("a")
            raise ValueError("oh")

    with pytest.raises(ValueError, match="oh"):
        await leave()
    assert resources.held == {}


async def test_nothing_can_be_acquired_after_the_end() -> None:
    ctx, _ = make()
    await ctx.close()
    with pytest.raises(ContextClosed, match="rollout r: is over"):
        await ctx.acquire("shell")


# 4. waiting does not count against a limit


async def test_limit_stands_still_while_a_resource_is_awaited() -> None:
    ctx, resources = make()
    resources.gate = asyncio.Event()
    asyncio.get_running_loop().call_later(0.12, resources.gate.set)
    async with ctx.limit(0.05), ctx.limit(0.05):
        await ctx.acquire("shell")
    await ctx.close()


async def test_limit_goes_on_after_the_wait() -> None:
    ctx, _ = make()
    limits = []

    async def acquire_and_hang() -> None:
        async with ctx.limit(0.03) as limit:
            limits.append(limit)
            await ctx.acquire("shell")
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await acquire_and_hang()
    assert limits[0].expired()
    await ctx.close()


async def test_limit_stands_still_until_the_last_wait_is_over() -> None:
    ctx, resources = make()
    resources.gate = asyncio.Event()
    asyncio.get_running_loop().call_later(0.12, resources.gate.set)
    async with ctx.limit(0.05):
        cancelled = asyncio.create_task(ctx.acquire("a"))
        waiting = asyncio.create_task(ctx.acquire("b"))
        await asyncio.sleep(0.001)
        cancelled.cancel()
        await waiting
    await ctx.close()


async def test_limit_that_began_during_another_wait_stands_still_in_its_own() -> None:
    ctx, resources = make()
    resources.gate = asyncio.Event()
    asyncio.get_running_loop().call_later(0.12, resources.gate.set)
    background = asyncio.create_task(ctx.acquire("a"))
    await asyncio.sleep(0.001)
    async with ctx.limit(0.05):
        await ctx.acquire("b")
    await background
    await ctx.close()


async def test_limit_without_a_wait_is_a_plain_timeout() -> None:
    ctx, _ = make()
    with pytest.raises(TimeoutError):
        async with ctx.limit(0.01):
            await asyncio.Event().wait()


# 5. what was used is recorded


async def test_uses_are_recorded_with_their_wait() -> None:
    ctx, resources = make()
    resources.gate = asyncio.Event()
    asyncio.get_running_loop().call_later(0.03, resources.gate.set)
    lease = await ctx.acquire("shell")
    await ctx.acquire("shell")
    await ctx.close()
    assert [(use.pool, use.member_id, use.incarnation) for use in ctx.uses] == [
        ("shell", lease.info.member_id, lease.info.incarnation)
    ]
    assert 0.02 < ctx.uses[0].wait_seconds < 5


# 6. no two contexts share an owner


async def test_owners_are_unique_and_tell_the_rollout() -> None:
    owners = {make()[0].owner for _ in range(50)}
    assert len(owners) == 50
    assert all(owner.startswith("r.0.") for owner in owners)


# 7. all or nothing


def together(resources: FakeResources) -> list[str]:
    return [what for verb, what in resources.log if verb == "acquire_many"]


async def test_many_are_acquired_by_one_request_in_their_order() -> None:
    ctx, resources = make()
    wanted = ["shell", "judge", Request("shell", key="second", scope="global")]
    leases = await ctx.acquire_many(wanted)
    assert [(lease.info.pool, lease.info.key) for lease in leases] == [
        ("shell", "default"), ("judge", "default"), ("shell", "second")
    ]  # fmt: skip
    assert together(resources) == ["shell judge shell"]
    assert resources.acquired()[2] == "shell second global"
    assert [use.member_id for use in ctx.uses] == [lease.info.member_id for lease in leases]
    assert await ctx.acquire("judge") is leases[1]
    assert await ctx.acquire_many(wanted) == leases
    assert len(resources.acquired()) == 3
    await ctx.close()
    assert resources.held == {}


async def test_what_the_rollout_has_is_not_acquired_again() -> None:
    ctx, resources = make()
    shell = await ctx.acquire("shell")
    spec = ContainerSpec(image="host")
    leases = await ctx.acquire_many(["judge", "shell", spec, "judge"])
    assert leases[1] is shell
    assert leases[0] is leases[3]
    assert (await ctx.acquire(spec), len(resources.acquired())) == (leases[2], 3)
    assert together(resources) == [f"judge {spec}"]
    assert await ctx.acquire_many([]) == []
    await ctx.close()


async def test_failure_of_one_leaves_nothing_and_can_be_tried_again() -> None:
    error = StartFailed("pool judge: no")
    ctx, resources = make(FakeResources())
    shell = await ctx.acquire("shell")
    resources.failures = [error]
    with pytest.raises(StartFailed) as caught:
        await ctx.acquire_many(["shell", "judge", "search"])
    assert caught.value is ctx.acquire_error is error
    assert (ctx.waiting_for, len(ctx.uses)) == ((), 1)
    leases = await ctx.acquire_many(["shell", "judge", "search"])
    assert leases[0] is shell
    assert together(resources) == ["judge search"] * 2
    await ctx.close()
    assert resources.held == {}


async def test_close_withdraws_many_that_are_pending() -> None:
    ctx, resources = make()
    resources.gate = asyncio.Event()
    waiter = asyncio.create_task(ctx.acquire_many(["a", "b"]))
    await asyncio.sleep(0.001)
    assert ctx.waiting_for == ("a", "b")
    await ctx.close()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert (resources.held, ctx.uses) == ({}, [])
    with pytest.raises(ContextClosed):
        await ctx.acquire_many(["a"])


async def test_caller_that_is_cut_off_leaves_the_request_for_the_next_one() -> None:
    ctx, resources = make()
    resources.gate = asyncio.Event()
    waiter = asyncio.create_task(ctx.acquire_many(["a", "b"]))
    await asyncio.sleep(0.001)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    resources.gate.set()
    assert len(await ctx.acquire_many(["b", "a"])) == 2
    assert together(resources) == ["a b"]
    await ctx.close()
    assert resources.held == {}


async def test_limit_stands_still_while_many_are_awaited() -> None:
    ctx, resources = make()
    resources.gate = asyncio.Event()
    asyncio.get_running_loop().call_later(0.12, resources.gate.set)
    async with ctx.limit(0.05):
        await ctx.acquire_many(["a", "b"])
    await ctx.close()


# What tools and rewards see


async def test_task_cannot_be_changed() -> None:
    row = {"id": 7}
    ctx = Context("r", row, FakeResources())
    row["id"] = 8
    assert ctx.task["id"] == 7
    with pytest.raises(TypeError):
        ctx.task["id"] = 9  # type: ignore[index]


async def test_final_response_is_the_last_turn() -> None:
    ctx, _ = make()
    assert ctx.final_response == ""
    ctx.messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "tool", "content": "t"},
    ]
    assert ctx.final_response == "b"


# Deadlines


def test_deadlines_have_the_documented_defaults() -> None:
    assert (FIRST.call, FIRST.turn, FIRST.rollout) == (30.0, 120.0, 600.0)


@pytest.mark.parametrize("name", ["call", "turn", "rollout"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_deadline_that_is_not_positive_is_refused(name: str, value: float) -> None:
    with pytest.raises(AgentflyError, match=f"deadlines.{name}: .* is not a positive number"):
        Deadlines(**{name: value})


def test_deadline_that_can_never_be_reached_is_refused() -> None:
    with pytest.raises(AgentflyError) as error:
        Deadlines(call=200.0)
    assert error.value.message == (
        "deadlines.call: 200.0 s is longer than turn (120.0 s), so it would never be reached"
    )
    assert error.value.hints == ("set turn to 200.0 or more",)
    with pytest.raises(AgentflyError, match=r"deadlines\.turn"):
        Deadlines(turn=700.0)
