"""The order of tasks."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.errors import AgentflyError
from agentfly.training.tasks import task_index, write_tasks
from tests.unit.training.conftest import MakeConfig


def write(path: Path, count: int) -> None:
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(count)))


def read(path: Path) -> list[int]:
    return [json.loads(line)["n"] for line in path.read_text().splitlines()]


def test_every_attempt_sees_the_tasks_of_the_first(make_config: MakeConfig, tmp_path: Path) -> None:
    write(tmp_path / "tasks.jsonl", 5)
    assert write_tasks(make_config()) == 5
    write(tmp_path / "tasks.jsonl", 9)
    assert write_tasks(make_config(attempt=2)) == 5
    assert read(make_config().tasks_file) == [0, 1, 2, 3, 4]


def test_no_more_is_taken_than_the_run_can_train_on(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(
        "import itertools\ndef tasks(seed):\n    return ({'n': seed + i} for i in itertools.count())\n"
    )
    config = make_config(tasks_path=None, tasks_entrypoint="endless.py:tasks", seed=100)
    assert write_tasks(config) == 12
    assert read(config.tasks_file) == list(range(100, 112))


def test_a_source_without_tasks_is_named(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("\n")
    with pytest.raises(AgentflyError, match=r"tasks: tasks\.jsonl has no tasks"):
        write_tasks(make_config())
    assert not make_config().tasks_file.exists()


def test_a_bad_task_leaves_no_half_file(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"n": 1}\n[2]\n')
    with pytest.raises(AgentflyError, match=r"tasks\.jsonl:2"):
        write_tasks(make_config())
    assert not make_config().tasks_file.exists()


def passes(count: int, seed: int) -> Iterator[list[int]]:
    position = 0
    while True:
        yield [task_index(position + i, count, seed) for i in range(count)]
        position += count


@given(st.integers(1, 40), st.integers(0, 5))
def test_every_pass_has_every_task_once_and_the_first_keeps_the_order(count: int, seed: int) -> None:
    turns = passes(count, seed)
    assert next(turns) == list(range(count))
    for _ in range(3):
        assert sorted(next(turns)) == list(range(count))


def test_later_passes_are_shuffled_by_the_seed_and_differ() -> None:
    one, other = passes(20, 1), passes(20, 2)
    next(one), next(other)
    second = next(one)
    assert second != list(range(20))
    assert second != next(one)
    assert second != next(other)
    assert second == [task_index(20 + i, 20, 1) for i in range(20)]
