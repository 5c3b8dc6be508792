"""How long the parts of a run's life took, read off its status. Needs no cluster."""

import itertools
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.bench.cluster import training
from tests.bench.report import Section, Table, chapter
from tests.cluster.demo.times import Times, became_true, until_true

MADE, ASKED = "2026-12-01T10:00:00Z", datetime(2026, 12, 1, 10, 5, 0, 500_000, UTC)


def run(**conditions: tuple[str, str]) -> dict[str, Any]:
    """A run as the API server tells it: condition to status and time."""
    told = [
        {"type": kind, "status": status, "lastTransitionTime": f"2026-12-01T10:{at}Z"}
        for kind, (status, at) in conditions.items()
    ]
    return {"metadata": {"creationTimestamp": MADE}, "status": {"conditions": told}}


@pytest.mark.parametrize(
    ("found", "since", "seconds"),
    [
        (run(Running=("True", "01:35")), None, 95.0),
        (run(Running=("True", "06:00")), ASKED, 59.5),
        (run(Running=("True", "05:00")), ASKED, 0.0),  # its time is in whole seconds
        (run(Running=("False", "01:35")), None, None),
        (run(Suspended=("True", "01:35")), None, None),
        ({"metadata": {"creationTimestamp": MADE}}, None, None),
    ],
)
def test_a_span_ends_when_its_condition_became_true(
    found: dict[str, Any], since: datetime | None, seconds: float | None
) -> None:
    assert until_true(found, "Running", since) == seconds


def test_the_time_of_a_condition_is_one_of_utc() -> None:
    assert became_true(run(Running=("True", "01:35")), "Running") == datetime(2026, 12, 1, 10, 1, 35, 0, UTC)


def test_what_did_not_happen_is_not_told() -> None:
    assert str(Times(80.4, 95.0)) == "roles ready 80 s, first step 95 s"
    assert str(Times(released=9.0)) == "released 9 s"


def test_the_part_of_a_training_run_has_every_span_and_no_ratio() -> None:
    section = training.section(Times(80.4, 95.0, 12.0, 14.0, None))
    assert [row[1] for row in section.tables[0].rows] == ["80", "95", "12", "14", "-"]
    text = chapter("Cluster", [section], [("date", "today")], "limits")
    assert "Ratio" not in text
    assert "| applied until it makes steps | 95 |" in text
    lines = text.splitlines()
    assert not any(first == second == "" for first, second in itertools.pairwise(lines))


def test_a_part_of_a_chapter_without_ratios_has_no_table_of_them() -> None:
    text = chapter("Cluster", [Section("S", "text", [], [Table("T", "what", ["a"], [["1"]])])], [], "limits")
    assert "### S\n\ntext\n\n**T.** what\n\n| a |\n| --- |\n| 1 |\n" in text
