"""How the figures are written: ratios first, absolute figures second, then their limits.

Guarantees:
1. Every table says what was measured and what it is compared with.
2. Nothing in the page names a machine, a user or a folder.
3. A chapter stands for itself, with its own facts: the page before it and the chapter can be replaced alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.bench.stats import Series, Spread

LIMITS = (
    "All figures come from one run on the machine above, whose processor cores are shared with other work: "
    "absolute figures move with it by tens of percent and more, and a 99th percentile of a few hundred "
    "samples is little more than their slowest ones. Ratios are steadier, because both sides alternate "
    "within each repeat and the ratio is formed there; their range shows what noise is left, and the rows "
    "that compare a thing with itself show what a ratio of 1 looks like here. Client, broker and engine "
    "share one process in this run, as they do not in production, so figures through the broker are upper "
    "bounds. In the rollouts, both loops get the same latencies, those of a server that was answering 16 "
    "rollouts: a real server would answer the last rollouts of a batch somewhat faster, so the lockstep loop "
    "would lose somewhat less than shown; and how much it loses depends on how long the tail is."
)

RATIOS = (
    "What was measured over what it is compared with: of seconds, or of rollouts per second where it says "
    "throughput. The median over the repeats, and their range."
)


_RATIO = ("Measured", "Compared with", "Ratio", "Range", "Repeats")


@dataclass(frozen=True)
class Ratio:
    """One comparison."""

    measured: str
    against: str
    spread: Spread


@dataclass(frozen=True)
class Table:
    """Absolute figures; ``text`` says what is measured, how, and on how many samples."""

    title: str
    text: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """What one part of the bench found."""

    title: str
    text: str
    ratios: Sequence[Ratio]
    tables: Sequence[Table]


def chapter(title: str, sections: Sequence[Section], facts: Sequence[tuple[str, str]], limits: str) -> str:
    """A part of the page that was measured by itself: everything below a heading of the second level."""
    lines = [f"## {title}", "", *(f"- {name}: {value}" for name, value in facts)]
    for section in sections:
        rows = [_ratio_row(each) for each in section.ratios]
        lines += ["", f"### {section.title}", "", section.text]
        lines += ["", *_grid(_RATIO, rows)] if rows else []
        for table in section.tables:
            lines += ["", f"**{table.title}.** {table.text}", "", *_grid(table.columns, table.rows)]
    return "\n".join([*lines, "", limits, ""])


def joined(old: str, chapters: Mapping[str, str | None], *, page: str | None = None) -> str:
    """A page and its last chapters, by title and in this order; of what is None, what ``old`` has."""
    found: list[str] = []
    for title, chapter in reversed(chapters.items()):
        old, heading, after = old.partition(f"## {title}\n")
        found.append(heading + after if chapter is None else chapter)
    first = old if page is None else page
    return "\n".join(part.rstrip("\n") + "\n" for part in [first, *reversed(found)] if part)


def render(sections: Sequence[Section], facts: Sequence[tuple[str, str]]) -> str:
    """The whole page as Markdown; ``facts`` describe the machine and the run."""
    lines = ["# Benchmarks", "", "Written by `make bench`; every figure is measured, none is edited.", ""]
    lines += [f"- {name}: {value}" for name, value in facts]
    lines += ["", "## Ratios", "", RATIOS]
    for section in sections:
        rows = [_ratio_row(each) for each in section.ratios]
        lines += ["", f"### {section.title}", "", section.text, ""]
        lines += _grid(_RATIO, rows)
    lines += ["", "## Absolute figures"]
    for section in sections:
        for table in section.tables:
            lines += ["", f"### {table.title}", "", table.text, "", *_grid(table.columns, table.rows)]
    return "\n".join([*lines, "", "## Limits", "", LIMITS, ""])


def milliseconds(seconds: float) -> str:
    """Three significant digits."""
    return _digits(1000 * seconds)


def percentiles(series: Series) -> list[str]:
    """The cells of a row: p50, p99, and the number of samples."""
    return [milliseconds(series.percentile(50)), milliseconds(series.percentile(99)), str(len(series))]


def _ratio_row(ratio: Ratio) -> list[str]:
    found = ratio.spread
    extent = f"{_digits(found.low)} - {_digits(found.high)}"
    return [ratio.measured, ratio.against, f"**{_digits(found.middle)}**", extent, str(found.repeats)]


def _digits(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]
