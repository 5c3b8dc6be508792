"""Which cell is struck next."""

import pytest

from tests.kills.course import Here, Move, next_of, phase_of_job, phase_of_run
from tests.kills.matrix import Phase, Work, chosen


def named(*names: str, work: Work = Work.RUN, **here: object) -> list[str] | Move:
    found = next_of(work, chosen(names), Here(**here))  # type: ignore[arg-type]
    return found if isinstance(found, Move) else [cell.name for cell in found]


@pytest.mark.parametrize(
    ("phase", "attempt", "suspended_at", "found"),
    [
        ("Pending", 0, None, None),
        ("Starting", 0, None, Phase.PREPARING),
        ("Starting", 1, None, Phase.STARTING),
        ("Running", 1, None, Phase.RUNNING),
        ("Restarting", 1, None, None),
        ("Suspending", 1, None, Phase.SUSPENDING),
        ("Suspended", 1, None, Phase.SUSPENDED),
        ("Restarting", 1, 1, None),
        ("Starting", 2, 1, Phase.RESUMING),
        ("Starting", 3, 1, Phase.STARTING),
        ("Failed", 3, 1, None),
    ],
)
def test_the_phase_of_a_run(phase: str, attempt: int, suspended_at: int | None, found: Phase | None) -> None:
    assert phase_of_run(phase, attempt, suspended_at) is found


@pytest.mark.parametrize(
    ("phase", "shards", "done", "finished", "found"),
    [
        ("Starting", 0, 0, 0, None),  # its tasks are being read
        ("Starting", 4, 0, 0, Phase.STARTING),
        ("Running", 4, 0, 0, Phase.STARTING),
        ("Running", 4, 0, 1, Phase.RUNNING),
        ("Running", 4, 3, 60, Phase.LAST),
        ("Succeeded", 4, 4, 80, None),
    ],
)
def test_the_phase_of_a_job(phase: str, shards: int, done: int, finished: int, found: Phase | None) -> None:
    assert phase_of_job(phase, shards, done, finished) is found


def test_a_cell_is_struck_in_its_phase() -> None:
    names = ("run/running/head/kill", "run/starting/head/kill")
    assert named(*names, phase=Phase.STARTING) == ["run/starting/head/kill"]
    assert named(*names, phase=Phase.RUNNING) == ["run/running/head/kill"]
    assert named(*names, phase=None) is Move.WAIT


def test_nothing_is_struck_while_something_is_counted_or_away() -> None:
    name = "run/starting/head/kill"
    assert named(name, phase=Phase.STARTING, open=True, counting=True) is Move.WAIT
    assert named(name, phase=Phase.STARTING, away=True) is Move.WAIT
    assert named("run/starting/operator/kill", phase=Phase.STARTING, away=True) is Move.WAIT
    assert named(name, phase=Phase.STARTING, open=True) == [name]  # the start that follows another cell
    assert named("run/running/head/kill", phase=Phase.RUNNING, open=True) is Move.WAIT
    job = "job/running/rollout-worker/kill"
    assert named(job, work=Work.JOB, phase=Phase.RUNNING, open=True) is Move.WAIT


def test_a_start_is_struck_at_its_trainers_first_and_steps_at_what_costs_no_start() -> None:
    starting = named("run/starting/head/kill", "run/starting/broker/kill", phase=Phase.STARTING)
    assert starting == ["run/starting/head/kill", "run/starting/broker/kill"]
    running = named("run/running/head/kill", "run/running/broker/kill", phase=Phase.RUNNING)
    assert running == ["run/running/broker/kill", "run/running/head/kill"]
    last = named("job/last-shard/*/kill", work=Work.JOB, phase=Phase.LAST)
    assert last[0] == "job/last-shard/rollout-worker/kill"
    deleted = named("run/running/operator/*", phase=Phase.RUNNING)
    assert deleted[0] == "run/running/operator/delete"


@pytest.mark.parametrize(
    ("name", "phase", "move"),
    [
        ("run/starting/head/kill", Phase.RUNNING, Move.RENEW),
        ("run/preparing/operator/kill", Phase.RUNNING, Move.AGAIN),
        ("cycle/suspending/head/kill", Phase.RUNNING, Move.SUSPEND),
        ("cycle/suspended/broker/kill", Phase.RUNNING, Move.SUSPEND),
        ("cycle/resuming/head/kill", Phase.RUNNING, Move.SUSPEND),
        ("cycle/resuming/head/kill", Phase.SUSPENDED, Move.RESUME),
        ("cycle/suspending/head/kill", Phase.SUSPENDED, Move.RESUME),
        ("cycle/suspended/broker/kill", Phase.SUSPENDING, Move.WAIT),
        ("cycle/suspending/head/kill", Phase.STARTING, Move.WAIT),
    ],
)
def test_the_way_to_a_phase(name: str, phase: Phase, move: Move) -> None:
    work = Work(name.split("/", maxsplit=1)[0])
    assert named(name, work=work, phase=phase) is move
    if move is not Move.WAIT:
        assert named(name, work=work, phase=phase, open=True) is Move.WAIT
        assert named(name, work=work, phase=phase, away=True) is Move.WAIT


def test_without_cells_it_is_over() -> None:
    assert named(phase=Phase.RUNNING) is Move.END
    assert named(phase=Phase.RUNNING, open=True) is Move.WAIT
    assert named(work=Work.JOB, phase=Phase.RUNNING) is Move.WAIT
    assert named(work=Work.JOB, phase=None, over=True, open=True) is Move.WAIT
    assert named(work=Work.JOB, phase=None, over=True) is Move.END
    assert named("job/running/server/kill", work=Work.JOB, phase=None, over=True) is Move.AGAIN
