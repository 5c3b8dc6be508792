"""Parts of a job's rollouts, as several players leave them; the numbers are the module's guarantees."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.errors import AgentflyError
from agentfly.rollout import Failed, Masked, Scored, Trajectory, parts, read_trajectories
from agentfly.rollout.parts import PartWriter, publish, published
from tests.unit.rollout.test_trajectory import make

IDS = ("r-0", "r-1", "r-2")
OUTCOMES = (Scored(0.0), Scored(1.0), Masked("deadline"), Failed("SandboxLost"), Failed("StartFailed"))


def line(rollout: str = "r-0", outcome: Any = OUTCOMES[0], ended: float = 1.0) -> Trajectory:
    return make(rollout_id=rollout, outcome=outcome, started_at=ended, seconds=0.0)


def fill(folder: Path, player: str, *lines: Trajectory) -> None:
    with PartWriter(folder, player) as sink:
        for each in lines:
            sink.write(each)


# 1, 2. players


def test_what_any_player_left_is_seen_by_all(tmp_path: Path) -> None:
    with PartWriter(tmp_path, "a") as first, PartWriter(tmp_path, "b") as second:
        first.write(line("r-0"))
        second.write(line("r-1"))
        first.write(line("r-2"))
        for sink in (first, second):
            assert {each.rollout_id for each in sink.finished()} == set(IDS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]


# 3. results


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from([*IDS, "other"]),
            st.sampled_from(OUTCOMES),
            st.integers(0, 9),
        ),
        max_size=12,
    )
)
def test_results_have_one_line_for_each_rollout_or_are_not_there(
    tmp_path_factory: pytest.TempPathFactory, played: list[tuple[str, str, Any, int]]
) -> None:
    root = tmp_path_factory.mktemp("part")
    folder, target = root / "part", root / "results" / "part.jsonl"
    for player, rollout, outcome, ended in played:
        fill(folder, player, line(rollout, outcome, float(ended)))
    complete = {rollout for _, rollout, _, _ in played} >= set(IDS)
    if not complete:
        with pytest.raises(AgentflyError, match="of 3 rollouts have an outcome"):
            publish(folder, target, IDS, "a")
        assert not target.exists()
        return
    report = publish(folder, target, IDS, "a")
    lines = list(read_trajectories(target))
    assert sorted(each.rollout_id for each in lines) == list(IDS)
    assert (report.total, report.finished) == (3, 3)
    assert published(target, IDS) == report
    assert [path.name for path in target.parent.iterdir()] == ["part.jsonl"]
    assert not folder.exists()


def test_results_that_are_there_are_counted_and_stay(tmp_path: Path) -> None:
    target = tmp_path / "results.jsonl"
    fill(tmp_path / "part", "a", *[line(each, Scored(1.0)) for each in IDS])
    before = publish(tmp_path / "part", target, IDS, "a")
    text = target.read_bytes()
    fill(tmp_path / "part", "b", *[line(each, Scored(0.0)) for each in IDS])
    assert publish(tmp_path / "part", target, IDS, "b") == before
    assert target.read_bytes() == text


@pytest.mark.parametrize("after", [0, 1], ids=["before the choice", "between choice and copy"])
def test_player_who_comes_second_in_publishing_counts_what_the_first_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    folder, target = tmp_path / "part", tmp_path / "results.jsonl"
    fill(folder, "a", *[line(each, Scored(1.0)) for each in IDS])
    reads, lines = [], parts._lines

    def slow(where: Path) -> Any:
        if len(reads) == after:
            shutil.copy(folder / "a.jsonl", target)
            shutil.rmtree(folder)
        reads.append(where)
        return lines(where)

    monkeypatch.setattr(parts, "_lines", slow)
    report = publish(folder, target, IDS, "b")
    assert (report.finished, report.scored) == (3, 3)
    assert len(list(read_trajectories(target))) == 3


# 4. which outcome counts


@pytest.mark.parametrize(
    ("first", "second", "counts"),
    [
        (line(outcome=Failed("StartFailed"), ended=1), line(outcome=Scored(1.0), ended=2), Scored(1.0)),
        (line(outcome=Scored(1.0), ended=1), line(outcome=Failed("StartFailed"), ended=2), Scored(1.0)),
        (line(outcome=Scored(1.0), ended=1), line(outcome=Scored(0.5), ended=2), Scored(0.5)),
        (
            line(outcome=Scored(1.0), ended=1),
            line(outcome=Failed("SandboxLost"), ended=2),
            Failed("SandboxLost"),
        ),
        (line(outcome=Failed("A"), ended=1), line(outcome=Failed("B"), ended=2), Failed("B")),
    ],
)
@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_finished_counts_before_failed_and_then_the_newest(
    tmp_path: Path, first: Trajectory, second: Trajectory, counts: Any, order: tuple[str, str]
) -> None:
    for player, each in zip(order, (first, second), strict=True):
        fill(tmp_path / "part", player, each)
    publish(tmp_path / "part", tmp_path / "results.jsonl", ["r-0"], "a")
    (found,) = read_trajectories(tmp_path / "results.jsonl")
    assert found.outcome == counts
