"""One shard of a rollout job; the numbers are the module's guarantees."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly import worker
from agentfly.api import Rollout
from agentfly.api.reasons import Reason
from agentfly.launch import shard
from agentfly.launch.tasks import tasks_file
from agentfly.models import Sampled
from agentfly.resources.errors import PoolNotFound
from agentfly.roles.launch import Report, ShardLaunch
from agentfly.roles.worker import EXIT_BUDGET, EXIT_STOPPED, RolloutWorkerConfig
from agentfly.rollout import Failed, read_trajectories
from tests.unit.rollout import toys
from tests.unit.rollout.toys import ToyTokenizer

AGENT = """
from agentfly import Agent, reward

@reward
def judge(ctx, good: float | None) -> float:
    if good is None:
        raise ValueError("broken")
    return good

agent = Agent(reward=judge, prompt="do {good}")
"""
TOKENIZER = ToyTokenizer(toys.grouping)


class World:
    """What a pod has around it: broker and servers.

    Attributes:
        seeds: of every draw, by rollout.
        cut: before which draw from now on the pod is asked to stop; None: never.
        die: before which draw a server of the policy goes; None: never.
        late: how often the broker does not know the policy's pool yet.
    """

    def __init__(self) -> None:
        self.seeds: dict[str, int | None] = {}
        self.urls: set[str] = set()
        self.leases: list[SimpleNamespace] = []
        self.closed = 0
        self.late = 0
        self.cut: int | None = None
        self.die: int | None = None
        self.said: Report | None = None

    async def draw(self, url: str, request_id: str, seed: int | None) -> None:
        self.urls.add(url)
        if self.cut is not None:
            self.cut -= 1
            if self.cut < 0:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(30)
        if self.die is not None:
            self.die -= 1
            if self.die < 0:
                self.leases[0].lost = True
                raise ConnectionError("the server is gone")
        self.seeds[request_id.rsplit(".", 4)[0]] = seed


WORLD = World()


class Server:
    def __init__(self, url: str) -> None:
        self.url = url

    async def generate(
        self, prompt_ids: Any, sampling: Any, *, request_id: str, deadline: float, images: Any = ()
    ) -> Sampled:
        await WORLD.draw(self.url, request_id, sampling.seed)
        return toys.sampled(
            [*TOKENIZER.encode("done", add_special_tokens=False), TOKENIZER.eos_token_id or 0]
        )

    async def close(self) -> None:
        pass


class Broker:
    """Has two members of the policy, of which it leases as many as are asked for."""

    def __init__(self, address: str, share: str = "") -> None:
        assert (address, share) == ("http://broker", "job")

    async def __aenter__(self) -> "Broker":
        return self

    async def __aexit__(self, *_: object) -> None:
        WORLD.closed += 1

    async def acquire_many(self, requests: Any, owner: str, *, deadline: float) -> list[Any]:
        assert {request.pool_or_spec for request in requests} == {"job-policy"}
        assert {request.scope for request in requests} == {"global"}
        assert len({request.key for request in requests}) == len(requests)
        if WORLD.late:
            WORLD.late -= 1
            raise PoolNotFound("pool job-policy: does not exist")
        WORLD.leases = [
            SimpleNamespace(
                base_url=f"http://server-{number % 2}",
                lost=False,
                info=SimpleNamespace(lease_id=f"lease-{number}", address=f"http://server-{number % 2}"),
            )
            for number in range(len(requests))
        ]
        return WORLD.leases

    async def heartbeat(self, lease_ids: Any) -> dict[str, bool]:
        return {lease.info.lease_id: not lease.lost for lease in WORLD.leases}


@contextlib.contextmanager
def pods(folder: Path) -> Iterator[Any]:
    """Runs a shard in a pod; returns the exit code."""
    (folder / "agent.py").write_text(AGENT)
    transformers = types.ModuleType("transformers")
    transformers.AutoTokenizer = SimpleNamespace(from_pretrained=lambda _: TOKENIZER)  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "transformers", transformers)
        patch.setattr(worker, "VLLMModel", Server)
        patch.setattr(shard, "BrokerClient", Broker)
        patch.setattr(shard, "LOOK_S", 0.02)
        patch.setattr(shard, "tell", lambda report: setattr(WORLD, "said", report))

        def run(index: int, pod: str, *, per: int = 2, budget: float = 1.0, **changes: Any) -> int:
            config = RolloutWorkerConfig(
                run_dir=folder, model_path=folder, agent_entrypoint="agent.py:agent", base_dir=folder,
                rollout=Rollout(group_size=2, concurrency=2), failure_budget=budget, **changes,
            )  # fmt: skip
            launch = ShardLaunch(
                worker=config, job="job", broker="http://broker", policy="job-policy", servers=3,
                servers_deadline_s=5, tasks_per_shard=per,
            )  # fmt: skip
            (folder / "launch.json").write_text(launch.model_dump_json(by_alias=True))
            patch.setenv("JOB_COMPLETION_INDEX", str(index))
            patch.setenv("POD_NAME", pod)
            return shard.main(["--launch", str(folder / "launch.json")])

        yield run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    WORLD.__init__()  # type: ignore[misc]
    with pods(tmp_path) as run:
        yield run


def tasks(folder: Path, *good: float | None) -> None:
    tasks_file(folder).write_text("".join(json.dumps({"good": value}) + "\n" for value in good))


def results(folder: Path) -> Counter[str]:
    files = (folder / "results").glob("*.jsonl")
    return Counter(line.rollout_id for file in files for line in read_trajectories(file))


# 1. ids and seeds


def test_how_a_job_is_cut_decides_neither_ids_nor_seeds(run: Any, tmp_path: Path) -> None:
    drawn = []
    for per in (1, 2, 5):
        folder = tmp_path / str(per)
        folder.mkdir()
        tasks(folder, 0.0, 0.5, 0.5, 1.0, 0.25)
        WORLD.seeds = {}
        with pods(folder) as run_there:
            for index in range(-(-5 // per)):
                assert run_there(index, f"pod-{index}", per=per, seed=7) == 0
        assert set(results(folder).values()) == {1}
        assert set(results(folder)) == set(WORLD.seeds)
        drawn.append(WORLD.seeds)
    assert len(drawn[0]) == 10
    assert drawn[0] == drawn[1] == drawn[2]


# 2. going on


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_shard_that_is_stopped_anywhere_is_played_to_its_end_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    WORLD.__init__()  # type: ignore[misc]
    tasks(folder, 0.0, 0.5, 1.0)
    with pods(folder) as run:
        for life in range(data.draw(st.integers(0, 3))):
            WORLD.cut = data.draw(st.integers(0, 5))
            pod = data.draw(st.sampled_from(["pod-a", f"pod-{life}"]))
            assert run(0, pod, per=3) in (0, EXIT_STOPPED)
            own = folder / "shards" / "00000" / f"{pod}.jsonl"
            if own.exists() and data.draw(st.booleans()):
                with own.open("ab") as file:  # a pod that was killed in the middle of a line
                    file.write(b'{"schema": "agentfly.tra')
        WORLD.cut = None
        assert run(0, "pod-z", per=3) == 0
        assert WORLD.said is not None
        assert WORLD.said.shard is not None
        assert (WORLD.said.shard.total, WORLD.said.shard.scored, WORLD.said.shard.reward_mean) == (6, 6, 0.5)
    assert sorted(results(folder).values()) == [1] * 6


def test_finished_rollouts_of_another_pod_are_not_played_again(run: Any, tmp_path: Path) -> None:
    tasks(tmp_path, 0.0, 1.0)
    WORLD.cut = 2
    assert run(0, "pod-a") == EXIT_STOPPED
    before = dict(WORLD.seeds)
    WORLD.cut, WORLD.seeds = None, {}
    assert run(0, "pod-b") == 0
    assert len(before) == 2
    assert not set(before) & set(WORLD.seeds)


def test_published_shard_is_counted_and_not_played_again(run: Any, tmp_path: Path) -> None:
    tasks(tmp_path, 0.0, 1.0)
    assert run(0, "pod-a") == 0
    first, WORLD.seeds = WORLD.said, {}
    assert run(0, "pod-b") == 0
    assert WORLD.said == first
    assert WORLD.seeds == {}


# 3. how it ends


def test_termination_message_has_the_counts(run: Any, tmp_path: Path) -> None:
    tasks(tmp_path, 0.25, None, 1.0)
    assert run(0, "pod-a") == 0
    assert WORLD.said is not None
    report = WORLD.said.shard
    assert report is not None
    assert (report.total, report.scored, report.failed, report.reward_mean) == (
        4,
        2,
        {"RewardError": 2},
        0.25,
    )
    assert Report.read(WORLD.said.termination_message()) == WORLD.said


@pytest.mark.parametrize(("budget", "code"), [(0.5, 0), (0.2, EXIT_BUDGET)])
def test_budget_of_the_job_ends_a_shard_that_alone_exceeds_it(
    run: Any, tmp_path: Path, budget: float, code: int
) -> None:
    tasks(tmp_path, None, None, 1.0, 1.0)  # a shard of failures is half of the job
    assert run(0, "pod-a", budget=budget) == code
    assert WORLD.said is not None
    assert WORLD.said.shard is not None
    if code:
        assert WORLD.said.reason == Reason.FailureBudgetExceeded
        assert WORLD.said.shard.failed["RewardError"] >= 2
        assert not (tmp_path / "results").exists()


def test_stop_keeps_what_is_finished_and_says_so(run: Any, tmp_path: Path) -> None:
    tasks(tmp_path, 0.0, 1.0)
    WORLD.cut = 3
    assert run(0, "pod-a") == EXIT_STOPPED
    assert WORLD.said is not None
    assert WORLD.said.reason == Reason.Interrupted
    assert len(list(read_trajectories(tmp_path / "shards" / "00000" / "pod-a.jsonl"))) >= 2


@pytest.mark.parametrize("wrong", ["no tasks", "beyond", "no agent"])
def test_shard_that_cannot_be_read_ends_with_1(run: Any, tmp_path: Path, wrong: str) -> None:
    if wrong != "no tasks":
        tasks(tmp_path, 1.0)
    if wrong == "no agent":
        (tmp_path / "agent.py").unlink()
    assert run(5 if wrong == "beyond" else 0, "pod-a") == 1
    assert WORLD.said is not None
    assert WORLD.said.exit_code == 1
    assert WORLD.said.message


# 4. servers


def test_servers_of_all_keys_are_used_each_once(run: Any, tmp_path: Path) -> None:
    tasks(tmp_path, *[1.0] * 8)
    assert run(0, "pod-a", per=8) == 0
    assert WORLD.urls == {"http://server-0", "http://server-1"}
    assert len(WORLD.leases) == 3


def test_server_that_goes_ends_the_pod_and_its_failures_are_played_again(run: Any, tmp_path: Path) -> None:
    tasks(tmp_path, 0.0, 1.0)
    WORLD.die = 1
    assert run(0, "pod-a", budget=0.0) == 1
    assert WORLD.said is not None
    assert "policy: its server http://server-0 is gone" in WORLD.said.message
    WORLD.die = None
    assert run(0, "pod-b", budget=0.0) == 0
    (file,) = (tmp_path / "results").glob("*.jsonl")
    assert not any(isinstance(line.outcome, Failed) for line in read_trajectories(file))


# 5. a pool that comes late


@pytest.mark.parametrize(("late", "code"), [(3, 0), (10_000, 1)])
def test_pool_of_the_policy_that_is_not_there_yet_is_waited_for(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int, code: int
) -> None:
    tasks(tmp_path, 1.0)
    WORLD.late = late
    if code:
        monkeypatch.setattr(shard, "LOOK_S", 5.0)  # longer than there is time for
    assert run(0, "pod-a") == code
    assert WORLD.said.message == ("" if code == 0 else "pool job-policy: does not exist")


# 6. leases


def test_tokenizer_is_there_before_any_lease(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks(tmp_path, 1.0)
    leased: list[int] = []
    load = worker.reading_of
    monkeypatch.setattr(worker, "reading_of", lambda config: leased.append(len(WORLD.leases)) or load(config))
    assert run(0, "pod-a") == 0
    assert leased == [0]
    assert len(WORLD.leases) == 3


@pytest.mark.parametrize("cut", [None, 0, 3])
def test_leases_end_with_the_pod(run: Any, tmp_path: Path, cut: int | None) -> None:
    tasks(tmp_path, 0.0, 1.0)
    WORLD.cut = cut
    run(0, "pod-a")
    assert WORLD.closed == 1
