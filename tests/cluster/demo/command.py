"""What the commands of this package share: their flags, their cluster, their exit status."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from agentfly.errors import AgentflyError
from tests.cluster.cluster import Cluster
from tests.cluster.demo.scene import Say
from tests.cluster.processes import Process


class Teller:
    """Prints lines with the seconds since it was made."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    def __call__(self, text: str) -> None:
        """Prints a text; the time stands before its first line."""
        after = time.monotonic() - self._begun
        lines = text.splitlines()
        sys.stdout.write("".join(f"{after:5.0f} s  {line}\n" for line in lines[:1]))
        sys.stdout.write("".join(f"         {line}\n" for line in lines[1:]))
        sys.stdout.flush()


def flags(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Adds those that say where the cluster is, and what becomes of it."""
    parser.add_argument("--dir", type=Path, default=folder, help="the cluster's folder (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up at the end")


@contextlib.contextmanager
def a_cluster(cluster: Cluster, images: Sequence[Path], keep: bool, say: Say) -> Iterator[None]:
    """A cluster of one node with images, for the length of a block."""
    say("a Kubernetes of this machine alone")
    try:
        cluster.up(nodes=["containerd2"], owner=None if keep else Process.of(os.getpid()))
        cluster.import_image(*images)
        yield
    finally:
        if keep:
            say(f"the cluster stays: export KUBECONFIG={cluster.kubeconfig}")
            say(f"end it with: python -m tests.cluster --dir {cluster.folder} down")
        else:
            say("taking the cluster down")
            cluster.down()


def status_of(play: Callable[[], int]) -> int:
    """The exit status of a command: what it returns, or what its end by an error is worth."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return play()
    except AgentflyError as error:
        sys.stderr.write(f"{error.render()}\n")
        return 1
    except subprocess.TimeoutExpired as error:  # kubectl, on a machine that is too busy
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
