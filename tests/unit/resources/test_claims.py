"""Section numbers are the guarantees of claims.py."""

import asyncio

import pytest

from agentfly.resources.claims import LOST_MEMORY_S, Ask, Claim, Claims
from agentfly.resources.errors import Infra, LeaseLost, SpecMismatch
from agentfly.resources.lease import LeaseInfo
from agentfly.resources.pool import Pool
from agentfly.resources.report import late
from agentfly.resources.spec import ContainerSpec, PoolSpec
from tests.unit.resources.harness import virtual


def pool(name: str = "a", pids: int = 64) -> Pool:
    return Pool(PoolSpec(name=name, resource=ContainerSpec(pids=pids)))


def open_claim(claims: Claims, ask: Ask, owner: str = "o", attempt: int = 0) -> Claim:
    return claims.open(ask, owner, attempt, now=0.0, turn=0)


def info_of(claim: Claim) -> LeaseInfo:
    return LeaseInfo(
        lease_id=claim.lease_id,
        pool=claim.pool.spec.name,
        owner=claim.owner,
        key=claim.ask.key,
        member_id="m",
        incarnation=3,
        kind="container",
        address="unix:///m",
        token=claim.token,
        ttl_s=30,
    )


# 1. Names.


def test_default_key_is_one_claim_in_each_pool():
    claims, a, b = Claims(), pool("a"), pool("b")
    claim = open_claim(claims, Ask(a, "default"), "o", 0)
    assert claims.find("o", Ask(a, "default")) is claim
    assert claims.find("o", Ask(b, "default")) is None
    assert claims.find("p", Ask(a, "default")) is None


def test_named_key_is_one_claim_over_all_pools():
    claims, a, b = Claims(), pool("a"), pool("b", pids=9)
    claim = open_claim(claims, Ask(a, "box"), "o", 0)
    assert claims.find("o", Ask(b, "box")) is claim
    with pytest.raises(SpecMismatch) as mismatch:
        claim.check(Ask(b, "box"), 0)
    assert mismatch.value.hints == ("use another key for the other resource, or leave the key out",)


def test_claim_is_found_by_lease_and_by_ticket_until_it_ends():
    claims, a = Claims(), pool()
    claim = open_claim(claims, Ask(a, "default"), "o", 0)
    assert claims.of_lease(claim.lease_id) is claims.of_ticket(a, claim.ticket) is claim
    assert list(claims) == [claim]
    assert (claims.end(claim), claims.end(claim)) == (True, False)
    assert (claims.of_lease(claim.lease_id), claims.of_ticket(a, claim.ticket)) == (None, None)
    assert claims.find("o", Ask(a, "default")) is None


def test_leases_and_tokens_are_not_guessable_and_differ():
    claims, a = Claims(), pool()
    opened = [open_claim(claims, Ask(a, "default"), f"o{i}", 0) for i in range(50)]
    assert len({claim.lease_id for claim in opened} | {claim.token for claim in opened}) == 100
    assert all(len(claim.token) == 32 for claim in opened)


def test_end_of_an_old_claim_leaves_the_new_one_of_that_name():
    claims, a = Claims(), pool()
    old = open_claim(claims, Ask(a, "default"), "o", 0)
    claims.end(old)
    new = open_claim(claims, Ask(a, "default"), "o", 1)
    claims.end(old)
    assert claims.find("o", Ask(a, "default")) is new


# 2. One answer for all; a claim lives while somebody is there for it.


@virtual
async def test_all_who_enter_get_the_same_answer():
    claim = open_claim(Claims(), Ask(pool()))
    entries = [claim.enter() for _ in range(3)]
    claim.serve()
    assert not entries[0].future.done(), "there is nothing to serve yet"
    claim.info = info_of(claim)
    claim.serve()
    claim.serve()
    claim.fail(Infra("too late"))
    assert [await entry.future for entry in entries] == [claim.info] * 3


@virtual
async def test_all_who_enter_get_the_same_error_and_nobody_is_served_after_it():
    claim = open_claim(Claims(), Ask(pool()))
    entries = [claim.enter() for _ in range(2)]
    error = Infra("gone")
    claim.fail(error)
    claim.info = info_of(claim)
    claim.serve()
    assert [entry.future.exception() for entry in entries] == [error, error]


@virtual
async def test_last_to_leave_an_undelivered_claim_must_end_it():
    claim = open_claim(Claims(), Ask(pool()))
    one, two = claim.enter(), claim.enter()
    assert one.leave() is False
    assert two.leave() is True


@virtual
async def test_delivered_claim_outlives_all_who_leave():
    claim = open_claim(Claims(), Ask(pool()))
    entry = claim.enter()
    claim.delivered = True
    assert entry.leave() is False


@virtual
async def test_error_that_meets_somebody_who_left_is_not_reported_as_lost():
    claim = open_claim(Claims(), Ask(pool()))
    one, two = claim.enter(), claim.enter()
    one.future.cancel()
    claim.fail(Infra("gone"))
    assert (one.leave(), two.leave()) == (False, True)
    await asyncio.sleep(0)


# 3. Lost claims.


def test_lost_claim_says_so_to_its_owner_with_the_incarnation():
    claims, a = Claims(), pool()
    claim = open_claim(claims, Ask(a, "default"), "o", 2)
    claim.incarnation = 3
    claims.lose(claim, "no heartbeat for 30 s", 100)
    assert not claim.live
    with pytest.raises(LeaseLost) as lost:
        claim.check(Ask(a), 2)
    assert lost.value.incarnation == 3
    assert lost.value.message == "lease of pool a, owner o, key default: lost: no heartbeat for 30 s"


def test_lost_claims_are_forgotten_after_a_time():
    claims, a = Claims(), pool()
    first, second = (open_claim(claims, Ask(a), owner) for owner in "xy")
    claims.lose(first, "gone", 100)
    claims.lose(second, "gone", 100 + LOST_MEMORY_S - 1)
    assert list(claims) == [first, second]
    claims.lose(second, "gone", 100 + LOST_MEMORY_S)
    assert list(claims) == [second]


def test_earlier_attempt_is_refused():
    claim = open_claim(Claims(), Ask(pool()), attempt=2)
    with pytest.raises(LeaseLost, match="owner o: attempt 1 is over, attempt 2 has begun"):
        claim.check(claim.ask, 1)
    claim.check(claim.ask, 2)


# 4. Costs.


def test_losing_and_ending_look_at_no_other_claim(monkeypatch):
    claims, a = Claims(), pool()
    many = [open_claim(claims, Ask(a), f"o{number}") for number in range(9)]
    monkeypatch.setattr(Claims, "__iter__", lambda self: pytest.fail("it looked at all of them"))
    for now, claim in enumerate(many):
        claims.lose(claim, "gone", now)
    assert [claims.end(claim) for claim in [*many[4:], *many[3:5]]] == [*[True] * 6, False]


# What those who wait too long are told (report.py).


def test_deadline_tells_the_numbers_of_the_pool():
    claims, a = Claims(), pool()
    for owner in ("x", "y", "z"):
        last = open_claim(claims, Ask(a, "default"), owner, 0)
    a.decide(0)
    error = late(last, 600)
    assert error.render() == (
        "pool a: gave no member in 600 s: 0 of 1 leased, 1 starting, 2 waiters ahead\n"
        "  hint: raise max (1) or the deadline, or lower the concurrency"
    )
