"""What a failed role left says why."""

import pytest

from agentfly.api.reasons import Reason
from agentfly.roles.failure import reason_in, why
from agentfly.roles.trainer import EXIT_STALLED


def test_the_reason_is_the_last_error_line(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "start\nValueError: first\n  at line 3\nray.exceptions.ActorDiedError: the actor died\nbye\n"
    )
    assert reason_in(log) == "ray.exceptions.ActorDiedError: the actor died"


def test_warnings_of_good_runs_are_no_reason(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "UserWarning: veomni engine is not available: ModuleNotFoundError: No module\nlast words\n"
    )
    assert reason_in(log) == "last words"


def test_without_a_log_it_says_so(tmp_path):
    assert reason_in(tmp_path / "none") == "it printed nothing"


def test_hints_are_no_reason(tmp_path):
    log = tmp_path / "log"
    log.write_text("start\n12:00 ERROR agentfly: tasks: there is none\n  hint: check the limit\n")
    assert reason_in(log) == "12:00 ERROR agentfly: tasks: there is none"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (1, Reason.AttemptFailed),
        (-9, Reason.Interrupted),
        (137, Reason.Interrupted),
        (EXIT_STALLED, Reason.NoProgress),
    ],
)
def test_an_exit_code_without_a_reason_of_its_own_gets_one(tmp_path, code, reason):
    log = tmp_path / "trainer-1.log"
    log.write_text("RuntimeError: weights\n")
    assert why(code, log) == (
        reason,
        f"trainer: exit code {code}: RuntimeError: weights; read {log}",
    )
