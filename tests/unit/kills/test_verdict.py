"""What must be so after a strike."""

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.kills.matrix import Cell, Part, Phase, Strike, Work, chosen
from tests.kills.verdict import (
    Process,
    Seen,
    Struck,
    expected,
    has_turned,
    is_back,
    is_settled,
    judge,
    wrong_results,
    wrong_steps,
)

SAVED = Seen(phase="Running", attempt=1, checkpoint=5, resumed=2, step=5)
UNSAVED = Seen(phase="Running", attempt=1, checkpoint=2, resumed=2, step=3)


def cell(name: str) -> Cell:
    (found,) = chosen([name])
    return found


def struck(name: str, before: Seen, **more: Any) -> Struck:
    return Struck(cell(name), before, at=more.pop("at", 100.0), wall=more.pop("wall", 1000.0), **more)


@pytest.mark.parametrize(
    ("name", "before", "attempts", "restarts", "failures"),
    [
        ("run/running/operator/kill", SAVED, (0, 0), (0, 0), (0, 0)),
        ("run/preparing/operator/kill", Seen(), (0, 1), (0, 0), (0, 0)),
        ("cycle/suspending/broker/stop", SAVED, (0, 0), (0, 0), (0, 0)),
        ("run/running/head/kill", SAVED, (1, 1), (1, 1), (0, 0)),
        ("run/running/head/kill", UNSAVED, (1, 1), (1, 1), (1, 1)),
        ("run/running/head/kill", replace(UNSAVED, on_disk=3), (1, 1), (1, 1), (0, 1)),
        ("run/running/ray-worker/stop", SAVED, (1, 1), (1, 1), (0, 0)),
        ("run/running/head/delete", SAVED, (1, 1), (0, 0), (0, 0)),
        ("run/starting/ray-worker/delete", UNSAVED, (1, 1), (0, 0), (0, 0)),
        ("run/starting/head/kill", UNSAVED, (1, 1), (1, 1), (1, 1)),
        ("run/starting/server/kill", UNSAVED, (0, 1), (0, 1), (0, 1)),
        ("run/running/server/delete", SAVED, (1, 1), (1, 1), (0, 0)),
        ("cycle/suspending/head/kill", SAVED, (0, 0), (0, 1), (0, 0)),
        ("cycle/suspending/head/delete", UNSAVED, (0, 0), (0, 0), (0, 0)),
        ("job/running/rollout-worker/kill", Seen(), (0, 0), (0, 0), (0, 0)),
    ],
)
def test_counters_go_up_by_the_rules(
    name: str, before: Seen, attempts: Any, restarts: Any, failures: Any
) -> None:
    found = expected(cell(name), before)
    assert (found.attempts, found.restarts, found.failures) == (attempts, restarts, failures)


def test_every_cell_has_a_time() -> None:
    assert all(expected(each, SAVED).within_s > 60 for each in chosen(["*"]))


OLD, NEW = Process("a", 0, True, 990.0), Process("b", 0, True, 1001.0)


@pytest.mark.parametrize(
    ("strike", "now", "back"),
    [
        ("kill", OLD, False),
        ("kill", Process("a", 1, False, 990.0), False),
        ("kill", Process("a", 1, True, 990.0), False),  # it does not lead yet
        ("kill", Process("a", 1, True, 1001.0), True),
        ("delete", NEW, True),
        ("stop", OLD, False),
        ("stop", Process("a", 0, True, 1001.0), True),
    ],
)
def test_an_operator_is_back_when_it_leads_again(strike: str, now: Process, back: bool) -> None:
    found = struck(f"run/running/operator/{strike}", Seen(operator=OLD))
    assert is_back(found, Seen(at=130.0, operator=now)) is back


def test_who_stands_still_is_not_back() -> None:
    found = struck("run/running/broker/stop", Seen(broker=OLD), at=math.inf)
    assert not is_back(found, Seen(at=130.0, broker=OLD))


def test_a_run_has_turned_when_its_next_attempt_is_numbered() -> None:
    found = struck("run/running/head/kill", SAVED)
    assert not has_turned(found, Seen(phase="Restarting", attempt=1))
    assert has_turned(found, Seen(phase="Starting", attempt=2))
    assert has_turned(struck("cycle/suspending/head/kill", SAVED), Seen(phase="Suspended", attempt=1))
    early = struck("run/starting/server/kill", Seen(phase="Starting", attempt=1, server=""))
    assert not has_turned(early, Seen(phase="Starting", attempt=1, server=""))
    assert has_turned(early, Seen(phase="Starting", attempt=1, server="s2"))


def test_a_run_is_back_with_a_step_of_the_new_attempt() -> None:
    found = struck("run/running/head/kill", SAVED, turned=Seen(attempt=2))
    assert not is_settled(found, Seen(at=120.0, phase="Starting", attempt=2, resumed=5, step=5))
    assert is_settled(found, Seen(at=150.0, phase="Running", attempt=2, resumed=5, step=6))
    assert not is_settled(struck("run/running/head/kill", SAVED), Seen(at=150.0, phase="Running", step=6))


def test_a_suspended_run_has_given_everything_back() -> None:
    found = struck("cycle/suspending/head/kill", SAVED, turned=Seen())
    assert not is_settled(found, Seen(at=110.0, phase="Suspended", pool=True))
    assert not is_settled(found, Seen(at=110.0, phase="Suspended", trainers=frozenset("t")))
    assert is_settled(found, Seen(at=110.0, phase="Suspended"))


def test_a_run_goes_on_after_an_operator() -> None:
    back = Seen(at=120.0, phase="Running", step=8)
    found = struck("run/running/operator/kill", SAVED, turned=back, back=back)
    assert not is_settled(found, Seen(at=130.0, phase="Running", step=9))
    assert is_settled(found, Seen(at=130.0, phase="Running", step=10))
    away = struck("run/running/operator/kill", SAVED, turned=back)
    assert not is_settled(away, Seen(at=130.0, phase="Running", step=20))
    rests = struck("cycle/suspended/broker/kill", SAVED, turned=back, back=back)
    assert not is_settled(rests, Seen(at=121.0, phase="Suspended"))
    assert is_settled(rests, Seen(at=124.0, phase="Suspended"))


def ids(number: int) -> frozenset[str]:
    return frozenset(f"r{n}" for n in range(number))


def test_a_job_goes_on_with_another_player_of_the_shard() -> None:
    before = Seen(phase="Running", workers={2: "w1"}, finished=ids(4), server="s")
    found = struck("job/running/rollout-worker/kill", before, turned=before, shard=2)
    assert not is_settled(found, Seen(at=110.0, phase="Running", finished=ids(9)))
    assert not is_settled(found, Seen(at=110.0, phase="Running", workers={2: "w2"}, finished=ids(5)))
    assert is_settled(found, Seen(at=110.0, phase="Running", workers={2: "w2"}, finished=ids(6)))
    assert is_settled(found, Seen(at=110.0, phase="Running", done=1, finished=ids(6)))
    assert is_settled(found, Seen(at=110.0, phase="Succeeded", finished=ids(5)))
    lost = struck("job/running/server/kill", before, turned=before)
    assert not is_settled(lost, Seen(at=110.0, phase="Running", server="s", finished=ids(9)))
    assert is_settled(lost, Seen(at=110.0, phase="Running", server="s2", finished=ids(9)))


def test_a_right_cell_has_no_words() -> None:
    found = struck("run/running/head/kill", SAVED, turned=Seen(attempt=2, restarts=1, checkpoint=6))
    later = Seen(at=150.0, phase="Running", attempt=3, restarts=2, failures=1, checkpoint=7)
    assert judge(found, later, [], True) == ""


@pytest.mark.parametrize(
    ("now", "wrongs", "in_time", "told"),
    [
        (
            Seen(attempt=3, restarts=1, checkpoint=6),
            [],
            True,
            "attempt: 1 became 3, by the rules it goes up by 1",
        ),
        (
            Seen(attempt=2, restarts=0, checkpoint=6),
            [],
            True,
            "restarts: 0 became 0, by the rules it goes up by 1",
        ),
        (
            Seen(attempt=2, restarts=1, failures=1, checkpoint=6),
            [],
            True,
            "failures: 0 became 1, by the rules it goes up by 0",
        ),
        (Seen(attempt=2, restarts=1, checkpoint=4), [], True, "the checkpoint is of step 4, it was of 5"),
        (Seen(attempt=2, restarts=1, checkpoint=6), ["pods of two attempts"], True, "pods of two attempts"),
        (
            Seen(at=580.0, phase="Starting", attempt=2, restarts=1, checkpoint=6, step=6),
            [],
            False,
            "not where it must be after 480 s: Starting, attempt 2, step 6, 0 rollouts",
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_numbers(
    now: Seen, wrongs: list[str], in_time: bool, told: str
) -> None:
    assert judge(struck("run/running/head/kill", SAVED), now, wrongs, in_time) == told


def test_what_was_finished_stays_finished() -> None:
    before = Seen(finished=frozenset({"a", "b"}))
    found = struck("job/running/rollout-worker/kill", before)
    assert judge(found, Seen(finished=frozenset({"b", "c"})), [], True) == (
        "1 finished rollouts are lost, such as a"
    )
    assert judge(found, Seen(finished=before.finished, failed_rollouts=2), [], True) == "2 rollouts failed"


def line(attempt: int, step: int) -> dict[str, int]:
    return {"attempt": attempt, "step": step}


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], ""),
        ([line(1, 1), line(1, 2), line(2, 3)], ""),
        ([line(1, 1), line(1, 2), line(2, 2), line(2, 3)], ""),  # the checkpoint was of step 1
        ([line(1, 1), line(1, 3)], "step 3 of attempt 1 stands after step 1"),
        ([line(1, 1), line(2, 3)], "step 3 of attempt 2 stands after step 1"),
        ([line(1, 1), line(1, 1)], "step 1 of attempt 1 stands after step 1"),
        ([line(1, 2)], "step 2 of attempt 1 stands after step 0"),
        ([line(2, 1), line(1, 2)], "step 2 of attempt 1 stands after attempt 2"),
    ],
)
def test_steps_follow_one_another(lines: list[dict[str, int]], told: str) -> None:
    assert wrong_steps(lines) == told


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (["a", "b"], ""),
        (["a", "b", "b"], "1 rollouts stand in the results more than once"),
        (["a"], "the results have 1 rollouts, not 2"),
    ],
)
def test_results_have_each_rollout_once(found: list[str], told: str) -> None:
    assert wrong_results(found, 2) == told


def test_strikes_are_of_parts() -> None:
    assert {each.part for each in chosen(["run/running/*"])} == set(Part) - {Part.WORKER}
    assert {each.strike for each in chosen(["run/running/engine/*"])} == {Strike.STOP, Strike.KILL}
    assert {each.phase for each in chosen(["job/*"])} == {Phase.STARTING, Phase.RUNNING, Phase.LAST}
    assert {each.work for each in chosen(["*"])} == set(Work)
