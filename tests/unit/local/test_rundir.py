import json
import logging
import os
import subprocess
import sys

import pytest

from agentfly.errors import AgentflyError
from agentfly.local.rundir import FolderRefused, RunDir, differences

SPEC = {"steps": 3, "algorithm": {"name": "grpo", "learningRate": 0.1}, "runPolicy": {"backoffLimit": 3}}


@pytest.fixture
def run(tmp_path) -> RunDir:
    return RunDir(tmp_path / "demo")


# 1. one living runner for each folder


def test_a_second_runner_is_refused_and_told_who_runs_it(run):
    program = (
        "import sys, pathlib; from agentfly.local.rundir import RunDir\n"
        f"with RunDir(pathlib.Path(sys.argv[1])).claim({SPEC!r}): print('held', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(run.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout.readline() == "held\n"
        with (
            pytest.raises(AgentflyError, match=f"run demo: process {child.pid} is running it"),
            run.claim(SPEC),
        ):
            pass
        child.kill()
        child.wait(timeout=10)
        with run.claim(SPEC):
            assert (run.root / ".lock").read_text() != ""
    finally:
        child.kill()
        child.communicate(timeout=10)


# 2. files are replaced as a whole


def test_a_status_is_read_back_as_written(run):
    with run.claim(SPEC):
        assert run.read_status() is None
        run.write_status({"phase": "Running"})
        run.write_status({"phase": "Failed"})
    assert run.read_status() == {"phase": "Failed"}
    assert not list(run.root.glob(".*.partial"))


def test_metrics_keep_the_last_record_of_a_step_and_skip_a_torn_line(run):
    with run.claim(SPEC):
        records = [{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.2}, {"step": 2, "reward": 0.3}]
        run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 3, "rew')
    assert run.read_metrics() == [{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.3}]


# 3. a folder is continued only with its own spec


CHANGED = {**SPEC, "steps": 5, "algorithm": {"name": "grpo", "learningRate": 0.2}}


def test_the_same_spec_continues(run):
    for _ in range(2):
        with run.claim(SPEC):
            assert json.loads(run.manifest.read_text()) == {"spec": SPEC}


def test_another_spec_is_refused_and_every_difference_named(run):
    with run.claim(SPEC):
        pass
    with pytest.raises(AgentflyError) as caught, run.claim(CHANGED):
        pytest.fail("claimed")
    assert caught.value.message == (
        "run demo: spec.algorithm.learningRate: 0.1 is now 0.2; "
        "a run is continued with the spec it was started with"
    )
    assert caught.value.hints[0] == "also changed: spec.steps: 3 is now 5"
    with run.claim(SPEC):
        assert json.loads(run.manifest.read_text()) == {"spec": SPEC}


def test_the_run_policy_may_change(run):
    with run.claim(SPEC):
        pass
    with run.claim({**SPEC, "runPolicy": {"backoffLimit": 0}}):
        assert json.loads(run.manifest.read_text())["spec"]["runPolicy"] == {"backoffLimit": 0}


def test_nothing_else_may_change(run):
    with run.claim({"suspend": True}):
        pass
    with pytest.raises(FolderRefused, match="suspend: true is now false"), run.claim({"suspend": False}):
        pytest.fail("claimed")


def test_differences_names_added_and_removed_leaves():
    assert differences({"a": 1, "b": {"c": 2}}, {"b": {"c": 3}, "d": 4}) == [
        ("a", 1, None),
        ("b.c", 2, 3),
        ("d", None, 4),
    ]


# 4. a refused runner leaves the folder as it was


def everything(run: RunDir) -> dict[str, str]:
    return {
        str(path.relative_to(run.root)): path.read_text() if path.is_file() else "folder"
        for path in run.root.rglob("*")
    }


def test_another_spec_leaves_nothing_in_a_folder_that_holds_only_a_manifest(run):
    run.root.mkdir()
    run.manifest.write_text(json.dumps({"spec": SPEC}))
    with pytest.raises(AgentflyError, match="is now"), run.claim(CHANGED):
        pytest.fail("claimed")
    assert everything(run) == {"manifest.json": json.dumps({"spec": SPEC})}


def test_another_spec_leaves_the_lock_of_the_last_runner_as_it_was(run):
    with run.claim(SPEC):
        pass
    run.logs.rmdir()
    (run.root / ".lock").write_text("1234567")
    before = everything(run)
    with pytest.raises(AgentflyError, match="is now"), run.claim(CHANGED):
        pytest.fail("claimed")
    assert everything(run) == before


@pytest.mark.parametrize("spec", [SPEC, CHANGED])
def test_a_second_runner_leaves_nothing_and_hears_of_the_first_whatever_its_spec(run, spec):
    with run.claim(SPEC):
        run.logs.rmdir()
        before = everything(run)
        with pytest.raises(AgentflyError, match=f"process {os.getpid()} is running it"), run.claim(spec):
            pytest.fail("claimed")
        assert everything(run) == before


def test_what_is_logged_while_it_is_held_is_in_its_log(run):
    logger = logging.getLogger("agentfly.local")
    with run.claim(SPEC):
        logger.error("inside")
    logger.error("outside")
    lines = (run.logs / "agentfly.log").read_text().splitlines()
    assert [line.rpartition(" ERROR ")[2] for line in lines] == ["agentfly.local: inside"]
