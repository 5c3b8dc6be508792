"""The times at which something is due; the numbers are the guarantees of alarms.py."""

from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.resources.alarms import SPARE, Alarms

# 1. Against a plain dictionary.


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 20)), st.integers(0, 3))))
def test_alarms_are_those_of_a_dictionary(steps):
    alarms: Alarms[int] = Alarms()
    model: dict[int, float] = {}
    now = 0.0
    for key, when, pause in steps:
        now += pause
        alarms.set(key, when)
        if when is None:
            model.pop(key, None)
        else:
            model[key] = when
        assert alarms.next() == min(model.values(), default=None)
        if pause == 0:
            due = alarms.due(now)
            assert sorted(due) == sorted(other for other, time in model.items() if time <= now)
            model = {other: time for other, time in model.items() if time > now}


# 2. What is put off or cleared leaves nothing behind.


def test_heartbeats_do_not_pile_up():
    alarms: Alarms[int] = Alarms()
    for beat in range(100):
        for lease in range(10):
            alarms.set(lease, float(beat + 30))
    assert len(alarms._heap) == 10
    assert alarms.next() == 129


def test_leases_that_ended_early_do_not_pile_up():
    alarms: Alarms[int] = Alarms()
    for lease in range(10_000):
        alarms.set(lease, 1e6 + lease)
        alarms.set(lease, None)
    assert len(alarms._heap) <= SPARE + 1
    assert alarms.next() is None
