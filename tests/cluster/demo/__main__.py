"""`make cluster-demo`: rollouts on a cluster made for them, and what they ask of its API server."""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.cluster import images, product
from tests.cluster.cluster import Cluster
from tests.cluster.demo import command, image, storage
from tests.cluster.demo.figures import Bounds
from tests.cluster.demo.scene import Say
from tests.cluster.demo.stage import GROUP, Play, Seen, Stage
from tests.cluster.machine import cache

PODS = 12
"""Sandbox pods that the demo may create, for eight that are kept."""


def main(arguments: list[str]) -> int:
    """Plays the demo and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.demo", description=__doc__)
    command.flags(parser, cache() / "demo-run")
    parser.add_argument("--rollouts", type=_rollouts, default=200, help="a multiple of 4 (%(default)s)")
    options = parser.parse_args(arguments)
    return command.status_of(lambda: _demo(options.dir, options.rollouts, options.keep))


def _demo(folder: Path, rollouts: int, keep: bool) -> int:
    cluster, say = Cluster(folder), command.Teller()
    environment = storage.environment("inference")
    say("the images of operator, broker, sandboxes and vLLM")
    agentfly = product.agentfly_image()
    archives = [
        images.python(),
        agentfly,
        product.sandboxd_image(),
        image.role_image("inference", agentfly),
    ]
    with command.a_cluster(cluster, archives, keep, say):
        seen = Stage(cluster, Play(rollouts=rollouts), say).run(environment)
    _tell_requests(seen, say)
    broken = seen.figures.broken(Bounds(rollouts, PODS))
    for sentence in broken:
        sys.stderr.write(f"cluster-demo: {sentence}\n")
    sys.stdout.write(f"{seen.figures.line()}\n")
    return 1 if broken else 0


def _tell_requests(seen: Seen, say: Say) -> None:
    """Who asked the API server for what while rollouts ran."""
    asked: Counter[str] = Counter()
    for event in {event["auditID"]: event for event in seen.requests}.values():
        asked[f"{_who(event)} {event['verb']} {(event.get('objectRef') or {}).get('resource', '')}"] += 1
    rows = [f"{number:5} {what}" for what, number in asked.most_common()]
    say("\n".join(["requests to the API server while rollouts ran:", *rows]))


def _who(event: dict[str, Any]) -> str:
    return str(event.get("userAgent", "")).partition(" ")[0]


def _rollouts(text: str) -> int:
    number = int(text)
    if number < GROUP or number % GROUP:
        raise argparse.ArgumentTypeError(f"{text}: is no multiple of {GROUP}")
    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
