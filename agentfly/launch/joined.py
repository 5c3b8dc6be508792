"""Waits until every pod is a node of Ray: ``python -m agentfly.launch.joined``, with RAY_ADDRESS set.

Guarantees:
1. Exit code 0: each of the pods is an alive node, known by the resource of its name; where nobody knows their
   names, there are as many. 1: not in time.
2. The file holds the names of those that are not there, or how many there are not, as a JSON list of words,
   replaced as a whole; without the file Ray did not answer yet.

A process of its own, because Ray is joined once in a process, and leaves its threads behind.
"""

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentfly.launch.ray import is_pod, resource_of

logger = logging.getLogger("agentfly.launch.joined")

LOOK_S = 0.5


def missing(pods: Iterable[str], nodes: Iterable[Mapping[str, Any]]) -> list[str]:
    """The pods that are no alive node; ``nodes`` are Ray's records."""
    there = {resource for node in nodes if node["Alive"] for resource in node["Resources"]}
    return [pod for pod in pods if resource_of(pod) not in there]


def missing_of(count: int, nodes: Iterable[Mapping[str, Any]]) -> list[str]:
    """How many of so many pods are no alive node."""
    there = sum(bool(node["Alive"]) and is_pod(node["Resources"]) for node in nodes)
    return [f"{count - there} of {count} pods"] if there < count else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Wait; returns the exit code."""
    parser = argparse.ArgumentParser(prog="agentfly.launch.joined")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--pods", nargs="+", help="their names")
    who.add_argument("--count", type=int, help="how many there are, where nobody knows their names")
    parser.add_argument("--missing", type=Path, required=True, help="file for the names of those not there")
    parser.add_argument("--deadline", type=float, required=True, help="seconds")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    end = time.monotonic() + options.deadline
    if not _connected(end):
        return 1
    import ray

    def left_out() -> list[str]:
        nodes = ray.nodes()
        return missing(options.pods, nodes) if options.pods else missing_of(options.count, nodes)

    while left := left_out():
        _replace(options.missing, json.dumps(left))
        if time.monotonic() >= end:
            return 1
        time.sleep(LOOK_S)
    _replace(options.missing, "[]")
    return 0


def _connected(end: float) -> bool:
    """Whether Ray answered in time."""
    import ray

    while True:
        try:
            ray.init(address=os.environ["RAY_ADDRESS"], logging_level=logging.ERROR, log_to_driver=False)
            return True
        except Exception as error:  # whatever Ray says of a head that is starting
            if time.monotonic() >= end:
                logger.error("Ray does not answer: %s", error)
                return False
        time.sleep(LOOK_S)


def _replace(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
