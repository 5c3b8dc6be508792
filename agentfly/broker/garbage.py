"""The garbage collector of a process that begins with much that stays: a broker among thousands of pods.

Guarantees:
1. Until ``settled`` is called collections are rare, and what is dropped is still found, every ``YOUNG``
   objects.
2. What there is then is not walked again: a collection in the middle of a lease is as short as in a namespace
   without pods.
3. After the block the collector is as it was before.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

YOUNG = 50_000  # some MB


@contextmanager
def rarely_collected() -> Iterator[Callable[[], None]]:
    """Gives ``settled``."""
    before = gc.get_threshold()
    gc.set_threshold(YOUNG, *before[1:])

    def settled() -> None:
        gc.set_threshold(*before)
        gc.freeze()

    try:
        yield settled
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
