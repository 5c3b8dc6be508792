"""Measures everything in one run, prints it, and writes docs/benchmarks.md.

python -m tests.bench [here|loops|ahead|cluster] [--output FILE]

`here` needs no cluster, `cluster` is the chapter about one, `loops` and `ahead` are those about ways to play
rollouts and to train on them; what is not measured stays in the page as it was.
"""

import argparse
import asyncio
import logging
import secrets
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from agentfly.api import ResourcePool
from agentfly.broker.client import BrokerClient
from agentfly.local.paths import run_dir
from agentfly.local.plane import data_plane
from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner
from agentfly.resources.runners.container.cli import ContainerCLIRunner
from agentfly.resources.spec import ContainerSpec
from agentfly.sandbox.binary import find_sandboxd
from tests.bench import acquire, ahead, crowd, load, loops, pools, reuse, rollouts, sandboxes
from tests.bench.cluster import chapter as cluster
from tests.bench.machine import facts
from tests.bench.report import Section, chapter, joined, render
from tests.bench.scripted import load as recording
from tests.cluster.machine import Unavailable
from tests.local.engine_fixture import SHELL, engine

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
MEMBERS = 16
ALL_S = 600.0
WARM_S = 30.0

logger = logging.getLogger("tests.bench")


async def bench() -> list[Section]:
    """Every section, in the order of the page."""
    async with asyncio.timeout(ALL_S):
        async with (
            single() as runner,
            data_plane(
                [_pool()], logs_in=run_dir(), inference_python=Path(sys.executable), start_timeout_s=WARM_S
            ) as plane,
            BrokerClient(plane.broker) as broker,
        ):
            _say("starts and resets")
            lives = await sandboxes.lives(runner)
            _say("commands")
            execs = await sandboxes.execs(runner)
            _say("warm acquires and hand-overs")
            warm = await acquire.measure(plane.engine, broker, lambda: sandboxes.start(runner))
            _say("open loop and cycles")
            loaded = await load.measure(plane.engine, broker)
            _say("rollouts")
            played = await rollouts.measure(recording(), plane.engine, MEMBERS)
        async with single() as runner, containers() as podman:
            _say("no-op rollouts")
            reused = await reuse.measure([_bubblewrap(runner), *podman])
            _say("sizes of the pool")
            sized = await pools.measure(runner)
            _say("many at once")
            many = await crowd.measure(runner)
    one = [sandboxes.lives_section(lives), sandboxes.execs_section(execs)]
    return [warm, loaded, *one, reused, many, sized, played]


@asynccontextmanager
async def containers() -> AsyncIterator[list[reuse.Kind]]:
    """Containers of podman, with a store of its own; none, and a word about it, where it cannot be had."""
    with ExitStack() as stack:
        try:
            command = await asyncio.to_thread(stack.enter_context, engine("podman"))
        except pytest.skip.Exception as missing:
            _say(f"without containers: {missing}")
            yield []
            return
        runner = ContainerCLIRunner(run_dir() / secrets.token_hex(4), find_sandboxd(), command)
        spec = ContainerSpec(runtime="container-cli", image=SHELL, memory_mb=64)
        try:
            yield [reuse.Kind("podman", runner, spec, reset=500, fresh=48, repeats=2)]
        finally:
            await runner.close()


def _bubblewrap(runner: BubblewrapRunner) -> reuse.Kind:
    return reuse.Kind("bubblewrap", runner, ContainerSpec(memory_mb=64), reset=2000, fresh=400, repeats=2)


@asynccontextmanager
async def single() -> AsyncIterator[BubblewrapRunner]:
    """A runner without an engine."""
    runner = BubblewrapRunner(run_dir() / secrets.token_hex(4), find_sandboxd())
    if (reason := await asyncio.to_thread(runner.check)) is not None:
        raise SystemExit(reason)
    try:
        yield runner
    finally:
        await runner.close()


def _pool() -> ResourcePool:
    return ResourcePool.model_validate(
        {
            "apiVersion": "agentfly.dev/v1alpha1",
            "kind": "ResourcePool",
            "metadata": {"name": acquire.POOL},
            "spec": {
                "type": "Container",
                "container": {"image": "host"},
                "capacity": {"min": MEMBERS, "max": MEMBERS},
            },
        }
    )


def _say(what: str) -> None:
    logger.info("%5.1f s  %s", time.perf_counter() - _BEGAN, what)


_BEGAN = time.perf_counter()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="tests.bench", description="what agentfly costs on this machine")
    parser.add_argument(
        "part",
        nargs="?",
        choices=("here", "loops", "ahead", "cluster"),
        help="what to measure: all",
    )
    parser.add_argument("--output", type=Path, default=PAGE, help="where the page goes")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logger.setLevel(logging.INFO)
    described = facts()
    part = arguments.part
    page = render(asyncio.run(bench()), described) if part in (None, "here") else None
    played = _loops() if part in (None, "loops") else None
    trained = _ahead() if part in (None, "ahead") else None
    about_cluster = _cluster() if part in (None, "cluster") else None
    _say("done")
    old = arguments.output.read_text() if arguments.output.exists() else ""
    whole = joined(old, {loops.TITLE: played, ahead.TITLE: trained, cluster.TITLE: about_cluster}, page=page)
    sys.stdout.write((played or trained or whole) if part in ("loops", "ahead") else whole)
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(whole)


def _loops() -> str:
    """The chapter about ways to play rollouts."""
    _say("loops")
    described = facts("`make bench-rollout` (`python -m tests.bench loops`), which `make bench` runs too")
    return chapter(loops.TITLE, [loops.measure()], described, loops.LIMITS)


def _ahead() -> str:
    """The chapter about rollouts ahead of the updates."""
    _say("ahead")
    described = facts("`make bench-async` (`python -m tests.bench ahead`), which `make bench` runs too")
    return chapter(ahead.TITLE, [ahead.measure()], described, ahead.LIMITS)


def _cluster() -> str | None:
    """The chapter about a cluster; None, and a word about it, where this machine cannot run one."""
    try:
        return asyncio.run(cluster.measure())
    except Unavailable as missing:
        _say(f"without a cluster: {missing}")
        return None


if __name__ == "__main__":
    main()
