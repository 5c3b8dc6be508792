"""Section numbers are the guarantees of events.py; who emits what is in test_engine_events.py."""

import logging
from dataclasses import fields

import pytest

from agentfly.resources.events import TROUBLE, Event, EventKind, Events

GRANT = Event(EventKind.LEASE_GRANTED, "swe", member="m", lease="l", owner="o", seconds=0.0125, warm=True)


# 1, 2. What an event has.


def test_line_says_what_an_event_has_and_nothing_else():
    assert GRANT.line() == "LeaseGranted pool=swe member=m lease=l owner=o seconds=0.013 warm=true"
    failed = Event(EventKind.START_FAILED, "swe", member="m", detail="no image\nat all")
    assert failed.line() == r"StartFailed pool=swe member=m detail='no image\nat all'", "one line each"


def test_event_has_no_place_for_a_token():
    assert "token" not in {field.name for field in fields(Event)}


# 4. The log, and those who watch.


@pytest.mark.parametrize("kind", EventKind)
def test_each_event_is_one_line_of_the_log(kind, caplog):
    with caplog.at_level(logging.INFO, logger="agentfly"):
        Events().emit(Event(kind, "swe"))
    (record,) = caplog.records
    assert record.getMessage() == f"{kind} pool=swe"
    assert record.levelno == (logging.WARNING if kind in TROUBLE else logging.INFO)


def test_observer_that_raises_disturbs_nobody(caplog):
    seen: list[Event] = []

    def broken(event: Event) -> None:
        raise ValueError("full")

    events = Events()
    for observer in (broken, seen.append):
        events.observe(observer)
    with caplog.at_level(logging.ERROR, logger="agentfly"):
        events.emit(GRANT)
    assert seen == [GRANT]
    (record,) = caplog.records
    assert record.getMessage() == "an observer failed at LeaseGranted of pool swe"
