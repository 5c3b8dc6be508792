"""The frozen tasks of a rollout job; the numbers are the module's guarantees."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.errors import AgentflyError
from agentfly.launch.tasks import count, cut, freeze

ROWS = [{"a": 1}, {"a": 0.1}, {"a": "é\n"}, {"a": None}, {"a": [1, {"b": 2}]}]


# 1. written once


def test_tasks_that_are_there_stay(tmp_path: Path) -> None:
    path = tmp_path / "run" / "tasks.jsonl"
    freeze(ROWS, path, "a")
    freeze([{"other": 1}], path, "b")
    assert count(path) == len(ROWS)
    assert [each.name for each in path.parent.iterdir()] == ["tasks.jsonl"]


def test_tasks_whose_source_fails_are_not_there(tmp_path: Path) -> None:
    def rows():  # type: ignore[no-untyped-def]
        yield {"a": 1}
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError):
        freeze(rows(), tmp_path / "tasks.jsonl", "a")
    assert not (tmp_path / "tasks.jsonl").exists()


# 2. places


@given(st.integers(1, 7))
def test_cuts_are_the_whole_in_order(tmp_path_factory: pytest.TempPathFactory, number: int) -> None:
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    freeze(ROWS, path, "a")
    cuts = [cut(path, first, number) for first in range(0, len(ROWS), number)]
    assert [row for rows, _ in cuts for row in rows] == ROWS
    assert {total for _, total in cuts} == {len(ROWS)}


def test_cut_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AgentflyError, match="is not there"):
        cut(tmp_path / "tasks.jsonl", 0, 1)
    freeze(ROWS, tmp_path / "tasks.jsonl", "a")
    with pytest.raises(AgentflyError, match="has 5 tasks, none from place 5 on"):
        cut(tmp_path / "tasks.jsonl", 5, 1)
