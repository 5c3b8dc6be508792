"""Section numbers are the guarantees of lease.py. The other side is a recorder with virtual time."""

import asyncio
from collections.abc import Sequence

import pytest

from agentfly.resources.errors import Infra, LeaseLost, ResourceError
from agentfly.resources.lease import Holdings, Lease, LeaseInfo
from tests.unit.resources.harness import virtual


class Recorder:
    """The part of ``Resources`` that handles use."""

    def __init__(self) -> None:
        self.beats: list[tuple[float, list[str]]] = []
        self.released: list[tuple[str, bool]] = []
        self.lost: set[str] = set()
        self.down = False
        self.defect: Exception | None = None
        self.answer_s = 0.0
        self.holdings = Holdings(self)  # type: ignore[arg-type]

    def hold(self, lease_id: str = "l1", ttl: float = 30.0, kind: str = "container") -> Lease:
        return self.holdings.hold(
            LeaseInfo(
                lease_id=lease_id,
                pool="swe",
                owner="o",
                key="default",
                member_id="m1",
                incarnation=4,
                kind=kind,
                address="http://127.0.0.1:9",
                token="secret",
                ttl_s=ttl,
            )
        )

    async def heartbeat(self, lease_ids: Sequence[str]) -> dict[str, bool]:
        self.beats.append((asyncio.get_running_loop().time(), sorted(lease_ids)))
        await asyncio.sleep(self.answer_s)
        if self.defect is not None:
            raise self.defect
        if self.down:
            raise Infra("broker: gone")
        return {lease_id: lease_id not in self.lost for lease_id in lease_ids}

    async def release(self, lease_id: str, *, dirty: bool = False) -> None:
        self.released.append((lease_id, dirty))
        if self.down:
            raise Infra("broker: gone")

    async def reset(self, lease_id: str) -> LeaseInfo:
        return self.hold(lease_id).info.model_copy(update={"incarnation": 5, "token": "other"})


# 1. Renewal every third of the TTL, all in one call.


@virtual
async def test_leases_are_renewed_every_third_of_their_ttl():
    side = Recorder()
    lease = side.hold()
    await asyncio.sleep(35)
    assert side.beats == [(10, ["l1"]), (20, ["l1"]), (30, ["l1"])]
    await lease.release()


@virtual
async def test_all_leases_are_renewed_in_one_call_at_the_pace_of_the_shortest():
    side = Recorder()
    one = side.hold("l1", ttl=30)
    await asyncio.sleep(5)
    two = side.hold("l2", ttl=6)
    await asyncio.sleep(3.9)
    assert side.beats == [(5, ["l1", "l2"]), (7, ["l1", "l2"])]
    await two.release()
    await one.release()


@virtual
async def test_defect_of_one_call_does_not_end_the_others():
    side = Recorder()
    lease = side.hold()
    side.defect = KeyError("m1")
    await asyncio.sleep(15)
    side.defect = None
    await asyncio.sleep(60)
    assert (len(side.beats), lease.lost) == (7, False)
    await lease.release()


# 2. Renewals end with the release.


@virtual
async def test_nothing_runs_when_nothing_is_held():
    side = Recorder()
    lease = side.hold()
    await asyncio.sleep(15)
    await lease.release()
    await asyncio.sleep(100)
    assert len(side.beats) == 1
    again = side.hold("l2")
    await asyncio.sleep(15)
    assert side.beats[-1] == (125, ["l2"])
    await again.release()


@virtual
async def test_closing_ends_the_renewals():
    side = Recorder()
    lease = side.hold()
    assert side.holdings.held() == [lease]
    await side.holdings.close()
    assert (side.holdings.held(), lease.lost) == ([], True)


@virtual
async def test_the_same_lease_has_one_handle():
    side = Recorder()
    lease = side.hold()
    assert side.hold() is lease
    await lease.release()
    assert side.hold() is not lease
    await side.holdings.close()


# 3. Lost leases.


@virtual
async def test_lease_that_is_called_lost_is_marked_and_not_renewed():
    side = Recorder()
    lease, other = side.hold("l1"), side.hold("l2")
    side.lost.add("l1")
    await asyncio.sleep(25)
    assert (lease.lost, other.lost) == (True, False)
    assert side.beats[-1] == (20, ["l2"])
    for use in (lambda: lease.sandbox, lambda: lease.base_url):
        with pytest.raises(ResourceError):
            use()
    with pytest.raises(LeaseLost) as lost:
        _ = lease.sandbox
    assert lost.value.incarnation == 4
    await lease.release()
    await other.release()


@virtual
async def test_lease_that_cannot_be_renewed_for_its_ttl_is_lost():
    side = Recorder()
    lease = side.hold()
    await asyncio.sleep(15)
    side.down = True
    await asyncio.sleep(20)
    assert not lease.lost, "renewed at 10 s: it has until 40 s"
    await asyncio.sleep(10)
    assert lease.lost
    await lease.release()


@virtual
async def test_one_failed_renewal_is_no_loss():
    side = Recorder()
    lease = side.hold()
    side.down = True
    await asyncio.sleep(15)
    side.down = False
    await asyncio.sleep(100)
    assert not lease.lost
    await lease.release()


@virtual
async def test_slow_answer_that_calls_a_lease_alive_is_no_loss():
    side = Recorder()
    lease = side.hold(ttl=9)
    side.answer_s = 10
    await asyncio.sleep(30)
    assert not lease.lost
    side.lost.add("l1")
    await asyncio.sleep(12)
    assert lease.lost
    await lease.release()


@virtual
async def test_lease_that_expires_while_a_renewal_fails_slowly_is_lost():
    side = Recorder()
    lease = side.hold(ttl=9)
    side.answer_s, side.down = 10, True
    await asyncio.sleep(12.9)
    assert not lease.lost, "the renewal that began at 3 s may still be answered"
    await asyncio.sleep(0.2)
    assert lease.lost, "nothing renewed it since 0 s"
    await lease.release()


@virtual
async def test_handle_of_a_released_lease_opens_nothing():
    side = Recorder()
    lease = side.hold()
    await lease.release()
    with pytest.raises(LeaseLost, match="is over"):
        _ = lease.sandbox


# 4. Releasing.


@virtual
async def test_leaving_the_block_releases():
    side = Recorder()
    with pytest.raises(RuntimeError, match="boom"):
        async with side.hold():
            raise RuntimeError("boom")
    assert side.released == [("l1", False)]


@virtual
async def test_release_says_whether_the_member_is_dirty():
    side = Recorder()
    lease = side.hold()
    await lease.release(dirty=True)
    await lease.release()
    assert side.released == [("l1", True), ("l1", False)]


@virtual
async def test_release_does_not_raise_when_the_other_side_is_gone():
    side = Recorder()
    lease = side.hold()
    side.down = True
    await lease.release()


# The handle.


@virtual
async def test_handle_serves_its_own_kind_only():
    side = Recorder()
    box, judge = side.hold("l1"), side.hold("l2", kind="model-service")
    assert judge.base_url == "http://127.0.0.1:9"
    with pytest.raises(ResourceError, match="lease of pool swe: is of type container, not model-service"):
        _ = box.base_url
    with pytest.raises(ResourceError, match="is of type model-service, not container"):
        _ = judge.sandbox
    await side.holdings.close()


@virtual
async def test_reset_gives_the_handle_its_new_lease():
    side = Recorder()
    lease = side.hold()
    await lease.reset()
    assert (lease.info.incarnation, lease.info.token) == (5, "other")
    await side.holdings.close()
