"""Cells of the kill matrix."""

import pytest

from tests.kills.matrix import CONTROL, USUAL, Cell, Part, Phase, Strike, Work, chosen, every
from tests.kills.table import last_line, row, row_of_end, row_of_none
from tests.kills.verdict import Seen, Struck

HEAD = Cell(Work.RUN, Phase.RUNNING, Part.HEAD, Strike.KILL)


def test_a_name_is_of_one_cell() -> None:
    cells = list(every())
    assert len({cell.name for cell in cells}) == len(cells) == 122
    assert chosen([HEAD.name]) == (HEAD,)


def test_every_part_is_struck_where_it_exists_and_nowhere_else() -> None:
    found = {(cell.work, cell.phase, cell.part) for cell in every()}
    assert (Work.RUN, Phase.PREPARING, Part.HEAD) not in found
    assert (Work.CYCLE, Phase.SUSPENDED, Part.SERVER) not in found
    assert (Work.JOB, Phase.RUNNING, Part.HEAD) not in found
    assert (Work.RUN, Phase.RUNNING, Part.WORKER) not in found
    assert {part for _, _, part in found} == set(Part)
    assert Cell(Work.RUN, Phase.RUNNING, Part.ENGINE, Strike.DELETE) not in set(every())


def test_the_usual_ones_have_every_part_and_strike_and_every_phase_of_what_outlives_an_attempt() -> None:
    cells = chosen(USUAL)
    assert len(cells) >= 40
    assert {cell.part for cell in cells} == set(Part)
    assert {cell.strike for cell in cells} == set(Strike)
    for part in CONTROL:
        assert {cell.phase for cell in cells if cell.part is part} >= set(Phase) - {Phase.PREPARING}
    assert [pattern for pattern in USUAL if not chosen([pattern])] == []


@pytest.mark.parametrize(
    ("pattern", "number"), [("run/running/head/*", 3), ("*/preparing/*", 6), ("job/*/server/kill", 3)]
)
def test_a_pattern_names_cells(pattern: str, number: int) -> None:
    assert len(chosen([pattern])) == number


def test_a_row_has_the_counters_before_and_after_and_the_verdict() -> None:
    before = Seen(attempt=2, restarts=1, failures=1, checkpoint=7)
    after = Seen(at=71.0, attempt=3, restarts=2, failures=1, checkpoint=8)
    text = str(row(Struck(HEAD, before, 10.0, 0.0, turned=after), after, ""))
    assert text.split() == [HEAD.name, "2>3", "1>2", "1>1", "7>8", "61", "s", "ok"]
    wrong = row(Struck(HEAD, before, 10.0, 0.0), after, "restarts: 1 became 3")
    assert str(wrong).endswith("WRONG: restarts: 1 became 3")
    job = Cell(Work.JOB, Phase.LAST, Part.WORKER, Strike.KILL)
    played = Seen(finished=frozenset("abc"))
    assert str(row(Struck(job, played, 0.0, 0.0), played, "")).split() == [job.name, "3>3", "0", "s", "ok"]


def test_the_last_line_counts_what_was_not_struck_as_wrong() -> None:
    rows = [row_of_end("run-1 at its end", ""), row_of_none(HEAD, "run-1 has failed")]
    assert "not struck: run-1 has failed" in str(rows[1])
    assert last_line(rows, 3.4) == "kills: 1 of 2 rows are right, 3 min"
