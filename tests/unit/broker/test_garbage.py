"""The garbage collector of a broker that starts. Numbers are the guarantees of garbage.py."""

import gc
import weakref

from agentfly.broker.garbage import YOUNG, rarely_collected


class Knot:
    """Is garbage that only a collection finds."""

    def __init__(self) -> None:
        self.self = self


def test_1_what_is_dropped_until_then_is_found_and_rarely_looked_for() -> None:
    with rarely_collected():
        assert gc.get_threshold()[0] == YOUNG
        dropped = weakref.ref(Knot())
        kept = [[] for _ in range(2 * YOUNG)]
        assert dropped() is None
    assert len(kept) == 2 * YOUNG


def test_2_what_is_there_then_is_not_walked_again() -> None:
    with rarely_collected() as settled:
        stays = [Knot() for _ in range(100)]
        settled()
        assert gc.get_freeze_count() > 100
        assert not any(each is stays[0] for each in gc.get_objects())
        after = Knot()
        assert any(each is after for each in gc.get_objects())


def test_3_all_is_as_before_when_the_block_ends() -> None:
    before = gc.get_threshold()
    with rarely_collected() as settled:
        settled()
        assert gc.get_threshold() == before
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
    with rarely_collected():
        pass
    assert gc.get_threshold() == before
