from agentfly.local.processes import reason_in


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
