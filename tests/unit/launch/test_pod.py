"""What every main process of a pod does. Numbers are those of pod.py."""

import asyncio
import os
import signal
from importlib.metadata import version

import pytest

from agentfly.errors import AgentflyError
from agentfly.launch.pod import launch_argument, main_process, read, stop_asked, tell
from agentfly.roles.launch import LAUNCH_FILE, PrepareLaunch, Report

DEADLINE = 10.0


# 1. A launch that cannot be read is an error that names the file and the field.


def test_a_launch_is_what_was_mounted(tmp_path):
    launch = PrepareLaunch(model=tmp_path / "model", base_dir=tmp_path)
    path = tmp_path / "launch.json"
    path.write_text(launch.model_dump_json())
    assert read(launch_argument("prepare", ["--launch", str(path)]), PrepareLaunch) == launch


def test_without_an_argument_it_is_the_mounted_file():
    assert launch_argument("prepare", []) == LAUNCH_FILE


def test_a_launch_that_is_not_there_is_named(tmp_path):
    with pytest.raises(AgentflyError) as caught:
        read(tmp_path / "launch.json", PrepareLaunch)
    assert caught.value.message == f"launch {tmp_path}/launch.json: No such file or directory"


def test_a_field_that_is_wrong_is_named(tmp_path):
    path = tmp_path / "launch.json"
    path.write_text('{"model": "/m", "base_dir": "/b", "colour": 1}')
    with pytest.raises(AgentflyError) as caught:
        read(path, PrepareLaunch)
    assert caught.value.message == f"launch {path}: colour: Extra inputs are not permitted"


# 2. The last word is in the termination message.


def test_the_last_word_can_be_read_again(tmp_path):
    report = Report(attempt=3, phase="Ended", message="why", exit_code=1)
    tell(report, tmp_path / "termination-log")
    assert Report.read((tmp_path / "termination-log").read_text()) == report


def test_a_last_word_that_cannot_be_written_is_in_the_log(tmp_path, caplog):
    tell(Report(message="why it ended"), tmp_path / "none" / "termination-log")
    assert "why it ended" in caplog.text


# 3. However the work ends, it ends with a report, whose exit code is that of the process.


def ended_by(work, tmp_path, launch: str | None = None) -> tuple[int, Report]:
    path, last_word = tmp_path / "launch.json", tmp_path / "termination-log"
    path.write_text(launch or PrepareLaunch(model=tmp_path, base_dir=tmp_path).model_dump_json())
    code = main_process("test", PrepareLaunch, work, ["--launch", str(path)], last_word)
    report = Report.read(last_word.read_text())
    assert report is not None
    return code, report


def test_the_report_of_the_work_is_the_last_word(tmp_path):
    async def work(launch: PrepareLaunch) -> Report:
        return Report(phase="Ended", message=str(launch.model), exit_code=85, suspended=True)

    code, report = ended_by(work, tmp_path)
    assert (code, report.message, report.suspended) == (85, str(tmp_path), True)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (AgentflyError("broker: is not there", hints=["start it"]), "broker: is not there\n  hint: start it"),
        (KeyError("POD_NAME"), "KeyError: 'POD_NAME'"),
    ],
)
def test_work_that_fails_has_a_last_word_too(tmp_path, error, message):
    async def work(_: PrepareLaunch) -> Report:
        raise error

    code, report = ended_by(work, tmp_path)
    assert (code, report.exit_code, report.phase) == (1, 1, "Ended")
    assert (report.reason, report.message) == ("StartFailed", message)


def test_a_launch_that_cannot_be_read_is_the_last_word(tmp_path):
    async def work(_: PrepareLaunch) -> Report:
        raise AssertionError("there is nothing to do")

    code, report = ended_by(work, tmp_path, launch="{}")
    assert (code, report.exit_code, report.reason) == (87, 87, "InvalidSpec")
    error, hint = report.message.splitlines()
    assert error == f"launch {tmp_path}/launch.json: model: Field required"
    assert hint.endswith(f"this one has agentfly {version('agentfly')}")


# 4. SIGTERM and SIGINT set an event and do nothing else, however often they come.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_sets_the_event(number):
    with stop_asked() as asked:
        assert not asked.is_set()
        for _ in range(3):
            os.kill(os.getpid(), number)
        async with asyncio.timeout(DEADLINE):
            await asked.wait()
