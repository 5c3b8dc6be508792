"""Who may send, and when: random lives of an account, and its guarantees one by one. Time is a number."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentfly.resources.runners.external import account as external_account
from agentfly.resources.runners.external.account import Account, Grant, Refusal, Refused
from agentfly.resources.runners.external.keys import Key
from agentfly.resources.runners.external.limits import Tokens
from agentfly.resources.spec import Budget, CircuitBreaker, ExternalAPISpec

FAR = 1e9
SMALL = Tokens(1, 0)


def account(**fields: object) -> Account:
    made = Account(ExternalAPISpec.model_validate({"base_url": "http://api/v1", **fields}))
    made.keys.know({reference: f"value of {reference}" for reference in made.keys.references})
    return made


def ask(api: Account, now: float = 0.0, *, estimate: Tokens = SMALL, deadline: float = FAR) -> int:
    number = api.ask(estimate)
    api.wait(number, deadline, now)
    return number


def granted(api: Account, now: float = 0.0) -> list[int]:
    actions = api.decide(now)
    assert all(isinstance(action, Grant) for action in actions), actions
    return [action.number for action in actions]


def refused(api: Account, now: float = 0.0) -> dict[int, str]:
    return {action.number: action.error.code for action in api.decide(now) if isinstance(action, Refusal)}


# All of them, in any order of events.


class Life(RuleBasedStateMachine):
    CONCURRENCY, RATE, TOKENS, CALLS, USD = 3, 2.0, 20.0, 40, 200.0

    def __init__(self) -> None:
        super().__init__()
        budget = Budget(calls=self.CALLS, usd=self.USD, usd_per_million_input=1e6)
        self.api = account(
            credentials=("env:A", "env:B"),
            concurrency=self.CONCURRENCY,
            requests_per_second=self.RATE,
            tokens_per_second=self.TOKENS,
            budget=budget,
            circuit_breaker=CircuitBreaker(failures=2, window_s=5, open_s=3),
        )
        self.now = 0.0
        self.waiting: list[int] = []
        self.idle: list[int] = []
        self.flying: dict[int, Key] = {}
        self.estimates: dict[int, Tokens] = {}
        self.cost = 0
        self.largest = 0

    @rule(size=st.integers(0, 30), patience=st.floats(0.1, 30))
    def ask(self, size: int, patience: float) -> None:
        number = self.api.ask(Tokens(size, 0))
        self.estimates[number] = Tokens(size, 0)
        self.largest = max(self.largest, size)
        self._wait(number, patience)

    @precondition(lambda self: self.idle)
    @rule(data=st.data(), patience=st.floats(0.1, 30))
    def again(self, data: st.DataObject, patience: float) -> None:
        number = data.draw(st.sampled_from(self.idle))
        self.idle.remove(number)
        self._wait(number, patience)

    @rule(seconds=st.floats(0, 4))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self._decide()

    @precondition(lambda self: self.flying)
    @rule(
        data=st.data(),
        reached=st.booleans(),
        ok=st.sampled_from([True, True, False, None]),
        part=st.floats(0, 1),
    )
    def settle(self, data: st.DataObject, reached: bool, ok: bool | None, part: float) -> None:
        number = data.draw(st.sampled_from(sorted(self.flying)))
        del self.flying[number]
        used = Tokens(int(self.estimates[number].input * part), 0) if reached else None
        self.api.settle(number, self.now, used=used, ok=ok)
        self.cost += 0 if used is None else used.input
        self.idle.append(number)
        self._decide()

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), seconds=st.floats(0, 5))
    def limit(self, data: st.DataObject, seconds: float) -> None:
        key = self.flying[data.draw(st.sampled_from(sorted(self.flying)))]
        self.api.keys.limit(key, self.now + seconds)
        self._decide()

    @precondition(lambda self: self.estimates)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.estimates)))
        self.api.leave(number, self.now)
        self._forget(number)
        self._decide()

    @invariant()
    def counts_are_right(self) -> None:
        usage = self.api.usage(self.now)
        assert usage.in_flight == len(self.flying) <= self.CONCURRENCY
        assert usage.waiting == len(self.waiting)
        assert usage.calls + usage.in_flight <= self.CALLS
        assert usage.input_tokens == self.cost <= self.USD + self.largest

    @invariant()
    def nobody_waits_without_a_cause(self) -> None:
        wake = self.api.wake_at(self.now)
        if self.waiting and not self.flying:
            assert wake is not None
        assert wake is None or wake > self.now

    def _wait(self, number: int, patience: float) -> None:
        self.api.wait(number, self.now + patience, self.now)
        self.waiting.append(number)
        self.waiting.sort()
        self._decide()

    def _decide(self) -> None:
        for action in self.api.decide(self.now):
            assert action.number == self.waiting.pop(0), "in the order in which they first asked"
            if isinstance(action, Grant):
                assert action.key.reference in ("env:A", "env:B")
                self.flying[action.number] = action.key
            else:
                self._forget(action.number)
        assert self.api.decide(self.now) == [], "it settles"

    def _forget(self, number: int) -> None:
        self.flying.pop(number, None)
        self.estimates.pop(number, None)
        for numbers in (self.waiting, self.idle):
            if number in numbers:
                numbers.remove(number)


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLife = Life.TestCase


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 5)), min_size=1, max_size=40))
@settings(deadline=None)
def test_granted_requests_keep_both_rates_in_any_window(asked):
    api = account(requests_per_second=2.0, tokens_per_second=5.0, concurrency=1000)
    now, sent = 0.0, []
    pending = list(asked)
    while pending or api.usage(now).waiting:
        if pending:
            pause, size = pending.pop(0)
            now += pause
            ask(api, now, estimate=Tokens(size, 0))
        else:
            now = api.wake_at(now) or now
        sent += [(now, asked[number - 1][1]) for number in granted(api, now)]
    assert len(sent) == len(asked)
    for first in range(len(sent)):
        for last in range(first, len(sent)):
            span = sent[last][0] - sent[first][0]
            assert last - first + 1 <= 2 + 2.0 * span + 1e-6
            assert sum(size for _, size in sent[first : last + 1]) <= 5 + 5.0 * span + 1e-6


# 1 and 2. Concurrency and order.


def test_place_goes_to_the_first_in_line_and_a_second_try_keeps_its_place():
    api = account(concurrency=1)
    first, second, third = (ask(api) for _ in range(3))
    assert granted(api) == [first]
    api.settle(first, 0.0, used=SMALL, ok=False)
    api.wait(first, FAR, 0.0)
    assert granted(api) == [first], "asked first"
    api.settle(first, 0.0, used=SMALL, ok=True)
    assert granted(api) == [second]
    api.leave(second, 0.0)
    assert granted(api) == [third]


def test_large_request_is_not_overtaken_by_small_ones_for_ever():
    api = account(tokens_per_second=10.0)
    ask(api, estimate=Tokens(10, 0))
    assert granted(api) == [1]
    large = ask(api, estimate=Tokens(500, 0))
    small = ask(api)
    assert granted(api) == []
    assert api.wake_at(0.0) == pytest.approx(1.0)
    assert granted(api, 1.0 + 1e-9) == [large]
    assert granted(api, 2.0) == [], "its debt is paid first"
    api.settle(large, 2.0, used=Tokens(3, 2), ok=True)
    assert granted(api, 2.0) == [small], "and corrected by what it used"


# 3. Keys, breaker and budget admit.


def test_waits_for_the_key_that_comes_back_first():
    api = account(credentials=("env:A", "env:B"))
    ask(api)
    (grant,) = api.decide(0.0)
    assert isinstance(grant, Grant)
    assert grant.key.reference == "env:A"
    api.keys.limit(grant.key, 30.0)
    api.keys.limit(Key("env:B", "value of env:B"), 20.0)
    number = ask(api)
    assert (granted(api), api.wake_at(0.0)) == ([], 20.0)
    (second,) = api.decide(20.0)
    assert second == Grant(number, Key("env:B", "value of env:B"))


def test_one_request_tries_after_an_outage_and_the_others_wait_for_it():
    api = account(circuit_breaker=CircuitBreaker(failures=1, open_s=5))
    failed = ask(api)
    granted(api)
    api.settle(failed, 0.0, used=SMALL, ok=False)
    assert refused(api) == {}
    early = ask(api, 1.0)
    (refusal,) = api.decide(1.0)
    assert isinstance(refusal, Refusal)
    assert (refusal.number, refusal.error.code, refusal.error.retry_after) == (early, "breaker", 4.0)
    trial, other = ask(api, 5.0), ask(api, 5.0)
    assert granted(api, 5.0) == [trial]
    api.settle(trial, 6.0, used=SMALL, ok=True)
    assert granted(api, 6.0) == [other]


def test_those_who_wait_while_it_opens_are_refused():
    api = account(concurrency=1, circuit_breaker=CircuitBreaker(failures=1, open_s=5))
    first, second = ask(api), ask(api)
    granted(api)
    api.settle(first, 0.0, used=None, ok=False)
    assert refused(api) == {second: "breaker"}


def test_last_of_the_budget_waits_for_what_is_in_flight():
    api = account(budget=Budget(calls=1))
    first, second = ask(api), ask(api)
    assert granted(api) == [first]
    api.settle(first, 0.0, used=None, ok=False)
    assert granted(api) == [second], "the first was given back"
    third = ask(api)
    assert granted(api) == []
    api.settle(second, 0.0, used=SMALL, ok=True)
    assert refused(api) == {third: "budget"}


# 4. Refused at once.


def test_what_cannot_be_sent_before_its_deadline_is_refused_and_those_behind_it_are_asked():
    api = account(credentials=("env:A",))
    api.keys.limit(Key("env:A", "value of env:A"), 100.0)
    hasty, patient = ask(api, deadline=50.0), ask(api, deadline=150.0)
    (refusal,) = api.decide(0.0)
    assert isinstance(refusal, Refusal)
    assert (refusal.number, refusal.error.code, refusal.error.retry_after) == (hasty, "limited", 100.0)
    assert granted(api, 100.0) == [patient]


def test_our_own_limit_is_called_so():
    api = account(requests_per_second=1.0)
    assert granted(api) == []
    ask(api)
    granted(api)
    hasty = ask(api, deadline=0.5)
    (refusal,) = api.decide(0.0)
    assert isinstance(refusal, Refusal)
    assert (refusal.number, refusal.error.code, refusal.error.retry_after) == (hasty, "busy", 1.0)
    assert "requestsPerSecond (1.0)" in refusal.error.message


def test_no_key_left_is_told_with_the_references():
    api = account(credentials=("env:A", "file:/k"))
    api.keys.refuse(Key("env:A", "value of env:A"))
    api.keys.refuse(Key("file:/k", "value of file:/k"))
    ask(api)
    (refusal,) = api.decide(0.0)
    assert isinstance(refusal, Refusal)
    assert refusal.error.code == "credentials"
    assert refusal.error.message == "the API takes none of the keys: env:A is refused, file:/k is refused"
    assert (refusal.error.retry_after, len(refusal.error.hints)) == (None, 1)


def test_queue_is_bounded(monkeypatch):
    monkeypatch.setattr(external_account, "WAITING_MAX", 2)
    api = account(concurrency=1)
    for _ in range(2):
        ask(api)
    with pytest.raises(Refused, match="2 requests wait already") as error:
        ask(api)
    assert error.value.code == "busy"


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"concurrency": 1}, "concurrency (1)"),
        ({"budget": Budget(calls=1)}, "may use up the budget"),
        ({"tokens_per_second": 1.0}, "tokensPerSecond (1.0)"),
    ],
)
def test_who_waited_in_vain_is_told_for_what(fields: dict[str, object], what: str):
    api = account(**fields)
    ask(api)
    granted(api)
    late = ask(api, deadline=10.0)
    assert granted(api) == []
    error = api.late(late, 0.0)
    assert error.code == "busy"
    assert "not sent in 10 s" in error.message
    assert what in error.message


# 5 and 6. Given back.


@pytest.mark.parametrize("end", [Account.leave, lambda api, n, now: api.settle(n, now, used=None, ok=None)])
def test_try_that_never_reached_the_api_is_given_back(end: Callable[..., None]):
    api = account(
        concurrency=1,
        requests_per_second=1.0,
        tokens_per_second=1.0,
        budget=Budget(calls=1),
        credentials=("env:A",),
    )
    first = ask(api)
    assert granted(api) == [first]
    end(api, first, 0.0)
    second = ask(api)
    assert granted(api) == [second]
    assert api.usage(0.0).calls == 0


def test_trial_that_leaves_lets_the_next_one_try():
    api = account(circuit_breaker=CircuitBreaker(failures=1, open_s=5))
    ask(api)
    granted(api)
    api.settle(1, 0.0, used=SMALL, ok=False)
    trial, other = ask(api, 5.0), ask(api, 5.0)
    assert granted(api, 5.0) == [trial]
    api.leave(trial, 5.0)
    assert granted(api, 5.0) == [other]


def test_key_that_a_request_cannot_use_is_used_for_others():
    api = account(credentials=("env:A", "env:B"))
    number = api.ask(SMALL)
    first, second = Key("env:A", "value of env:A"), Key("env:B", "value of env:B")
    assert api.skip(number, first)
    assert not api.skip(number, second), "there is no third"
    api.wait(number, FAR, 0.0)
    other = ask(api)
    assert api.decide(0.0) == [Grant(number, second), Grant(other, first)]


def test_usage_says_what_was_done_and_how_it_is():
    api = account(
        credentials=("env:A", "env:B"), budget=Budget(usd=10, usd_per_million_input=1e6), concurrency=1
    )
    first, _ = ask(api), ask(api, 1.0)
    granted(api, 1.0)
    api.settle(first, 3.0, used=Tokens(4, 2), ok=False)
    granted(api, 3.0)
    api.keys.limit(Key("env:A", "value of env:A"), 5.0)
    usage = api.usage(3.0)
    assert (usage.calls, usage.input_tokens, usage.output_tokens, usage.usd) == (1, 4, 2, 4.0)
    assert (usage.failures, usage.waited_s, usage.in_flight, usage.waiting) == (1, 1.0 + 2.0, 1, 0)
    assert (usage.breaker, usage.keys) == ("closed", {"env:A": "limited", "env:B": "ready"})
