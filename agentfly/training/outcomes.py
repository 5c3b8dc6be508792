"""What the metrics of a step need of each of its rollouts: written by the rollouts, summed by the driver.

Guarantees:
1. Every rollout leaves one record, whatever its outcome; it is written before verl can see the rollout.
2. A rollout without a reward is counted and never enters the mean: nothing that broke is a reward of 0.
"""

import json
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentfly.rollout.outcomes import Scored
from agentfly.rollout.trajectory import Trajectory


def record(step: int, trajectory: Trajectory) -> dict[str, Any]:
    """One rollout as JSON."""
    outcome = trajectory.outcome
    return {
        "step": step,
        "rollout": trajectory.rollout_id,
        "outcome": outcome.type,
        "reason": "" if isinstance(outcome, Scored) else outcome.reason,
        "reward": trajectory.reward,
        "stop": trajectory.stop_reason,
        "turns": trajectory.turns,
        "tool_calls": len(trajectory.tool_calls),
        "sampled_tokens": trajectory.sampled_tokens,
        "tokens": trajectory.drift.tokens,
        "drifted_tokens": trajectory.drift.drifted,
        "forks": trajectory.drift.forks,
        "seconds": trajectory.seconds,
    }


@dataclass
class StepOutcomes:
    """The sum over the rollouts of one step."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    stops: Counter[str] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)
    turns: int = 0
    tool_calls: int = 0
    sampled_tokens: int = 0
    tokens: int = 0
    drifted_tokens: int = 0
    forks: int = 0

    def add(self, entry: dict[str, Any]) -> None:
        """Count one record."""
        self.counts[entry["outcome"]] += 1
        if entry["reason"]:
            self.reasons[entry["reason"]] += 1
        if entry["stop"]:
            self.stops[entry["stop"]] += 1
        if entry["reward"] is not None:
            self.rewards.append(entry["reward"])
        for name in ("turns", "tool_calls", "sampled_tokens", "tokens", "drifted_tokens", "forks"):
            setattr(self, name, getattr(self, name) + entry[name])

    def metrics(self) -> dict[str, Any]:
        """The part of a step's metrics that comes from its rollouts; no reward where none was scored."""
        total = self.counts.total()
        values: dict[str, Any] = {
            "tokens": self.sampled_tokens,
            "rollouts": {name: self.counts[name] for name in ("scored", "masked", "failed")},
            "drift_fraction": self.drifted_tokens / self.tokens if self.tokens else 0.0,
            "forks": self.forks,
            "turns": self.turns / total if total else 0.0,
            "tool_calls": self.tool_calls / total if total else 0.0,
        }
        if self.reasons:
            values["reasons"] = dict(self.reasons)
        if self.stops:
            values["stops"] = dict(self.stops)
        if self.rewards:
            values["reward"] = statistics.fmean(self.rewards)
            values["reward_std"] = statistics.pstdev(self.rewards)
        return values


class LineReader:
    """The complete lines that were added to a file since the last call; the file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Parse the new lines as JSON; a line still being written is left for the next call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as handle:
            handle.seek(self._offset)
            data = handle.read()
        complete = data.rfind(b"\n") + 1
        self._offset += complete
        return [json.loads(line) for line in data[:complete].splitlines()]


class OutcomeReader:
    """Sums the records of all workers of one attempt, and of those before it where rollouts run ahead.

    Args:
        ahead: an attempt trains on what those before it played of later steps; of a rollout that was played
            again, its last attempt counts.
    """

    def __init__(self, folder: Path, attempt: int, *, ahead: bool = False) -> None:
        self._patterns = [f"attempt-{each}-*.jsonl" for each in range(1 if ahead else attempt, attempt + 1)]
        self._folder = folder
        self._files: dict[Path, LineReader] = {}
        self._records: defaultdict[int, dict[str, dict[str, Any]]] = defaultdict(dict)

    @property
    def steps(self) -> list[int]:
        """Those with a record, in order."""
        return sorted(self._records)

    def read(self) -> None:
        """Take in what was written since the last call."""
        for pattern in self._patterns:
            for path in self._folder.glob(pattern):
                reader = self._files.setdefault(path, LineReader(path))
                for entry in reader.read():
                    self._records[entry["step"]][entry["rollout"]] = entry

    def of(self, step: int) -> StepOutcomes:
        """The sum over the rollouts of a step."""
        total = StepOutcomes()
        for entry in self._records.get(step, {}).values():
            total.add(entry)
        return total

    def forget(self, step: int) -> None:
        """Nobody will ask for this step, or for one before it."""
        for each in [known for known in self._records if known <= step]:
            del self._records[each]
