"""Ray on several nodes, that somebody else started; runs in the trainer environment.

Guarantees:
1. The trainer's loop, which writes checkpoints and hears of a suspension, runs on the head's node.
2. When a node is lost this process ends: verl may wait for what was on it for ever.
3. It never goes on without the thread that watches the nodes.
4. Once verl has ended nothing is watched: nodes may go then.
"""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agentfly.roles.launch import HEAD_RESOURCE

logger = logging.getLogger("agentfly.training")

_POLL_S = 5.0


def on_head(runner: Any) -> Any:
    """A class of actors that Ray places on the head."""
    return runner.options(resources={HEAD_RESOURCE: 0.01})


@contextmanager
def watched(nodes: int) -> Iterator[None]:
    """Until the block is left, end this process if fewer than ``nodes`` are alive."""
    over = threading.Event()
    threading.Thread(target=_watch, args=(nodes, over), name="nodes", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch(nodes: int, over: threading.Event) -> None:
    while not over.wait(_POLL_S):
        try:
            alive = _alive()
        except Exception:
            if over.is_set():  # verl has ended while Ray was asked
                return
            logger.exception("the nodes cannot be watched, ending: nobody would see one that is lost")
            os._exit(1)
        if alive is not None and alive < nodes and not over.is_set():
            logger.error("%d of %d Ray nodes are alive, ending", alive, nodes)
            os._exit(1)


def _alive() -> int | None:
    """How many nodes are alive; None while this process is not connected."""
    import ray

    if not ray.is_initialized():
        return None
    return sum(bool(node["Alive"]) for node in ray.nodes())
