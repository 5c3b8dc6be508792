"""The pool under any order of events: never above max, no slot lost, no waiter forgotten."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.unit.resources.pool_shadow import PoolShadow


class SharedPool(PoolShadow):
    shared = True


class PoolOfImages(PoolShadow):
    images = ("", "a", "b")


@pytest.mark.parametrize(("machine", "runs"), [(PoolShadow, 400), (SharedPool, 250), (PoolOfImages, 350)])
def test_pool_holds_under_any_order_of_events(machine, runs):
    run_state_machine_as_test(
        machine, settings=settings(max_examples=runs, stateful_step_count=25, deadline=None)
    )
