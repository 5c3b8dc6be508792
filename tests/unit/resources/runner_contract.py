"""What every runner must keep, as tests that any of them can be put through.

Inherit ``RunnerContract`` and give it two fixtures::

    class TestBubblewrap(RunnerContract):
        @pytest.fixture
        async def runner(self): ...        # a runner that works here

        @pytest.fixture
        def spec(self): ...                # a small spec of its kind

and say how to see, from outside, what the runner has left behind::

        def left(self, runner) -> set[str]: ...     # processes, directories, containers; empty after a stop

``exclusive`` is False for a kind that many hold at once; ``start_s`` bounds one start, in seconds.
"""

import asyncio
from typing import Any

import pytest

from agentfly.resources.errors import Infra, LeaseLost
from agentfly.resources.runners.base import Member, Runner
from agentfly.resources.spec import ResourceSpec

TTL = 30.0


class RunnerContract:
    exclusive = True
    start_s = 30.0

    def left(self, runner: Any) -> set[str]:
        """What of the runner's members exists on this machine."""
        raise NotImplementedError

    async def started(self, runner: Runner, spec: ResourceSpec, name: str = "contract-0c0c-1") -> Member:
        return await asyncio.wait_for(runner.start(spec, name), self.start_s)

    def test_serves_the_kind_of_its_specs_and_works_here(self, runner, spec):
        assert runner.name == spec.runner
        assert runner.check() is None

    async def test_started_member_answers_and_says_what_it_is(self, runner, spec):
        member = await self.started(runner, spec)
        try:
            assert (member.id, member.spec) == ("contract-0c0c-1", spec)
            assert member.incarnation >= 1
            assert member.address.startswith(("unix://", "http://"))
            assert (await runner.probe(member)).alive
            assert self.left(runner)
        finally:
            await runner.stop(member)

    async def test_two_members_live_side_by_side(self, runner, spec):
        one, two = await asyncio.gather(
            self.started(runner, spec, "contract-0c0c-1"), self.started(runner, spec, "contract-0c0c-2")
        )
        try:
            assert one.address != two.address
            await runner.stop(one)
            assert (await runner.probe(two)).alive
        finally:
            await runner.stop(one)
            await runner.stop(two)
        assert self.left(runner) == set()

    async def test_stop_leaves_nothing_and_may_be_repeated(self, runner, spec):
        member = await self.started(runner, spec)
        await runner.stop(member)
        assert self.left(runner) == set()
        assert not (await runner.probe(member)).alive
        await runner.stop(member)

    @pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
    async def test_start_cancelled_at_any_time_leaves_nothing(self, runner, spec, share):
        loop = asyncio.get_running_loop()
        began = loop.time()
        await runner.stop(await self.started(runner, spec, "contract-0c0c-0"))
        usual = loop.time() - began
        start = asyncio.create_task(runner.start(spec, "contract-0c0c-1"))
        await asyncio.sleep(usual * share)
        start.cancel()
        result = (await asyncio.gather(start, return_exceptions=True))[0]
        if isinstance(result, Member):
            await runner.stop(result)  # it was through before the cancel came
        else:
            assert isinstance(result, asyncio.CancelledError)
        assert self.left(runner) == set()

    async def test_name_can_be_used_again_after_a_stop(self, runner, spec):
        for _ in range(2):
            await runner.stop(await self.started(runner, spec))
        assert self.left(runner) == set()

    async def test_lease_is_granted_and_renewed(self, runner, spec):
        member = await self.started(runner, spec)
        try:
            for _ in range(3):
                await runner.lease(member, "owner", 0, "token", TTL)
            assert (await runner.probe(member)).alive
        finally:
            await runner.stop(member)

    async def test_leased_member_refuses_another_owner(self, runner, spec):
        if not self.exclusive:
            pytest.skip("a shared kind has many holders")
        member = await self.started(runner, spec)
        try:
            await runner.lease(member, "owner", 0, "token", TTL)
            with pytest.raises(LeaseLost):
                await runner.lease(member, "other", 0, "other token", TTL)
        finally:
            await runner.stop(member)

    async def test_reset_member_is_a_new_incarnation_that_can_be_leased(self, runner, spec):
        member = await self.started(runner, spec)
        try:
            await runner.lease(member, "owner", 0, "token", TTL)
            before = member.incarnation
            again = await runner.reset(member)
            assert again is not None, "nothing was done in it: it must be found pristine"
            if self.exclusive:
                assert again.incarnation > before
            assert (await runner.probe(again)).alive
            await runner.lease(again, "other", 0, "other token", TTL)
            member = again
        finally:
            await runner.stop(member)
        assert self.left(runner) == set()

    async def test_stopped_member_takes_no_lease_and_is_not_reset(self, runner, spec):
        member = await self.started(runner, spec)
        await runner.stop(member)
        with pytest.raises((Infra, LeaseLost), match=member.id):
            await runner.lease(member, "owner", 0, "token", TTL)
        assert await runner.reset(member) is None

    async def test_reset_cancelled_half_way_can_be_stopped(self, runner, spec):
        member = await self.started(runner, spec)
        await runner.lease(member, "owner", 0, "token", TTL)
        reset = asyncio.create_task(runner.reset(member))
        await asyncio.sleep(0.002)
        reset.cancel()
        await asyncio.gather(reset, return_exceptions=True)
        await runner.stop(member)
        assert self.left(runner) == set()
