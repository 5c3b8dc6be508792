"""Sections follow the guarantees of `agentfly.roles.launch`."""

import json
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from agentfly.api.trainingrun import CheckpointStatus, Progress
from agentfly.roles.launch import TERMINATION_MAX, Report
from agentfly.roles.worker import WorkerReport

TIME = datetime(2026, 1, 2, tzinfo=UTC)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
LONG = st.builds(lambda text, times: text * times, TEXT, st.sampled_from([0, 1, 30, 3000]))
REPORTS = st.builds(
    Report,
    attempt=st.integers(0, 2**31),
    phase=st.sampled_from(["Starting", "Running", "Ended"]),
    message=LONG,
    reason=LONG,
    progress=st.none()
    | st.builds(Progress, step=st.integers(0, 9), metrics=st.dictionaries(LONG, st.just("0.5"), max_size=16)),
    checkpoint=st.none()
    | LONG.map(lambda text: CheckpointStatus(latest_step=3, path=text[:4096], time=TIME)),
    exit_code=st.none() | st.integers(-64, 255),
    suspended=st.booleans(),
    shard=st.none()
    | st.builds(WorkerReport, total=st.integers(0, 99), failed=st.dictionaries(LONG, st.integers(0, 99))),
)


# 2. small enough for a termination message


@given(REPORTS)
def test_a_report_fits_and_keeps_what_decides(report):
    text = report.termination_message()
    assert len(text.encode()) <= TERMINATION_MAX
    read = Report.read(text)
    assert read is not None
    for name in ("attempt", "phase", "exit_code", "suspended"):
        assert getattr(read, name) == getattr(report, name)
    assert report.message.endswith(read.message)
    if report.shard is not None:
        assert sum(read.shard.failed.values()) == sum(report.shard.failed.values())


@given(REPORTS)
def test_what_fits_is_whole(report):
    if len(report.model_dump_json(exclude_none=True).encode()) <= TERMINATION_MAX:
        assert Report.read(report.termination_message()) == report


def test_a_long_message_loses_its_beginning_before_anything_else_goes():
    report = Report(message="a" * 9000 + "the end", progress=Progress(step=3), reason="AttemptFailed")
    read = Report.read(report.termination_message())
    assert read.progress == report.progress
    assert read.message.endswith("aaathe end")
    assert len(read.message) > 3500


def test_numbers_go_before_the_last_words_of_a_message():
    many = {f"{number:02d}" * 120: "0.123456" for number in range(16)}
    report = Report(message="b" * 5000, progress=Progress(step=3, metrics=many))
    read = Report.read(report.termination_message())
    assert read.progress is None
    assert len(read.message) > 3500


def test_other_text_is_no_report():
    assert Report.read("Traceback (most recent call last):") is None
    assert Report.read('{"attempt": "one", "unknown": 2}') is None
    assert Report.read('["unknown"]') is None


# 3. a report of another version


def test_fields_of_another_version_are_left_out():
    report = Report(
        attempt=2,
        phase="Ended",
        exit_code=0,
        progress=Progress(step=3),
        checkpoint=CheckpointStatus(latest_step=3, path="/c", time=TIME),
        shard=WorkerReport(total=4),
    )
    told = json.loads(report.model_dump_json(exclude_none=True))
    told["new"] = {"a": 1}
    for name in ("progress", "checkpoint", "shard"):
        told[name]["new"] = 5
    assert Report.read(json.dumps(told)) == report


def test_an_exit_code_of_0_is_told():
    assert '"exit_code":0' in Report(phase="Ended", exit_code=0).termination_message()
