"""Sums over shards; the numbers are the module's guarantees."""

from collections import Counter
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.api import RolloutJob, RolloutJobStatus
from agentfly.api.reasons import RolloutJobPhase as Phase
from agentfly.api.rolloutjob import ShardStatus
from agentfly.roles.status import JobSeen, rollout_status
from agentfly.roles.worker import WorkerReport
from agentfly_operator.plan import job_counts
from agentfly_operator.plan.job_counts import OTHER, REASONS_MAX, added, count, indexes, ranges, summed

JOB = RolloutJob.model_validate(
    {
        "metadata": {"name": "job"},
        "spec": {"agent": {"entrypoint": "a.py:a"}, "tasks": {"path": "t"}, "model": {"path": "/m"}},
    }
)
NOW = datetime(2026, 11, 30, tzinfo=UTC)


def stored(sums: WorkerReport, counted: frozenset[int], total: int) -> RolloutJobStatus:
    """The sums as a status keeps them."""
    shards = ShardStatus(
        total=total,
        counted=ranges(counted),
        sampled_tokens=sums.sampled_tokens,
        drift_tokens=sums.drift_tokens,
    )
    return rollout_status(JOB, JobSeen(Phase.Running, report=sums, shards=shards), NOW)


rewards = st.lists(st.integers(-4, 4).map(lambda number: number / 4), max_size=5)


@st.composite
def reports(draw: st.DrawFn) -> WorkerReport:
    drawn = draw(rewards)
    failed = draw(st.dictionaries(st.sampled_from(["Infra", "SandboxLost"]), st.integers(1, 3)))
    masked, tokens = draw(st.integers(0, 3)), draw(st.integers(0, 1000))
    return WorkerReport(
        total=len(drawn) + masked + sum(failed.values()),
        scored=len(drawn),
        masked=masked,
        failed=failed,
        reward_mean=sum(drawn) / len(drawn) if drawn else None,
        reward_min=min(drawn, default=None),
        reward_max=max(drawn, default=None),
        drift_fraction=draw(st.sampled_from([0.0, 0.25, 0.5])) if tokens else None,
        drift_tokens=tokens,
        forks=draw(st.integers(0, 3)),
        sampled_tokens=tokens + masked,
    )


# 1. once each


@given(st.lists(reports(), max_size=6), st.data())
def test_shards_are_added_once_in_any_order_however_often_they_are_seen(
    shards: list[WorkerReport], data: st.DataObject
) -> None:
    status = stored(WorkerReport(total=100), frozenset(), len(shards))
    seen = data.draw(st.lists(st.sets(st.integers(0, 7)), max_size=8))
    for some in [*seen, set(range(len(shards)))]:
        sums, counted = count(status, {index: shards[index] for index in some if index < len(shards)})
        status = stored(sums, counted, len(shards))
    assert counted == frozenset(range(len(shards)))
    total = summed(status)
    assert total.total == 100
    assert total.scored == sum(each.scored for each in shards)
    assert total.masked == sum(each.masked for each in shards)
    assert Counter(total.failed) == sum((Counter(each.failed) for each in shards), Counter())
    assert total.sampled_tokens == sum(each.sampled_tokens for each in shards)


def test_shard_that_is_none_of_the_jobs_is_not_added() -> None:
    status = stored(WorkerReport(total=4), frozenset(), 2)
    assert count(status, {2: WorkerReport(total=2, scored=2)}) == (WorkerReport(total=4), frozenset())


@given(st.sets(st.integers(0, 300)))
def test_ranges_read_back(numbers: set[int]) -> None:
    assert indexes(ranges(numbers)) == numbers


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("", set()), ("0", {0}), ("0-4,7", {0, 1, 2, 3, 4, 7}), ("1,2", {1, 2}), ("x,3-", {3}), ("-2", set())],
)
def test_ranges_as_kubernetes_writes_them(text: str, numbers: set[int]) -> None:
    assert indexes(text) == numbers


# 2. means


@given(st.lists(reports(), max_size=6))
def test_means_are_weighted(shards: list[WorkerReport]) -> None:
    sums = WorkerReport(total=0)
    for each in shards:
        sums = added(sums, each)
    scored, tokens = sum(each.scored for each in shards), sum(each.drift_tokens for each in shards)
    if scored:
        mean = sum((each.reward_mean or 0.0) * each.scored for each in shards) / scored
        assert sums.reward_mean == pytest.approx(mean)
        assert sums.reward_min == min(each.reward_min for each in shards if each.reward_min is not None)
        assert sums.reward_max == max(each.reward_max for each in shards if each.reward_max is not None)
    else:
        assert (sums.reward_mean, sums.reward_min, sums.reward_max) == (None, None, None)
    if tokens:
        drifted = sum((each.drift_fraction or 0.0) * each.drift_tokens for each in shards)
        assert sums.drift_fraction == pytest.approx(drifted / tokens)
    else:
        assert sums.drift_fraction is None
    assert sums.forks == sum(each.forks for each in shards)


def test_mean_is_what_it_would_be_without_shards() -> None:
    parts = [
        WorkerReport(total=1, scored=1, reward_mean=1.0, reward_min=1.0, reward_max=1.0),
        WorkerReport(total=3, scored=3, reward_mean=0.0, reward_min=0.0, reward_max=0.0),
        WorkerReport(total=4, scored=0, masked=4),
    ]
    status = stored(WorkerReport(total=8), frozenset(), 3)
    sums, _ = count(status, dict(enumerate(parts)))
    assert (sums.reward_mean, sums.reward_min, sums.reward_max) == (0.25, 0.0, 1.0)


# 3. it fits


def test_rare_reasons_are_counted_together() -> None:
    sums = WorkerReport(total=0)
    for number in range(60):
        sums = added(sums, WorkerReport(total=1, failed={f"Reason{number:02d}": 1, "Often": 2, "Also": 1}))
    assert len(sums.failed) == REASONS_MAX
    assert sum(sums.failed.values()) == 240
    assert sums.failed["Often"] == 120
    assert sums.failed[OTHER] == 240 - 120 - 60 - 29
    stored(sums, frozenset(), 1)


def test_list_of_shards_that_would_be_too_long_waits_for_its_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_counts, "RANGES_MAX", 12)
    one, total = WorkerReport(total=1, scored=1), 40
    finished = {index: one for index in range(0, total, 2)}
    status = stored(WorkerReport(total=total), frozenset(), total)
    sums, counted = count(status, finished)
    assert 0 < len(counted) < len(finished)
    assert sums.scored == len(counted)
    finished |= {index: one for index in range(1, total, 2)}
    sums, counted = count(stored(sums, counted, total), finished)
    assert (sums.scored, counted) == (total, frozenset(range(total)))
