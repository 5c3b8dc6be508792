"""Each limit of an external API by itself, by its guarantees."""

import math
from email.utils import formatdate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.resources.runners.external import limits as external_limits
from agentfly.resources.runners.external.limits import (
    BACKOFF_S,
    RETRY_AFTER_MAX_S,
    Breaker,
    Bucket,
    Spending,
    Tokens,
    backoff,
    retry_after,
)
from agentfly.resources.spec import Budget, CircuitBreaker

SLACK = 1e-6  # of floating point

# 1. Buckets.


@given(
    rate=st.floats(0.1, 1000),
    steps=st.lists(st.tuples(st.floats(0, 3), st.floats(0.1, 3000)), max_size=40),
)
@settings(deadline=None)
def test_rate_in_any_window_is_at_most_burst_and_refill(rate, steps):
    bucket, now, taken = Bucket(rate), 0.0, []
    for pause, amount in steps:
        now = max(now + pause, bucket.ready_at(amount, now + pause))
        bucket.take(amount, now)
        taken.append((now, amount))
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            total = sum(amount for _, amount in taken[first : last + 1])
            above = max(taken[last][1] - bucket.burst, 0)  # of one that no full bucket holds: its debt
            span = taken[last][0] - taken[first][0]
            assert total <= bucket.burst + rate * span + above + SLACK * (1 + total)


@given(rate=st.floats(0.1, 1000), amount=st.floats(0.1, 1e6))
@settings(deadline=None)
def test_any_amount_is_ready_at_last(rate, amount):
    bucket = Bucket(rate)
    bucket.take(amount, 0.0)
    at = bucket.ready_at(amount, 0.0)
    assert 0 <= at < math.inf
    assert bucket.ready_at(amount, at + SLACK) <= at + SLACK


def test_correction_gives_back_and_never_above_the_burst():
    bucket = Bucket(10.0)
    bucket.take(10, 0.0)
    bucket.take(-4, 0.0)
    assert bucket.ready_at(4, 0.0) == 0.0
    bucket.take(-100, 0.0)
    assert bucket.ready_at(10, 0.0) == 0.0
    bucket.take(10, 0.0)
    assert bucket.ready_at(1, 0.0) == pytest.approx(0.1)


def test_no_rate_is_no_limit():
    bucket = Bucket(None)
    bucket.take(1e12, 0.0)
    assert bucket.ready_at(1e12, 0.0) == 0.0


# 2. The breaker.

BREAKER = CircuitBreaker(failures=3, window_s=10, open_s=5)


def broken(*, at: float = 0.0) -> Breaker:
    breaker = Breaker(BREAKER)
    for _ in range(3):
        breaker.end(False, at, trial=breaker.begin())
    return breaker


def test_failures_in_a_row_open_it_for_its_time():
    breaker = broken(at=2.0)
    assert (breaker.open_until(2.0), breaker.state(2.0)) == (7.0, "open")
    assert (breaker.open_until(7.0), breaker.state(7.0)) == (None, "half-open")


def test_success_between_starts_the_count_again():
    breaker = Breaker(BREAKER)
    for ok in (False, False, True, False, False):
        breaker.end(ok, 0.0, trial=breaker.begin())
    assert breaker.state(0.0) == "closed"


def test_what_says_nothing_about_the_api_neither_counts_nor_clears():
    breaker = Breaker(BREAKER)
    for ok in (False, None, False, None, False):
        breaker.end(ok, 0.0, trial=breaker.begin())
    assert breaker.state(0.0) == "open"


def test_failures_beyond_the_window_do_not_count():
    breaker = Breaker(BREAKER)
    for at in (0.0, 6.0, 12.0):
        breaker.end(False, at, trial=breaker.begin())
    assert breaker.state(12.0) == "closed"
    breaker.end(False, 13.0, trial=breaker.begin())
    assert breaker.state(13.0) == "open"


@pytest.mark.parametrize(("ok", "state"), [(True, "closed"), (False, "open"), (None, "half-open")])
def test_end_of_the_trial_decides(ok, state):
    breaker = broken()
    trial = breaker.begin()
    assert (trial, breaker.trying) == (True, True)
    breaker.end(ok, 6.0, trial=trial)
    assert (breaker.state(6.0), breaker.trying) == (state, False)


def test_requests_from_before_it_opened_decide_nothing():
    breaker = Breaker(BREAKER)
    begun = [breaker.begin() for _ in range(5)]
    for trial in begun[:3]:
        breaker.end(False, 0.0, trial=trial)
    breaker.end(True, 1.0, trial=begun[3])
    breaker.end(False, 2.0, trial=begun[4])
    assert breaker.open_until(2.0) == 5.0
    trial = breaker.begin()
    breaker.end(True, 6.0, trial=False)
    assert breaker.trying
    breaker.end(True, 6.0, trial=trial)
    breaker.end(False, 7.0, trial=breaker.begin())
    assert breaker.state(7.0) == "closed", "the failures before are forgotten"


# 3. Money.

PRICES = {"usd_per_million_input": 1e6, "usd_per_million_output": 2e6}  # 1 and 2 dollars a token


@given(
    usd=st.floats(1, 100),
    requests=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.booleans()), max_size=40),
)
@settings(deadline=None)
def test_budget_is_exceeded_by_one_estimate_at_most(usd, requests):
    spending, flying, largest = Spending(Budget(usd=usd, **PRICES)), [], 0.0
    for estimated, part, ends in requests:
        if ends and flying:
            estimate, used = flying.pop(0)
            before = spending.usd
            spending.settle(estimate, used)
            assert spending.usd >= before
        elif not spending.full():
            estimate = Tokens(estimated, 0)
            largest = max(largest, spending.price(estimate))
            spending.reserve(estimate)
            flying.append((estimate, Tokens(min(part, estimated), 0)))
    for estimate, used in flying:
        spending.settle(estimate, used)
    assert spending.usd <= usd + largest + SLACK
    assert spending.full() == (spending.spent() is not None), "nothing in flight: full is spent"


def test_calls_never_exceed_their_budget_and_what_was_not_sent_is_none():
    spending = Spending(Budget(calls=2))
    for _ in range(2):
        assert not spending.full()
        spending.reserve(Tokens())
    assert (spending.full(), spending.spent()) == (True, None)
    spending.settle(Tokens(), None)
    assert not spending.full()
    spending.reserve(Tokens())
    spending.settle(Tokens(), Tokens())
    spending.settle(Tokens(), Tokens())
    assert spending.spent() == "2 of 2 calls"


def test_price_is_that_of_a_million_tokens():
    spending = Spending(Budget(usd=1, usd_per_million_input=3, usd_per_million_output=15))
    assert spending.price(Tokens(2_000_000, 100_000)) == pytest.approx(6 + 1.5)


# 4. Pauses.


@given(tries=st.integers(1, 10_000), chance=st.floats(0, 1))
@settings(deadline=None)
def test_backoff_grows_to_its_longest_and_has_full_jitter(tries, chance):
    first, longest = BACKOFF_S
    assert backoff(tries, 0.0) == 0.0
    assert backoff(tries, 1.0) == min(longest, first * 2 ** min(tries - 1, 50))
    assert backoff(tries, chance) == pytest.approx(chance * backoff(tries, 1.0))


WALL = 1_800_000_000.0


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("7", 7.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("1e300", RETRY_AFTER_MAX_S),
        ("inf", None),
        ("nan", None),
        ("soon", None),
        ("", None),
        (formatdate(WALL + 30, usegmt=True), 30.0),
        (formatdate(WALL - 30, usegmt=True), 0.0),
        ("Thu, 99 Foo 2026 99:99:99 GMT", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(value, seconds):
    assert retry_after(value, None, WALL) == seconds


def test_date_is_measured_by_the_clock_of_the_api():
    ours = WALL + 3600
    assert retry_after(formatdate(WALL + 30, usegmt=True), formatdate(WALL, usegmt=True), ours) == 30.0
    assert retry_after(formatdate(WALL + 30, usegmt=True), "yesterday", WALL) == 30.0


@given(st.text(max_size=40), st.text(max_size=40))
@settings(deadline=None)
def test_any_retry_after_is_read_or_ignored(value, date):
    seconds = retry_after(value, date, WALL)
    assert seconds is None or 0 <= seconds <= external_limits.RETRY_AFTER_MAX_S
