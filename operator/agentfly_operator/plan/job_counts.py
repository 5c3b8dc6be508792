"""Counts of a rollout job as sums over its shards, in a status that is all that is remembered of them.

Guarantees:
1. Which shards stand in the sums is written beside them: a shard is added once, in whatever order and however
   often it is seen.
2. Means are weighted by what they are means of.
3. The sums fit into a status: of many reasons the frequent ones are kept, the others counted together; a
   shard that would make the list of shards too long waits until gaps in it are filled.
"""

from collections import Counter
from collections.abc import Collection, Mapping

from agentfly.api import RolloutJobStatus
from agentfly.api.rolloutjob import ShardStatus
from agentfly.roles.worker import WorkerReport

REASONS_MAX = 32
OTHER = "Other"
RANGES_MAX = 32_000  # characters; indexes are handed out in order, so the gaps are no more than pods


def indexes(text: str) -> frozenset[int]:
    """The numbers of ranges as Kubernetes writes them: 0-4,7. What is no number is left out."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def ranges(numbers: Collection[int]) -> str:
    """The text for numbers, which `indexes` reads."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(str(end) for end in part) for part in parts)


def summed(status: RolloutJobStatus) -> WorkerReport:
    """What a status has of all shards that are counted."""
    tasks, reward, shards = status.tasks, status.reward, status.shards or ShardStatus()
    return WorkerReport(
        total=tasks.total if tasks else 0,
        scored=tasks.scored if tasks else 0,
        masked=tasks.masked if tasks else 0,
        failed=dict(status.failures),
        reward_mean=float(reward.mean) if reward else None,
        reward_min=float(reward.min) if reward else None,
        reward_max=float(reward.max) if reward else None,
        drift_fraction=float(status.drift_fraction) if status.drift_fraction is not None else None,
        drift_tokens=shards.drift_tokens,
        forks=status.forks,
        sampled_tokens=shards.sampled_tokens,
    )


def added(sums: WorkerReport, shard: WorkerReport) -> WorkerReport:
    """The sums with one more shard; ``total`` stays, it is that of the whole job."""
    scored, drift_tokens = sums.scored + shard.scored, sums.drift_tokens + shard.drift_tokens
    return WorkerReport(
        total=sums.total,
        scored=scored,
        masked=sums.masked + shard.masked,
        failed=_frequent(Counter(sums.failed) + Counter(shard.failed)),
        reward_mean=_mean((sums.reward_mean, sums.scored), (shard.reward_mean, shard.scored)),
        reward_min=min(_known(sums.reward_min, shard.reward_min), default=None),
        reward_max=max(_known(sums.reward_max, shard.reward_max), default=None),
        drift_fraction=_mean(
            (sums.drift_fraction, sums.drift_tokens), (shard.drift_fraction, shard.drift_tokens)
        ),
        drift_tokens=drift_tokens,
        forks=sums.forks + shard.forks,
        sampled_tokens=sums.sampled_tokens + shard.sampled_tokens,
    )


def count(
    status: RolloutJobStatus, finished: Mapping[int, WorkerReport]
) -> tuple[WorkerReport, frozenset[int]]:
    """The sums of a status with those finished shards that do not stand in it, and all that then do."""
    sums, shards = summed(status), status.shards or ShardStatus()
    counted = indexes(shards.counted)
    new = sorted(index for index in finished.keys() - counted if index < shards.total)
    while new and len(ranges(counted.union(new))) > RANGES_MAX:
        new = new[: len(new) // 2]
    for index in new:
        sums = added(sums, finished[index])
    return sums, counted.union(new)


def outcomes(sums: WorkerReport) -> int:
    """Rollouts that have one."""
    return sums.scored + sums.masked + sum(sums.failed.values())


def _mean(*parts: tuple[float | None, int]) -> float | None:
    known = [(mean, weight) for mean, weight in parts if mean is not None and weight]
    total = sum(weight for _, weight in known)
    return sum(mean * (weight / total) for mean, weight in known) if known else None


def _known(*values: float | None) -> list[float]:
    return [value for value in values if value is not None]


def _frequent(failed: Counter[str]) -> dict[str, int]:
    """By name; beyond so many reasons the rare ones are one."""
    if len(failed) > REASONS_MAX:
        rest = Counter({name: number for name, number in failed.items() if name != OTHER})
        kept = dict(sorted(rest.items(), key=lambda item: (-item[1], item[0]))[: REASONS_MAX - 1])
        failed = Counter({**kept, OTHER: failed.total() - sum(kept.values())})
    return dict(sorted(failed.items()))
