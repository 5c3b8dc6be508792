"""Sections follow the guarantees of `agentfly.local.top`."""

import asyncio
import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console, Group

from agentfly import cli
from agentfly.errors import AgentflyError
from agentfly.kube import RESOURCE_POOLS, ROLLOUT_JOBS, TRAINING_RUNS, KubeError, NotFound
from agentfly.local import top as module
from agentfly.local.top import Seen, follow, look, screen

Object = dict[str, Any]


def made(name: str, status: Object | None = None, **spec: Any) -> Object:
    return {"metadata": {"name": name}, "spec": spec, **({} if status is None else {"status": status})}


def condition(kind: str, message: str, status: str = "True", reason: str = "R") -> Object:
    return {"type": kind, "status": status, "message": message, "reason": reason}


RUNS = [
    made("done", {"phase": "Succeeded", "attempt": 1, "progress": {"step": 9, "totalSteps": 9}}, steps=9),
    made(
        "first",
        {
            "phase": "Running",
            "attempt": 2,
            "progress": {
                "step": 30, "totalSteps": 100, "etaSeconds": 754, "metrics": {"reward": "0.53125"}, "new": 1,
            },
            "conditions": [condition("Running", "steps"), condition("Stalled", "", "False")],
        },
        steps=100,
    ),
    made("new", steps=5),
    made(
        "stuck",
        {"phase": "Pending", "conditions": [condition("Stalled", "not there: Secret hub\nmore")]},
        steps=7,
    ),
]  # fmt: skip
TASKS = {"total": 40, "scored": 20, "masked": 2, "failed": 1}
JOBS = [
    made("look", {"phase": "Running", "tasks": TASKS, "reward": {"mean": "0.25"}, "workers": 3}),
    made("wait", {"phase": "Suspended", "conditions": [condition("Suspended", "on request")]}),
]
POOLS = [
    made(
        "shell",
        {
            "members": {"ready": 8, "leased": 5},
            "queue": {"pending": 2},
            "conditions": [condition("Ready", "fine")],
        },
        type="Container",
        capacity={"max": 16},
    ),
    made(
        "judge",
        {"conditions": [condition("Ready", "no node has a GPU", "False", "Unschedulable")]},
        type="ModelService",
        capacity={"max": 1},
    ),
]
SEEN = Seen("team", RUNS, JOBS, POOLS)
GOLDEN = """\
Run    Status       Step  Reward     ETA  Attempt
first  Running    30/100   0.531  12m34s        2
new    Pending       0/5       -       -        -
stuck  Pending       0/7       -       -        -  not there: Secret hub
done   Succeeded     9/9       -       -        1
Job   Status      Done  Reward  Failed  Workers
look  Running    23/40   0.250       1        3
wait  Suspended    0/-       -       0        0  on request
Pool   Type          Ready  Leased  Queued  Max
judge  ModelService      -       -       -    1  Unschedulable: no node has a GPU
shell  Container         8       5       2   16
"""


def text(shown: Group, width: int = 100) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(shown)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


class FakeKube:
    """Lists by resource, or an error for one."""

    def __init__(self, **failing: Exception) -> None:
        self.failing = failing
        self.asked: list[tuple[str, str | None]] = []

    async def list(self, resource: Any, namespace: str | None = None) -> list[Object]:
        self.asked.append((resource.plural, namespace))
        if resource.plural in self.failing:
            raise self.failing[resource.plural]
        return {TRAINING_RUNS: RUNS, ROLLOUT_JOBS: JOBS, RESOURCE_POOLS: POOLS}[resource]

    async def __aenter__(self) -> "FakeKube":
        return self

    async def __aexit__(self, *_: object) -> None: ...

    namespace = "of-the-context"


@pytest.fixture
def kube(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeKube], FakeKube]:
    def put(fake: FakeKube) -> FakeKube:
        monkeypatch.setattr(module.Kube, "connect", lambda *_, **__: fake)
        return fake

    return put


# 1. one screen, or one table a kind; 2. what goes on stands first


def test_a_namespace_has_this_screen() -> None:
    assert text(screen(SEEN)) == GOLDEN


def test_without_a_terminal_it_is_printed_once_and_as_wide_as_it_is(
    kube: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = kube(FakeKube())
    assert cli.main(["top", "-n", "team"]) == 0
    printed = capsys.readouterr().out
    assert "".join(f"{line.rstrip()}\n" for line in printed.splitlines()) == GOLDEN
    assert "\x1b" not in printed
    assert {where for _, where in fake.asked} == {"team"}
    assert cli.main(["top", "--once"]) == 0
    assert fake.asked[-1][1] == "of-the-context"


def test_a_kind_of_which_there_is_nothing_has_no_table() -> None:
    assert text(screen(Seen("team", jobs=JOBS))).splitlines()[0].startswith("Job")
    assert text(screen(Seen("team"))) == "namespace team: no runs, jobs or pools\n"


async def test_a_terminal_is_shown_the_newest_until_it_is_left() -> None:
    answers = [Seen("team", pools=POOLS), Seen("team", jobs=JOBS)]
    shown: list[str] = []

    async def again() -> Seen:
        if not answers:
            raise asyncio.CancelledError
        return answers.pop(0)

    with pytest.raises(asyncio.CancelledError):
        await follow(Seen("team"), again, lambda group: shown.append(text(group).split()[0]), 0.0)
    assert shown == ["namespace", "Pool", "Job"]


def test_a_terminal_has_its_own_screen_until_ctrl_c(kube: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(FakeKube):
        async def list(self, resource: Any, namespace: str | None = None) -> list[Object]:
            if len(self.asked) == 3:
                raise KeyboardInterrupt
            return await super().list(resource, namespace)

    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    kube(Interrupted())
    file = io.StringIO()
    module.top(Console(file=file, width=100, force_terminal=True))
    printed = file.getvalue()
    assert (
        printed.index("\x1b[?1049h") < printed.index("not there: Secret hub") < printed.index("\x1b[?1049l")
    )


# 3. as far as it is known


def test_objects_that_nobody_looked_at_yet_are_shown() -> None:
    seen = Seen("team", [made("r")], [made("j")], [made("p")])
    assert [line.split() for line in text(screen(seen)).splitlines()[1::2]] == [
        ["r", "Pending", "0/-", "-", "-", "-"],
        ["j", "Pending", "0/-", "-", "0", "0"],
        ["p", "-", "-", "-", "-", "-"],
    ]


def test_a_long_message_is_cut_at_the_edge_of_a_narrow_screen() -> None:
    lines = text(screen(SEEN), width=60).splitlines()
    assert len(lines) == len(GOLDEN.splitlines())
    assert all(len(line) <= 60 for line in lines)


# 4. an API server that does not answer


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (NotFound("no", status=404), "namespace team: its cluster does not know agentfly"),
        (KubeError("trainingruns: forbidden", status=403), "trainingruns: forbidden"),
    ],
)
def test_at_the_start_it_is_an_error(
    failure: Exception, said: str, kube: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    kube(FakeKube(trainingruns=failure))
    assert cli.main(["top", "-n", "team"]) == 2
    assert said in capsys.readouterr().err


async def test_later_it_is_told_below_what_was_seen_last() -> None:
    answers: list[Seen | Exception] = [AgentflyError("down"), Seen("team", jobs=JOBS)]
    shown: list[str] = []

    async def again() -> Seen:
        if not answers:
            raise asyncio.CancelledError
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(asyncio.CancelledError):
        await follow(SEEN, again, lambda group: shown.append(text(group)), 0.0)
    assert shown[0] == GOLDEN
    assert shown[1].startswith(GOLDEN)
    assert shown[1].endswith(" not answered: down\n")
    assert "not answered" not in shown[2]


# 5. three lists


async def test_a_look_is_three_lists() -> None:
    fake = FakeKube()
    found = await look(fake, "team")  # type: ignore[arg-type]
    assert found == SEEN
    assert fake.asked == [("trainingruns", "team"), ("rolloutjobs", "team"), ("resourcepools", "team")]
