"""The head of a training run's pods. Numbers are those of head.py."""

import asyncio
import json
import threading

import aiohttp
import pytest

from agentfly.broker.client import BrokerClient
from agentfly.launch import follow, head
from agentfly.launch.attempt import log_file
from agentfly.resources.errors import Infra
from agentfly.resources.lease import Request
from agentfly.roles.launch import Report
from agentfly.roles.life import begin_attempt, is_closed, newer_attempt, take_head
from agentfly.roles.steps import read_steps
from agentfly.roles.trainer import TrainerConfig
from agentfly.training import checkpoints
from tests.unit.launch.attempts import (
    DEADLINE,
    POLICY,
    SLEEP,
    attempting,
    broker,
    checkpoint,
    config_of,
    gone,
    joined,
    leases,
    python,
    until,
)

STEPS = "for number in range(1, 6): step(number)"
# Makes a step, waits for the wish to suspend, makes another one and ends as the trainer does.
SUSPENDS = """
step(1)
wait_for(run / "control" / "suspend")
step(2)
(run / "control" / "suspended").write_text("2")
sys.exit(85)
"""
HANGS = "step(1); time.sleep(600)"
PID = "(run / 'pid').write_text(str(os.getpid())); "


async def asked(port: int) -> Report:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/state") as response:
        assert response.status == 200
        report = Report.read(await response.text())
        assert report is not None
        return report


# 1. GET /state says how it is; its end is the same report, and its exit code is the trainer's.


async def test_a_run_that_is_done(tmp_path):
    async with attempting(tmp_path, STEPS) as attempt:
        report = await attempt.ends()
        assert await asked(attempt.port) == report
    assert (report.attempt, report.phase, report.exit_code, report.reason) == (2, "Ended", 0, "")
    assert report.message == "all 5 steps are done"
    assert report.progress is not None
    assert report.progress.step == 5
    assert report.step_time == 1005.0
    assert not report.suspended


async def test_the_state_follows_the_steps(tmp_path):
    trainer = "wait_for(run / 'go'); step(1); time.sleep(600)"
    async with attempting(tmp_path, trainer) as attempt:
        await attempt.until("waiting for the first step")
        before = await asked(attempt.port)
        assert (before.phase, before.progress, before.step_time) == ("Starting", None, None)
        checkpoint(attempt.config, 1, ranks=1)
        (attempt.config.run_dir / "go").touch()
        await until(lambda: attempt.state.report.phase == "Running")
        report = await asked(attempt.port)
    assert (report.message, report.step_time) == ("", 1001.0)
    assert report.progress is not None
    assert (report.progress.step, report.progress.total_steps) == (1, 5)
    assert report.checkpoint is not None
    assert (report.checkpoint.latest_step, report.checkpoint.ranks) == (1, 1)


async def test_steps_of_earlier_attempts_are_progress_and_no_step_of_this_one(tmp_path):
    config = config_of(tmp_path)
    config.run_dir.mkdir()
    config.metrics_file.write_text(json.dumps({"step": 3, "attempt": 1, "time": 5.0}) + "\n")
    async with attempting(tmp_path, "time.sleep(600)", config=config) as attempt:
        await attempt.until("waiting for the first step")
        report = await asked(attempt.port)
    assert (report.phase, report.step_time) == ("Starting", None)
    assert report.progress is not None
    assert report.progress.step == 3


async def test_a_trainer_that_fails_has_the_reason_of_its_log(tmp_path):
    async with attempting(tmp_path, "step(1); raise ValueError('the tensor is upside down')") as attempt:
        report = await attempt.ends()
    assert (report.phase, report.exit_code, report.reason) == ("Ended", 1, "AttemptFailed")
    log = log_file(attempt.config, "trainer")
    assert report.message == f"trainer: exit code 1: ValueError: the tensor is upside down; read {log}"
    assert report.progress is not None
    assert report.progress.step == 1


@pytest.mark.parametrize(
    ("ends", "code", "reason"),
    [
        ("sys.exit(86)", 86, "NoProgress"),
        ("os.kill(os.getpid(), 9)", 137, "Interrupted"),
        ("sys.exit(85)", 85, "AttemptFailed"),  # nobody had asked
    ],
)
async def test_other_ends_of_a_trainer(tmp_path, ends, code, reason):
    async with attempting(tmp_path, ends) as attempt:
        report = await attempt.ends()
    assert (report.exit_code, report.reason, report.suspended) == (code, reason, False)


async def test_failed_rollouts_are_the_reason_of_an_attempt_that_may_be_followed_by_another(tmp_path):
    trainer = """
from agentfly.api.reasons import Reason
from agentfly.roles.life import write_failure
write_failure(run, attempt, Reason.FailureBudgetExceeded, "9 of 16 failed")
sys.exit(1)
"""
    async with attempting(tmp_path, trainer) as attempt:
        report = await attempt.ends()
    assert (report.exit_code, report.reason, report.message) == (1, "FailureBudgetExceeded", "9 of 16 failed")


async def test_what_would_fail_again_has_the_trainers_own_words(tmp_path):
    trainer = """
from agentfly.api.reasons import Reason
from agentfly.roles.life import write_failure
write_failure(run, attempt, Reason.DriftExceeded, "too much drift")
sys.exit(87)
"""
    async with attempting(tmp_path, trainer) as attempt:
        report = await attempt.ends()
    assert (report.exit_code, report.reason, report.message) == (87, "DriftExceeded", "too much drift")


# 2. The trainer starts when every pod has joined Ray and all servers are leased.


async def test_a_pod_that_did_not_join_is_named(tmp_path):
    barrier = joined(("run-trainer-2-1",), code=1)
    async with attempting(tmp_path, STEPS, barrier=barrier, barrier_s=60) as attempt:
        report = await attempt.ends()
    assert (report.exit_code, report.reason) == (1, "StartFailed")
    assert report.message == "pod run-trainer-2-1: did not join Ray within 60 s"
    assert not log_file(attempt.config, "trainer").exists()


async def test_pods_that_are_waited_for_are_in_the_state(tmp_path):
    barrier = joined(("run-trainer-2-0", "run-trainer-2-1"))
    slow = python(barrier[-1].replace("; sys.exit(0)", "; import time; time.sleep(600)"))
    async with attempting(tmp_path, STEPS, barrier=slow) as attempt:
        await attempt.until("waiting for run-trainer-2-0, run-trainer-2-1 to join Ray")


async def test_pods_whose_names_nobody_knows_are_counted(tmp_path):
    arguments = tmp_path / "arguments"
    waits = joined(("1 of 3 pods",), code=1)[-1]
    barrier = python(f"import sys; open({str(arguments)!r}, 'w').write(' '.join(sys.argv)); {waits}")
    config = config_of(tmp_path, nodes=3)
    async with attempting(tmp_path, STEPS, config=config, barrier=barrier, pods=(), barrier_s=60) as attempt:
        report = await attempt.ends()
    assert "--count 3 --missing" in arguments.read_text()
    assert "--pods" not in arguments.read_text()
    assert (report.reason, report.message) == ("StartFailed", "1 of 3 pods: did not join Ray within 60 s")


async def test_a_ray_that_does_not_answer_is_told(tmp_path):
    barrier = python("print('OSError: nobody is there'); raise SystemExit(1)")
    async with attempting(tmp_path, STEPS, barrier=barrier) as attempt:
        report = await attempt.ends()
    assert report.reason == "StartFailed"
    assert report.message.startswith("Ray: does not answer: OSError: nobody is there; read ")


async def test_a_ray_that_ends_while_the_pods_join_ends_the_attempt(tmp_path):
    ray = ("sh", "-c", "echo 'RuntimeError: no space'; exit 3")
    async with attempting(
        tmp_path, STEPS, ray=ray, barrier=python("import time; time.sleep(600)")
    ) as attempt:
        report = await attempt.ends()
    assert (report.exit_code, report.reason) == (1, "StartFailed")
    assert report.message.startswith("Ray: ended with exit code 3: RuntimeError: no space; read ")


async def test_a_ray_that_ends_under_the_trainer_ends_the_attempt(tmp_path):
    ray = ("sh", "-c", f"while [ ! -e {tmp_path}/run/metrics.jsonl ]; do sleep 0.05; done; exit 1")
    async with attempting(tmp_path, HANGS, ray=ray) as attempt:
        report = await attempt.ends()
    assert (report.exit_code, report.reason) == (1, "AttemptFailed")
    assert report.message.startswith("Ray: ended with exit code 1")


async def test_the_trainer_is_told_of_the_run_and_its_servers(tmp_path):
    trainer = "(run / 'env').write_text(json.dumps(dict(os.environ, folder=os.getcwd())))"
    async with attempting(tmp_path, trainer) as attempt:
        await attempt.ends()
    run = attempt.config.run_dir
    told = json.loads((run / "env").read_text())
    assert (told["AGENTFLY_JOB"], told["AGENTFLY_BROKER"]) == ("run", attempt.broker)
    assert (told["AGENTFLY_RUN_DIR"], told["folder"]) == (str(run), str(tmp_path))
    assert (told["RAY_ADDRESS"], told["VERL_PLATFORM"]) == ("127.0.0.1:6379", "cpu")
    members = sorted(member.address for member in attempt.runner.started.values())
    assert sorted(told["AGENTFLY_INFERENCE_URLS"].split(",")) == members
    assert TrainerConfig.model_validate_json(attempt.config.config_file.read_text()) == attempt.config


async def test_servers_that_do_not_come_are_told_and_the_trainer_is_not_started(tmp_path):
    async with attempting(tmp_path, STEPS, servers=3, servers_deadline_s=0.5) as attempt:
        report = await attempt.ends()
    assert (report.exit_code, report.reason) == (1, "StartFailed")
    assert "run-policy" in report.message
    assert not log_file(attempt.config, "trainer").exists()


async def test_a_trainer_that_serves_the_policy_itself_waits_for_no_server(tmp_path):
    trainer = "(run / 'urls').write_text(os.environ['AGENTFLY_INFERENCE_URLS'])"
    async with attempting(tmp_path, trainer, servers=0, at="http://127.0.0.1:9") as attempt:
        await attempt.ends()
    assert (attempt.config.run_dir / "urls").read_text() == ""


async def test_a_server_that_is_lost_ends_the_attempt(tmp_path):
    async with attempting(tmp_path, HANGS, ttl=1.0) as attempt:
        await until(lambda: attempt.state.report.phase == "Running")
        async with BrokerClient(attempt.broker, token="any") as other:
            await other.release_owner("run")
        report = await attempt.ends()
    assert (report.exit_code, report.reason) == (1, "AttemptFailed")
    assert report.message.startswith("the policy's server-")
    assert report.message.endswith(": its lease is lost")


async def test_an_attempt_after_one_that_was_killed_has_its_servers_at_once(tmp_path):
    async with broker(ttl=600.0) as (_, address), BrokerClient(address, token="any") as killed:
        wanted = [Request(POLICY, f"server-{number}") for number in range(2)]
        held = await killed.acquire_many(wanted, "run", attempt=1, deadline=DEADLINE)
        async with attempting(tmp_path, STEPS, at=address) as attempt:
            assert (await attempt.ends()).exit_code == 0
        # Whoever comes to life again has nothing, and gets nothing.
        assert set((await killed.heartbeat([lease.info.lease_id for lease in held])).values()) == {False}


async def test_servers_of_another_run_of_the_same_name_are_left_alone(tmp_path):
    async with broker(ttl=600.0) as (_, address), BrokerClient(address, token="any") as other:
        await other.acquire(POLICY, "run-0f", key="server-0", attempt=1, deadline=DEADLINE)
        async with attempting(tmp_path, STEPS, at=address, servers=1) as attempt:
            assert (await attempt.ends()).exit_code == 0
        assert [lease.owner for lease in await other.leases()] == ["run-0f"]


async def test_a_server_that_is_lost_is_noticed_long_before_its_lease_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(head, "BEAT_S", 0.1)
    async with attempting(tmp_path, HANGS, ttl=600.0) as attempt:
        await until(lambda: attempt.state.report.phase == "Running")
        attempt.runner.kill(next(iter(attempt.runner.existing)))
        assert (await attempt.ends()).message.endswith(": its lease is lost")


async def test_a_broker_that_is_away_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(head, "BEAT_S", 0.1)
    asked = 0

    async def heartbeat(self, lease_ids):
        nonlocal asked
        asked += 1
        raise Infra("nobody answers")

    monkeypatch.setattr(BrokerClient, "heartbeat", heartbeat)
    async with attempting(tmp_path, "step(1); wait_for(run / 'go')", ttl=600.0) as attempt:
        await until(lambda: asked > 3)
        (attempt.config.run_dir / "go").touch()
        assert (await attempt.ends()).exit_code == 0


# 3. Asked to suspend, it lets the trainer end by itself; before there is a trainer it ends at once.


@pytest.mark.parametrize("how", ["annotation", "signal"])
async def test_asked_to_suspend_the_trainer_writes_its_checkpoint(tmp_path, how):
    async with attempting(tmp_path, SUSPENDS) as attempt:
        await until(lambda: attempt.state.report.phase == "Running")
        if how == "annotation":
            attempt.asked_file.write_text("true")
        else:
            attempt.stop.set()
        report = await attempt.ends()
    assert (report.phase, report.exit_code, report.suspended) == ("Ended", 85, True)
    assert (report.reason, report.message) == ("", "suspended, with a checkpoint")
    assert report.progress is not None
    assert report.progress.step == 2


async def test_while_it_suspends_the_state_says_so(tmp_path):
    async with attempting(tmp_path, HANGS) as attempt:
        await until(lambda: attempt.state.report.phase == "Running")
        attempt.stop.set()
        await attempt.until("suspending after this step, with a checkpoint")
        with (attempt.config.metrics_file).open("a") as file:
            file.write(json.dumps({"step": 2, "attempt": 2, "time": 1002.0}) + "\n")
        await until(lambda: attempt.state.report.step_time == 1002.0)
        assert attempt.state.report.message == "suspending after this step, with a checkpoint"


@pytest.mark.parametrize("text", ["", "false", "True?"])
async def test_another_value_of_the_annotation_asks_for_nothing(tmp_path, text):
    (tmp_path / "suspend").write_text(text)
    async with attempting(tmp_path, STEPS) as attempt:
        assert (await attempt.ends()).exit_code == 0
    assert not attempt.config.suspend_file.exists()


async def test_asked_before_there_is_a_trainer_it_ends_at_once(tmp_path):
    async with attempting(tmp_path, STEPS, barrier=python("import time; time.sleep(600)")) as attempt:
        await until(lambda: log_file(attempt.config, "joined").exists())
        attempt.stop.set()
        report = await attempt.ends()
    assert (report.exit_code, report.suspended) == (85, True)
    assert report.message == "stopped before the trainer was up"


async def test_what_an_earlier_attempt_was_asked_is_over(tmp_path):
    config = config_of(tmp_path)
    config.suspend_file.parent.mkdir(parents=True)
    config.suspend_file.touch()
    config.suspended_file.touch()
    trainer = "sys.exit(any((run / 'control' / name).exists() for name in ('suspend', 'suspended')))"
    async with attempting(tmp_path, trainer, config=config) as attempt:
        assert (await attempt.ends()).exit_code == 0


# 4. A checkpoint of another number of ranks is cut for this one first.


async def test_a_checkpoint_of_other_ranks_is_cut_first(tmp_path):
    config = config_of(tmp_path, nodes=2)
    folder = checkpoint(config, 3, ranks=4)
    reshard = python(
        f"import pathlib, sys; pathlib.Path({str(tmp_path)!r}, 'cut').write_text(str(sys.argv[1:]))"
    )
    async with attempting(tmp_path, STEPS, config=config, reshard=reshard) as attempt:
        assert (await attempt.ends()).exit_code == 0
    assert (tmp_path / "cut").read_text() == str(["--checkpoint", str(folder), "--ranks", "2"])


async def test_a_checkpoint_of_these_ranks_is_left_alone(tmp_path):
    config = config_of(tmp_path, nodes=2)
    checkpoint(config, 3, ranks=2)
    async with attempting(tmp_path, STEPS, config=config) as attempt:
        assert (await attempt.ends()).exit_code == 0
    assert not log_file(config, "reshard").exists()


@pytest.mark.parametrize(
    ("code", "exit_code", "reason"), [(87, 87, "CheckpointWorldSizeMismatch"), (1, 1, "StartFailed")]
)
async def test_a_checkpoint_that_cannot_be_cut_ends_the_attempt(tmp_path, code, exit_code, reason):
    config = config_of(tmp_path, nodes=2)
    folder = checkpoint(config, 3, ranks=4)
    reshard = python(f"import sys; sys.exit(print('ValueError: not one-dimensional') or {code})")
    async with attempting(tmp_path, STEPS, config=config, reshard=reshard) as attempt:
        report = await attempt.ends()
    assert (report.exit_code, report.reason) == (exit_code, reason)
    assert report.message == (
        f"checkpoint {folder}: has 4 ranks and was not cut for 2: ValueError: not one-dimensional"
    )
    assert not log_file(config, "trainer").exists()


# 5. All that it started has ended when it ends, and all leases are released.


async def test_nothing_is_left_running_or_leased(tmp_path):
    ray = ("sh", "-c", f"echo $$ > {tmp_path}/ray; exec sleep 600")
    async with attempting(tmp_path, f"{PID}step(1); wait_for(run / 'go')", ray=ray) as attempt:
        await until(lambda: attempt.state.report.phase == "Running")
        assert await leases(attempt) == [("run", "server-0"), ("run", "server-1")]
        (attempt.config.run_dir / "go").touch()
        await attempt.ends()
        assert await leases(attempt) == []
    assert gone(tmp_path / "ray")
    assert gone(attempt.config.run_dir / "pid")


async def test_a_cancelled_head_leaves_nothing_either(tmp_path):
    async with attempting(tmp_path, PID + HANGS, ray=SLEEP) as attempt:
        await until(lambda: attempt.state.report.phase == "Running")
        attempt.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(DEADLINE):
                await attempt.task
        assert await leases(attempt) == []
    assert gone(attempt.config.run_dir / "pid")


# 6. It ends when a later attempt has begun.


async def test_an_attempt_that_is_over_does_not_begin(tmp_path):
    config = config_of(tmp_path)
    assert begin_attempt(config.run_dir, 3) is None
    config.suspend_file.touch()
    async with attempting(tmp_path, STEPS, config=config) as attempt:
        report = await attempt.ends()
    assert (report.exit_code, report.message) == (1, "attempt 3 has begun: this one is over")
    assert not log_file(config, "trainer").exists()
    assert config.suspend_file.exists()  # is for the other one


async def test_an_attempt_ends_when_a_later_one_begins(tmp_path):
    async with attempting(tmp_path, PID + HANGS) as attempt:
        await until(lambda: attempt.state.report.phase == "Running")
        assert newer_attempt(attempt.config.run_dir, 1) == 2
        assert begin_attempt(attempt.config.run_dir, 3) is None
        report = await attempt.ends()
    assert (report.exit_code, report.message) == (1, "attempt 3 has begun: this one is over")
    assert gone(attempt.config.run_dir / "pid")


# 7. Its last word is on the claim too.


@pytest.mark.parametrize(("trainer", "code"), [(STEPS, 0), ("sys.exit(1)", 1)])
async def test_the_last_word_is_on_the_claim(tmp_path, trainer, code):
    async with attempting(tmp_path, trainer) as attempt:
        report = await attempt.ends()
    text = (attempt.config.run_dir / "control" / "report-2.json").read_text()
    assert json.loads(text)["exit_code"] == code
    assert Report.read(text) == report


async def test_a_last_word_that_cannot_be_written_changes_nothing(tmp_path):
    (tmp_path / "run" / "control" / "report-2.json").mkdir(parents=True)
    async with attempting(tmp_path, STEPS) as attempt:
        assert (await attempt.ends()).exit_code == 0


# 8. One head for each attempt.


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        (STEPS, (0, "", "all 5 steps are done", False)),
        ("sys.exit(86)", (86, "NoProgress", None, False)),
    ],
)
async def test_who_replaces_a_head_repeats_its_last_word_and_does_nothing_else(tmp_path, trainer, words):
    async with attempting(tmp_path, trainer, pod=("head-a", "uid-a")) as attempt:
        first = await attempt.ends()
    config = attempt.config
    log = log_file(config, "trainer").read_bytes()
    config.suspend_file.touch()  # whoever begins an attempt takes it away
    async with attempting(tmp_path, "step(9)", config=config, pod=("head-b", "uid-b")) as attempt:
        assert await attempt.ends() == first
        assert await asked(attempt.port) == first
        assert await leases(attempt) == []
    code, reason, message, suspended = words
    assert (first.exit_code, first.reason, first.suspended) == (code, reason, suspended)
    assert message in (None, first.message)
    assert log_file(config, "trainer").read_bytes() == log
    assert config.suspend_file.exists()


@pytest.mark.parametrize("said", [None, "no report", b"\xff"])
async def test_of_a_head_that_left_no_word_it_is_told_that_it_is_gone(tmp_path, said):
    config = config_of(tmp_path)
    assert begin_attempt(config.run_dir, 2) is None
    assert take_head(config.run_dir, 2, "head-a", "uid-a") is None
    file = config.run_dir / "control" / "report-2.json"
    if said is not None:
        file.write_bytes(said if isinstance(said, bytes) else said.encode())
    async with attempting(tmp_path, STEPS, config=config, pod=("head-b", "uid-b")) as attempt:
        report = await attempt.ends()
    assert (report.exit_code, report.reason) == (1, "PodLost")
    assert report.message == "pod head-a, the head of attempt 2, is gone"
    assert not log_file(config, "ray-head").exists()
    assert file.exists() == (said is not None)  # the first one may still write there


async def test_an_attempt_is_closed_when_all_pods_have_joined(tmp_path):
    config = config_of(tmp_path)
    slow = python(joined()[-1].replace("; sys.exit(0)", "; import time; time.sleep(600)"))
    async with attempting(tmp_path, STEPS, config=config, barrier=slow):
        await until(lambda: log_file(config, "joined").exists())
        assert not is_closed(config.run_dir, 2)
    async with attempting(tmp_path, HANGS, config=config):
        await until(lambda: is_closed(config.run_dir, 2))


# 9. The loop never waits for the claim while the trainer runs.


async def test_a_claim_that_hangs_or_fails_stops_no_answers_and_ends_nothing(tmp_path, monkeypatch):
    hangs, fails = threading.Event(), threading.Event()
    looks = 0

    def read(path):
        nonlocal looks
        looks += 1
        if hangs.is_set():
            assert fails.wait(DEADLINE)
        if fails.is_set():
            raise OSError("stale file handle")
        return read_steps(path)

    monkeypatch.setattr(follow, "read_steps", read)
    async with attempting(tmp_path, "step(1); wait_for(run / 'go'); step(2)") as attempt:
        await until(lambda: attempt.state.report.phase == "Running")
        hangs.set()
        before = looks
        with attempt.config.metrics_file.open("a") as file:
            file.write(json.dumps({"step": 2, "attempt": 2, "time": 1002.0}) + "\n")
        await until(lambda: looks > before)
        for _ in range(3):
            await asyncio.sleep(head.TICK_S)
            assert (await asked(attempt.port)).step_time == 1001.0
        assert looks == before + 1
        fails.set()
        await until(lambda: looks > before + 2)
        assert attempt.state.report.phase == "Running"
        hangs.clear()
        fails.clear()
        (attempt.config.run_dir / "go").touch()
        report = await attempt.ends()
    assert (report.exit_code, report.step_time) == (0, 1002.0)


async def test_checkpoints_are_looked_at_when_another_one_is_named(tmp_path, monkeypatch):
    looks = []
    newest = checkpoints.newest
    monkeypatch.setattr(checkpoints, "newest", lambda folder: looks.append(folder) or newest(folder))
    config = config_of(tmp_path)
    follower = follow.Follower(config)
    for _ in range(3):
        sight = await follower.last()
        assert sight is not None
        assert sight.checkpoint is None
    checkpoint(config, 1, ranks=1)
    for _ in range(3):
        sight = await follower.last()
        assert sight is not None
        assert sight.checkpoint is not None
        assert sight.checkpoint.latest_step == 1
    assert len(looks) == 2
