"""Files of trajectories: whole lines, one version."""

import json
from pathlib import Path

import pytest

from agentfly.rollout import Masked, Scored, TrajectoryFileError, TrajectoryWriter, read_trajectories
from tests.unit.rollout.test_trajectory import make

# 1. a line is written whole, when its rollout is finished


def test_written_trajectories_are_read_back(tmp_path: Path) -> None:
    written = [make(rollout_id="a"), make(rollout_id="b", outcome=Masked("deadline"))]
    with TrajectoryWriter(tmp_path / "deep" / "t.jsonl") as writer:
        for trajectory in written:
            writer.write(trajectory)
        assert list(read_trajectories(writer.path)) == written


def test_line_is_there_before_the_file_is_closed(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path / "t.jsonl")
    writer.write(make())
    assert (tmp_path / "t.jsonl").read_bytes().endswith(b"\n")
    writer.close()
    writer.close()


def test_two_writers_do_not_mix_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with TrajectoryWriter(path) as one, TrajectoryWriter(path) as two:
        for number in range(20):
            (one if number % 2 else two).write(make(rollout_id=str(number), task={"text": "x" * 5000}))
    assert [trajectory.rollout_id for trajectory in read_trajectories(path)] == [str(n) for n in range(20)]


def test_text_with_line_breaks_stays_on_one_line(tmp_path: Path) -> None:
    trajectory = make(task={"text": "a\nb\u2028c\x85d"})
    with TrajectoryWriter(tmp_path / "t.jsonl") as writer:
        writer.write(trajectory)
    assert list(read_trajectories(tmp_path / "t.jsonl")) == [trajectory]


# 2. an unfinished last line


@pytest.mark.parametrize("torn", [b'{"schema": "agentfly', "{é".encode()[:-1], b'{"x": "' + b"y" * 200_000])
def test_unfinished_line_is_removed_by_the_next_writer(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "t.jsonl"
    with TrajectoryWriter(path) as writer:
        writer.write(make(rollout_id="a"))
    with path.open("ab") as file:
        file.write(torn)
    assert [t.rollout_id for t in read_trajectories(path)] == ["a"]
    with TrajectoryWriter(path) as writer:
        assert [t.rollout_id for t in writer.finished()] == ["a"]
        writer.write(make(rollout_id="b"))
    assert [t.rollout_id for t in read_trajectories(path)] == ["a", "b"]


def test_file_of_one_unfinished_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"{")
    with TrajectoryWriter(path) as writer:
        assert list(writer.finished()) == []
    assert path.read_bytes() == b""


# 3. another version is refused


def test_other_version_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    body = json.loads(make().model_dump_json())
    lines = [body, {**body, "schema": "agentfly.trajectory/v2"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(TrajectoryFileError) as error:
        list(read_trajectories(path))
    assert error.value.message == (
        f"{path}:2: schema 'agentfly.trajectory/v2' is not 'agentfly.trajectory/v1'"
    )
    assert "release of agentfly that wrote it" in error.value.hints[0]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("nonsense", "is not a line of JSON"),
        ("[1]", "schema None is not"),
        ('{"schema": "agentfly.trajectory/v1"}', "rollout_id: Field required"),
    ],
)
def test_line_that_is_no_trajectory_is_refused(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(TrajectoryFileError, match=problem):
        list(read_trajectories(path))


def test_scored_reward_is_read_from_the_outcome(tmp_path: Path) -> None:
    with TrajectoryWriter(tmp_path / "t.jsonl") as writer:
        writer.write(make(outcome=Scored(0.25)))
    assert next(read_trajectories(tmp_path / "t.jsonl")).reward == 0.25
