from pathlib import Path

import pytest

from agentfly.api.reasons import Reason
from agentfly.api.trainingrun import TrainingRunPolicy
from agentfly.roles.life import (
    Clock,
    Ended,
    Verdict,
    after_attempt,
    begin_attempt,
    close_attempt,
    is_closed,
    newer_attempt,
    overdue,
    read_failure,
    take_head,
    write_failure,
)

CASES = {
    "success ends the run": (Ended(0, False, True), 2, 3, Verdict("Succeeded", 2)),
    "1. a suspension that was asked for is no failure": (
        Ended(85, True, True),
        2,
        3,
        Verdict("Suspended", 2),
    ),
    "2. a failure without a new checkpoint counts": (
        Ended(1, False, False),
        0,
        3,
        Verdict("Restarting", 1, 10),
    ),
    "2. a failure after a new checkpoint does not count": (
        Ended(1, False, True),
        3,
        3,
        Verdict("Restarting", 3, 10),
    ),
    "2. one failure more than the limit fails the run": (Ended(-9, False, False), 3, 3, Verdict("Failed", 4)),
    "2. a limit of zero fails at once": (Ended(1, False, False), 0, 0, Verdict("Failed", 1)),
    "3. the pause doubles": (Ended(1, False, False), 2, 9, Verdict("Restarting", 3, 40)),
    "3. the pause has a bound": (Ended(1, False, False), 20, 99, Verdict("Restarting", 21, 360)),
    "4. what would fail again is not tried again": (Ended(87, False, True), 0, 9, Verdict("Failed", 1)),
}


@pytest.mark.parametrize(("ended", "failures", "limit", "want"), CASES.values(), ids=CASES.keys())
def test_after_attempt(ended: Ended, failures: int, limit: int, want: Verdict) -> None:
    assert after_attempt(ended, failures, limit) == want


# 4. why an attempt of many would fail is kept for each


def test_why_an_attempt_was_invalid_is_read_as_written_and_of_no_other_attempt(tmp_path: Path) -> None:
    write_failure(tmp_path, 2, Reason.DriftExceeded, "maxDriftFraction: too much")
    assert read_failure(tmp_path, 2) == (Reason.DriftExceeded, "maxDriftFraction: too much")
    assert read_failure(tmp_path, 1) is None


# 5. an earlier attempt can learn that it is over


def test_the_newest_attempt_stays_the_newest(tmp_path: Path) -> None:
    assert newer_attempt(tmp_path, 1) is None
    assert begin_attempt(tmp_path, 2) is None
    assert begin_attempt(tmp_path, 1) == 2
    assert (newer_attempt(tmp_path, 1), newer_attempt(tmp_path, 2)) == (2, None)
    assert begin_attempt(tmp_path, 10) is None
    assert (newer_attempt(tmp_path, 2), newer_attempt(tmp_path, 10)) == (10, None)
    assert [path.name for path in (tmp_path / "control").iterdir()] == ["attempt"]


def test_half_a_file_says_nothing(tmp_path: Path) -> None:
    write_failure(tmp_path, 1, Reason.InvalidSpec, "x")
    (tmp_path / "control" / "failure-1.json").write_text('{"reason": "Inv')
    assert read_failure(tmp_path, 1) is None


# 6. one head, and the pods with which it began


def test_an_attempt_has_the_head_that_came_first(tmp_path: Path) -> None:
    begin_attempt(tmp_path, 1)
    assert take_head(tmp_path, 1, "head-a", "uid-a") is None
    assert take_head(tmp_path, 1, "head-a", "uid-a") is None
    assert take_head(tmp_path, 1, "head-b", "uid-b") == "head-a"
    assert take_head(tmp_path, 1, "head-a", "uid-b") == "head-a"  # of the same name, and another pod
    assert take_head(tmp_path, 2, "head-b", "uid-b") is None
    (tmp_path / "control" / "head-3").touch()  # its writer was killed
    assert take_head(tmp_path, 3, "head-c", "uid-c") == "of another name"


def test_an_attempt_is_closed_by_itself_alone(tmp_path: Path) -> None:
    begin_attempt(tmp_path, 2)
    assert not is_closed(tmp_path, 2)
    close_attempt(tmp_path, 2)
    assert (is_closed(tmp_path, 2), is_closed(tmp_path, 3)) == (True, False)


# 7. a hang is found by the lack of progress

POLICY = TrainingRunPolicy(
    startup_deadline_seconds=100, stall_timeout_seconds=50, active_deadline_seconds=1000
)
OVERDUE = {
    "before the first step the start-up deadline counts": (Clock(99, 0, None, None, 0, None), None),
    "a start that takes too long": (Clock(100, 0, None, None, 0, None), Reason.StartupDeadlineExceeded),
    "steps go on": (Clock(149, 0, 90, 100, 0, None), None),
    "a step that takes too long": (Clock(150, 0, 90, 100, 0, None), Reason.NoProgress),
    "the time of all attempts together": (Clock(190, 0, 90, 185, 900, None), Reason.DeadlineExceeded),
    "start-up does not count as running": (Clock(185, 0, 90, 185, 900, None), None),
    "a suspension waits for its checkpoint": (Clock(120, 0, 90, 100, 0, 71), None),
    "a checkpoint that does not come": (Clock(121, 0, 90, 100, 0, 71), Reason.SaveFailed),
}


@pytest.mark.parametrize(("clock", "want"), OVERDUE.values(), ids=OVERDUE.keys())
def test_overdue(clock: Clock, want: Reason | None) -> None:
    found = overdue(clock, POLICY)
    assert (found[0] if found else None) == want


def test_a_run_without_active_deadline_may_run_for_ever() -> None:
    policy = TrainingRunPolicy(stall_timeout_seconds=50)
    assert overdue(Clock(1e9, 0, 90, 1e9 - 1, 1e9, None), policy) is None
