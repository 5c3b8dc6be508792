"""`make bench-drift`: the same run trained on the ids that were sampled, and on those of its text again.

    python -m tests.bench.drift [--steps N]

A random model with a byte-level BPE tokenizer learns to write digits: most of what it samples are not the
tokens that its tokenizer makes of the text. Prints a table of both runs, and what `maxDriftFraction` says to
a third one; some minutes on two cores.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentfly.local import environments
from agentfly.local.paths import run_dir
from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner
from agentfly.resources.runners.model_service import ModelServiceRunner
from agentfly.resources.spec import ModelServiceSpec
from agentfly.roles.trainer import EXIT_INVALID
from agentfly.sandbox.binary import find_sandboxd
from tests.local.training.lab import HERE, Lab, broker, lines

FOLDER = Path(__file__).with_name("drifting")
WINDOW = 5
LIMIT = 0.05
MODES: Mapping[str, list[str]] = {"as sampled": ["recorder"], "re-tokenised": ["retokenised", "recorder"]}


@dataclass(frozen=True)
class Step:
    """One step of one run.

    Attributes:
        drift: share of the sampled tokens that a rendering of the text has not.
        divergence: of the policy that is trained from the one that sampled, in nats for each sampled token:
            the mean of log-probabilities of what was sampled, less that of what is trained on.
    """

    reward: float
    drift: float
    divergence: float
    gradient: float


def steps_of(
    metrics: Sequence[Mapping[str, Any]],
    trajectories: Sequence[Mapping[str, Any]],
    trained: Sequence[Mapping[str, Any]],
) -> list[Step]:
    """What each step was.

    Args:
        metrics: lines of ``metrics.jsonl``.
        trajectories: all rollouts, of which ``group_id`` names the step.
        trained: rows of the loss, in their order, with as many for a step as it has rollouts.
    """
    sampled: dict[int, list[float]] = defaultdict(list)
    tokens: dict[int, int] = defaultdict(int)
    for each in trajectories:
        step = int(each["group_id"].removeprefix("s").partition("-")[0])
        sampled[step].append(sum(sum(row["logprobs"]) for row in each["rows"]))
        tokens[step] += sum(sum(row["response_mask"]) for row in each["rows"])
    rows = [sum(_masked(row)) for row in trained if any(row["response_mask"])]
    found = []
    for line in metrics:
        before = sum(len(sampled[step]) for step in sampled if step < line["step"])
        ours = rows[before : before + len(sampled[line["step"]])]
        gap = sum(sampled[line["step"]]) - sum(ours)
        found.append(
            Step(line["reward"], line["drift_fraction"], gap / tokens[line["step"]], line["grad_norm"])
        )
    return found


def _masked(row: Mapping[str, Any]) -> list[float]:
    return [value for value, bit in zip(row["old_log_probs"], row["response_mask"], strict=True) if bit]


def table(runs: Mapping[str, Sequence[Step]]) -> str:
    """Markdown: means of the first and of the last steps of each run."""
    lines_ = [
        f"Means of the first {WINDOW} and of the last {WINDOW} steps; divergence in nats for each token.\n",
        "| trained on | reward | | drift | | divergence | | gradient norm | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, steps in runs.items():
        cells = []
        for field in ("reward", "drift", "divergence", "gradient"):
            for part in (steps[:WINDOW], steps[-WINDOW:]):
                cells.append(f"{statistics.fmean(getattr(step, field) for step in part):.3f}")
        lines_.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines_) + "\n"


async def measure(steps: int, top: Path) -> tuple[dict[str, list[Step]], str]:
    """Both runs, and the last line of the one that may not drift.

    Raises:
        RuntimeError: one of them did not do what it should.
    """
    trainer, inference = environments.build("trainer"), environments.build("inference")
    model = top / "model"
    made = await asyncio.create_subprocess_exec(str(trainer), str(HERE / "tiny_model.py"), str(model))
    if await made.wait():
        raise RuntimeError("tiny_model.py: failed")
    sandboxes = BubblewrapRunner(top / "sandboxes", find_sandboxd())
    servers = ModelServiceRunner(inference, top / "vllm", start_timeout_s=240)
    spec = ModelServiceSpec(model=str(model), max_model_len=512, max_num_seqs=64, dtype="float32")
    found: dict[str, list[Step]] = {}
    async with AsyncExitStack() as stack:
        stack.push_async_callback(sandboxes.close)
        member = await servers.start(spec, "policy-0")
        stack.push_async_callback(servers.stop, member)
        await stack.enter_async_context(broker(sandboxes, top / "broker"))
        for name, modules in MODES.items():
            folder = top / name.replace(" ", "-")
            folder.mkdir()
            lab = Lab(trainer, model, member.address, folder, f"unix://{top}/broker", modules, [FOLDER])
            if await lab.run(lab.config(1, steps=steps, checkpoint_every_steps=steps)):
                raise RuntimeError(f"{name}: {lab.tail()}")
            played = [row for file in (folder / "trajectories").iterdir() for row in lines(file)]
            found[name] = steps_of(lab.metrics(), played, lines(folder / "batches.jsonl"))
        folder = top / "limited"
        folder.mkdir()
        lab = Lab(trainer, model, member.address, folder, f"unix://{top}/broker")
        if await lab.run(lab.config(1, steps=steps, max_drift_fraction=LIMIT)) != EXIT_INVALID:
            raise RuntimeError(f"maxDriftFraction {LIMIT}: did not stop the run: {lab.tail()}")
        return found, next(line for line in lab.tail().splitlines() if "maxDriftFraction" in line)


def main() -> int:
    """The exit code: 1 if the run on sampled ids did not learn, or is not the policy that sampled."""
    parser = argparse.ArgumentParser(prog="tests.bench.drift")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    run_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=run_dir(), prefix="drift-") as folder:
        found, stopped = asyncio.run(measure(options.steps, Path(folder)))
    sys.stdout.write(f"{table(found)}\nmaxDriftFraction: {LIMIT}: {stopped}\n")
    ours = found["as sampled"]
    first, last = (statistics.fmean(step.reward for step in part) for part in (ours[:WINDOW], ours[-WINDOW:]))
    return 0 if last > first and max(abs(step.divergence) for step in ours) < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
