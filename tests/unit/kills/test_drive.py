"""Runs and a job come to all their cells, and all cells come to an end."""

import types
from typing import Any

import pytest

from tests.kills import __main__ as kills
from tests.kills import drive, strike
from tests.kills.drive import Lane
from tests.kills.matrix import USUAL, Part, Strike, Work, chosen
from tests.kills.table import Row
from tests.unit.kills.play import Manifest, Play

HOUR = 3600.0


class Quiet:
    """An observer that sees nothing wrong, but for what it is given, when works are there."""

    def __init__(self, *wrongs: str) -> None:
        self._wrongs = [[], list(wrongs)]

    def take_wrongs(self) -> list[str]:
        return self._wrongs.pop(0) if self._wrongs else []


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Any:
    def played(patterns: tuple[str, ...], play: Play, *wrongs: str) -> list[Row]:
        for module in (drive, kills):
            monkeypatch.setattr(module, "time", play.clock)
        monkeypatch.setattr(drive, "apply", play.apply)
        monkeypatch.setattr(drive, "Manifest", Manifest)
        monkeypatch.setattr(strike, "struck", play.struck)
        monkeypatch.setattr(strike, "go_on", play.go_on)
        api = types.SimpleNamespace(call=lambda *_: (200, {}))
        world = types.SimpleNamespace(cluster=types.SimpleNamespace(api=api), namespace="n", play=play)
        eyes: Any = play
        eyes.observer = Quiet(*wrongs)
        cells = chosen(patterns)
        lanes: list[list[Lane]] = kills._lanes(world, eyes, cells, lambda _: None)  # type: ignore[arg-type]
        rows = []
        for row in kills._rows(lanes, eyes, lambda _: None):
            rows.append(row)
            assert play.clock.now < 1000 + 6 * HOUR
        return rows

    return played


def names(rows: list[Row]) -> list[str]:
    return [row.text.split()[0] for row in rows]


@pytest.mark.parametrize("patterns", [USUAL, ("*",)], ids=["usual", "all"])
def test_every_cell_is_struck_once_in_its_phase_and_is_right(stage: Any, patterns: tuple[str, ...]) -> None:
    play = Play()
    rows = stage(patterns, play)
    assert [str(row) for row in rows if row.wrong] == []
    wanted = sorted(cell.name for cell in chosen(patterns))
    assert sorted(name for name in names(rows) if "/" in name) == wanted
    ends = [row.text for row in rows if "at its end" in row.text]
    assert {Work(text.split("-")[0]) for text in ends} == set(Work)


def test_a_part_that_stands_still_goes_on_if_it_is_to(stage: Any) -> None:
    play = Play()
    stage(("run/running/operator/stop", "run/running/broker/stop"), play)
    assert not play.still
    assert {(part, how) for _, part, how, _ in play.strikes} == {
        (Part.OPERATOR, Strike.STOP),
        (Part.BROKER, Strike.STOP),
    }


def test_a_run_that_does_not_come_back_is_replaced_for_the_cells_that_are_left(stage: Any) -> None:
    rows = stage(("run/running/ray-worker/kill", "run/running/server/kill"), Play(frozenset({Part.NODE})))
    told = {row.text.split()[0]: row.wrong for row in rows}
    assert told["run/running/ray-worker/kill"].startswith("not where it must be after 480 s")
    assert "was given up" in next(row.text for row in rows if row.text.startswith("run-1"))
    assert told["run/running/server/kill"] == ""


def test_cells_that_none_of_three_runs_comes_to_are_not_struck(stage: Any) -> None:
    cells = ("run/running/head/*", "run/running/ray-worker/kill")
    rows = stage(cells, Play(frozenset({Part.HEAD, Part.NODE})))
    cell_rows = [row for row in rows if "/" in row.text.split()[0]]
    assert len(cell_rows) == 4
    assert all(row.wrong for row in cell_rows)
    assert [row.wrong for row in cell_rows][-1] == "not struck: 3 runs were given up"


def test_a_cell_that_no_job_comes_to_is_not_struck(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Play, "victim", lambda *_: None)
    rows = stage(("job/running/rollout-worker/kill",), Play())
    assert [row.wrong for row in rows] == ["", "not struck: no job comes to it"]


def test_what_must_never_be_stands_with_the_cell_whose_work_it_was_of(stage: Any) -> None:
    rows = stage(("run/running/head/kill",), Play(), "run run-1: pods of two attempts", "pool x: 3 members")
    told = {row.text.split()[0]: row.wrong for row in rows}
    assert told["run/running/head/kill"] == "run run-1: pods of two attempts"
    assert told["beside"] == "pool x: 3 members"
