"""The reward curve of a run as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WINDOW = 5  # steps; the same window as the first and last mean that a run reports


def first_and_last(rewards: Sequence[float], window: int = WINDOW) -> tuple[float, float]:
    """Mean reward of the first and of the last ``window`` steps (fewer if the run is shorter)."""
    if not rewards:
        raise ValueError("rewards: empty; a curve needs at least one step")
    head, tail = rewards[:window], rewards[-window:]
    return sum(head) / len(head), sum(tail) / len(tail)


def running_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Mean of each value and up to ``window - 1`` before it."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means


def write_reward_png(steps: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Plot mean reward against step, with its running mean and the spread within a step.

    Args:
        steps: records of ``metrics.jsonl``: ``step``, ``reward`` and, where known, ``reward_std``.
        path: the PNG to write; replaced as a whole, so that a reader never sees half a picture.
        title: what run this is.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    numbers = [int(record["step"]) for record in steps]
    rewards = [float(record["reward"]) for record in steps]
    figure, axes = pyplot.subplots(figsize=(7, 3.6), dpi=130, layout="constrained")
    try:
        axes.plot(numbers, rewards, ".", color="#9db7d5", label="mean reward of a step")
        axes.plot(
            numbers, running_mean(rewards), color="#1f5fa8", linewidth=2, label=f"mean of {WINDOW} steps"
        )
        axes.set(xlabel="step", ylabel="reward", title=title)
        axes.set_ylim(min(0.0, *rewards), max(1.0, *rewards) * 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        axes.legend(loc="lower right", frameon=False)
        partial = path.with_name(f".{path.name}.partial")
        figure.savefig(partial, format="png")
        partial.replace(path)
    finally:
        pyplot.close(figure)
