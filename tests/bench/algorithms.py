"""Whether the quickstart learns with each algorithm: real verl, vLLM and sandboxes, some minutes for each.

python -m tests.bench.algorithms [NAME...] [--steps N] [--runs FOLDER]

Prints a table of the mean reward of the first and of the last five steps; the exit code is 1 if one did not
rise. A run that is finished is not made again, so that an interrupted bench goes on where it was.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentfly.local.paths import run_dir

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
ANCHORED = Path(__file__).parent / "anchored" / "anchored.py"
RUN_S = 1800
WINDOW = 5


@dataclass(frozen=True)
class Case:
    """A run of the quickstart with other settings; ``sets`` as for ``agentfly run --set``."""

    name: str
    sets: tuple[str, ...]


def _of_turns(name: str, strategy: str) -> Case:
    sets = (
        f"algorithm.name={name}",
        "agent.entrypoint=anchored.py:agent",
        f"rollout.strategy.type={strategy}",
        # Of a Step every prompt counts, not the first alone.
        *(("rollout.maxPromptTokens=256",) if strategy == "Step" else ()),
    )
    return Case(f"{name}-{strategy.lower()}", sets)


CASES = (
    Case("grpo", ()),
    Case("grpo-ahead", ("asynchronous.maxStaleness=1",)),
    Case("rloo", ("algorithm.name=rloo",)),
    Case("reinforce_plus_plus", ("algorithm.name=reinforce_plus_plus",)),
    Case("ppo", ("algorithm.name=ppo", "algorithm.ppo.criticLearningRate=0.001")),
    _of_turns("gigpo", "Chain"),
    _of_turns("gigpo", "Step"),
    Case("dapo", ("algorithm.name=dapo",)),
    Case("gspo", ("algorithm.name=gspo", "algorithm.clipHigh=0.0004")),
    Case("dr_grpo", ("algorithm.name=dr_grpo",)),
    Case("reinforce_plus_plus_baseline", ("algorithm.name=reinforce_plus_plus_baseline",)),
    _of_turns("hgpo", "Step"),
)


@dataclass(frozen=True)
class Found:
    """What a run came to."""

    name: str
    steps: int
    first: float
    last: float
    seconds: float

    @property
    def rose(self) -> bool:
        """Whether the policy learned."""
        return self.last > self.first


def found(name: str, lines: Sequence[str], seconds: float) -> Found:
    """What the lines of ``metrics.jsonl`` say."""
    rewards = [json.loads(line)["reward"] for line in lines]
    return Found(
        name,
        len(rewards),
        statistics.fmean(rewards[:WINDOW]),
        statistics.fmean(rewards[-WINDOW:]),
        seconds,
    )


def table(rows: Sequence[Found]) -> str:
    """Markdown."""
    lines = ["| algorithm | steps | first five | last five | gain | seconds |", "|---|---|---|---|---|---|"]
    for row in rows:
        gain = f"{row.last - row.first:+.3f}"
        lines.append(
            f"| {row.name} | {row.steps} | {row.first:.3f} | {row.last:.3f} | {gain} | {row.seconds:.0f} |"
        )
    return "\n".join(lines) + "\n"


def play(case: Case, steps: int, runs: Path) -> Found:
    """Make one run.

    Raises:
        RuntimeError: it failed.
    """
    manifest = runs / "manifest"
    shutil.copytree(QUICKSTART, manifest, dirs_exist_ok=True)
    shutil.copy(ANCHORED, manifest)
    sets = [part for each in (*case.sets, f"steps={steps}") for part in ("--set", each)]
    name = case.name.replace("_", "-")
    began = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "agentfly.cli", "run", "-f", str(manifest / "run.yaml")),
            *("--name", name, "--runs", str(runs), *sets),
        ],
        stdout=sys.stderr,
        timeout=RUN_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{case.name}: agentfly run ended with {done.returncode}")
    lines = (runs / name / "metrics.jsonl").read_text().splitlines()
    return found(case.name, lines, time.monotonic() - began)


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="tests.bench.algorithms")
    parser.add_argument("names", nargs="*", help="of cases; none: all")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--runs", type=Path, default=None, help="where runs stay; absent: a folder of its own"
    )
    options = parser.parse_args()
    runs = options.runs or run_dir() / "bench-algorithms"
    if unknown := set(options.names) - {case.name for case in CASES}:
        parser.error(f"{', '.join(sorted(unknown))}: known are {', '.join(case.name for case in CASES)}")
    rows = []
    for case in CASES:
        if case.name in options.names or not options.names:
            rows.append(play(case, options.steps, runs))
            sys.stderr.write(table(rows[-1:]))
    sys.stdout.write(table(rows))
    return int(not all(row.rose for row in rows))


if __name__ == "__main__":
    sys.exit(main())
