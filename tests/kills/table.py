"""The table that the matrix prints: a row for each cell, as soon as it is known.

Guarantees:
1. Every cell has one row, struck or not; what is not right says why.
"""

from dataclasses import dataclass

from tests.kills.matrix import Cell, Work
from tests.kills.verdict import Seen, Struck, counted

HEAD = f"{'cell':<40}{'attempt':>9}{'restarts':>10}{'failures':>10}{'saved':>10}{'back':>7}  verdict"


@dataclass(frozen=True, slots=True)
class Row:
    """One line. ``wrong`` is empty if all is right."""

    text: str
    wrong: str

    def __str__(self) -> str:
        return f"{self.text}  {f'WRONG: {self.wrong}' if self.wrong else 'ok'}"


def row(struck: Struck, now: Seen, wrong: str) -> Row:
    """The row of a cell: what each counter was at the strike, and is now that the work is back."""
    before, after = struck.before, counted(struck, now)
    counters = [(before.attempt, after.attempt), (before.restarts, after.restarts)]
    counters += [(before.failures, after.failures), (before.checkpoint, now.checkpoint)]
    if struck.cell.work is Work.JOB:  # instead of checkpoints it has rollouts
        counters = [(0, 0)] * 3 + [(len(before.finished), len(now.finished))]
    cells = "".join(
        f"{'' if pair == (0, 0) else f'{pair[0]}>{pair[1]}':>{width}}"
        for pair, width in zip(counters, (9, 10, 10, 10), strict=True)
    )
    return Row(f"{struck.cell.name:<40}{cells}{now.at - struck.at:>5.0f} s", wrong)


def row_of_end(what: str, wrong: str) -> Row:
    """The row of a work that is over."""
    return Row(f"{what:<86}", wrong)


def row_of_none(cell: Cell, why: str) -> Row:
    """The row of a cell that was not struck."""
    return Row(f"{cell.name:<86}", f"not struck: {why}")


def last_line(rows: list[Row], minutes: float) -> str:
    """How it went."""
    wrong = sum(bool(each.wrong) for each in rows)
    return f"kills: {len(rows) - wrong} of {len(rows)} rows are right, {minutes:.0f} min"
