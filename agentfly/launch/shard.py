"""A worker pod of a rollout job: plays one shard of the tasks, publishes its results, counts them.

    python3 -m agentfly.launch.shard          (which shard: JOB_COMPLETION_INDEX)

Guarantees:
1. Ids and seeds of the rollouts follow from the place of each task in the whole job: how it was cut into
   shards decides nothing.
2. What is finished is kept in the shard's folder; whoever plays the shard next goes on with the rest. A shard
   whose results are published is counted again and not played again.
3. Exit code 0: the results are published, and the termination message has their counts. 3: so many of the
   shard's rollouts failed that the job cannot stay within its failure budget, whatever the others bring; the
   message has the counts so far. 1: anything else, another pod may do better. 143: it was asked to stop.
4. A server of the policy that goes ends the pod: what fails without it is no failure of a rollout.
5. A pool of the policy that is not there yet is waited for, as long as its servers are: workers that a queue
   lets run are there before it.
6. However it ends, its leases are released. It has none while it loads what takes long and lets nothing else
   go on: they would be lost meanwhile.

Not here: drift over the limit, and the failure budget over all shards; they are for who sees all shards.
"""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agentfly import worker
from agentfly.api.reasons import Reason
from agentfly.broker.client import BrokerClient
from agentfly.errors import AgentflyError
from agentfly.launch.pod import launch_argument, read, stop_asked, tell
from agentfly.launch.tasks import cut, tasks_file
from agentfly.refs import load
from agentfly.resources.errors import PoolNotFound
from agentfly.resources.lease import Lease, Request
from agentfly.roles.launch import Report, ShardLaunch
from agentfly.roles.worker import EXIT_BUDGET, EXIT_STOPPED, RolloutWorkerConfig, WorkerReport
from agentfly.rollout import FailureBudgetExceeded, RolloutReport
from agentfly.rollout.many import plan_rollouts
from agentfly.rollout.parts import PartWriter, publish, published

logger = logging.getLogger("agentfly.shard")

ENV_INDEX = "JOB_COMPLETION_INDEX"
ENV_POD = "POD_NAME"
LOOK_S = 2.0  # between two looks at the leases of the servers; the broker is not asked for that
LOG_S = 30.0
END_S = 30.0  # for rollouts that are told to end; within the pod's grace

Value = TypeVar("Value")


@dataclass(frozen=True)
class Shard:
    """One shard: its rows, and where they stand in the job.

    Attributes:
        first: place of the first row among the ``tasks`` of the job.
        ids: its rollouts.
    """

    index: int
    first: int
    tasks: int
    rows: Sequence[dict[str, Any]]
    ids: frozenset[str]


class StoppedError(AgentflyError):
    """The pod was asked to stop."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the shard of this pod; returns the exit code."""
    path = launch_argument("agentfly.launch.shard", arguments)
    counts = Counts()
    try:
        launch = read(path, ShardLaunch)
        index, player = int(os.environ[ENV_INDEX]), os.environ[ENV_POD]
        found = asyncio.run(play_shard(launch, index, player, counts))
        report = Report(phase="Ended", exit_code=0, shard=found)
    except FailureBudgetExceeded as error:
        report = _failed(EXIT_BUDGET, error.message, counts, Reason.FailureBudgetExceeded)
    except StoppedError as error:
        report = _failed(EXIT_STOPPED, error.message, counts, Reason.Interrupted)
    except AgentflyError as error:
        report = _failed(1, error.render(), counts)
    except Exception as error:
        logger.exception("the shard failed")
        report = _failed(1, f"{type(error).__name__}: {error}", counts)
    tell(report)
    return report.exit_code or 0


class Counts:
    """The newest counts of the rollouts, for the log and the last word."""

    def __init__(self) -> None:
        self.newest: RolloutReport | None = None
        self._logged = time.monotonic()

    def show(self, report: RolloutReport) -> None:
        """Take the report as it is now."""
        self.newest = report
        if time.monotonic() - self._logged >= LOG_S:
            self._logged = time.monotonic()
            logger.info("%d of %d rollouts, %d failed", report.finished, report.total, report.failures)


async def play_shard(launch: ShardLaunch, index: int, player: str, counts: Counts) -> WorkerReport:
    """Play a shard to its end; the counts of its results.

    Args:
        player: name of this pod; no other one has it.

    Raises:
        StoppedError: it was asked to stop.
        AgentflyError: see ``worker.play``; or a server of the policy went.
    """
    with stop_asked() as stop:
        shard = read_shard(launch, index)
        results, folder = shard_files(launch.worker.run_dir, index)
        if results.exists():
            logger.info("%s is there already", results)
            return worker.worker_report(published(results, shard.ids))
        reading = worker.reading_of(launch.worker)  # before there are leases to keep
        await _play(launch, shard, reading, player, folder, counts, stop)
        return worker.worker_report(publish(folder, results, shard.ids, player))


def read_shard(launch: ShardLaunch, index: int) -> Shard:
    """A shard of the tasks that the prepared job has.

    Raises:
        AgentflyError: there are no such tasks, or the agent cannot be loaded.
    """
    config, first = launch.worker, index * launch.tasks_per_shard
    rows, tasks = cut(tasks_file(config.run_dir), first, launch.tasks_per_shard)
    agent = load(config.agent_entrypoint, config.base_dir)
    plans = plan_rollouts(agent, rows, group_size=config.rollout.group_size, first=first)
    return Shard(index, first, tasks, rows, frozenset(rollout_id for _, _, rollout_id in plans))


def shard_files(run_dir: Path, index: int) -> tuple[Path, Path]:
    """The results of a shard, and the folder in which they come to be."""
    return run_dir / "results" / f"{index:05d}.jsonl", run_dir / "shards" / f"{index:05d}"


async def _play(
    launch: ShardLaunch,
    shard: Shard,
    reading: worker.Reading,
    player: str,
    folder: Path,
    counts: Counts,
    stop: asyncio.Event,
) -> None:
    wanted = [Request(launch.policy, f"server-{number}", "global") for number in range(launch.servers)]
    deadline = launch.servers_deadline_s
    async with BrokerClient(launch.broker, share=launch.job) as client:
        servers = await _unless(stop, _leased(client, wanted, player, deadline))
        urls = sorted({server.base_url for server in servers})
        logger.info("shard %d: tasks from %d on, servers %s", shard.index, shard.first, ", ".join(urls))
        with PartWriter(folder, player) as sink:
            playing = worker.play(
                _config(launch.worker, shard),
                shard.rows,
                reading,
                urls,
                client,
                sink,
                first=shard.first,
                progress=counts.show,
            )
            try:
                await _unless(stop, playing, servers)
            finally:
                if counts.newest is not None and counts.newest.failures:
                    await _check(client, servers)


async def _leased(
    client: BrokerClient, wanted: Sequence[Request], player: str, deadline: float
) -> list[Lease]:
    """The policy's servers, within so many seconds."""
    end = time.monotonic() + deadline
    while True:
        try:
            return await client.acquire_many(wanted, player, deadline=max(0.0, end - time.monotonic()))
        except PoolNotFound:
            if time.monotonic() + LOOK_S >= end:
                raise
        await asyncio.sleep(LOOK_S)


async def _unless(
    stop: asyncio.Event, work: Coroutine[Any, Any, Value], servers: Sequence[Lease] = ()
) -> Value:
    """The result of the work, which ends when a stop is asked for or a server goes.

    Raises:
        StoppedError, AgentflyError: it ended so; what it had started has ended too.
    """
    task, asked = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        while not task.done():
            await asyncio.wait({task, asked}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                break
            if asked.done():
                raise StoppedError("asked to stop; what is finished stays in the shard's folder")
            for server in servers:
                if server.lost:
                    raise _gone(server)
        return task.result()
    finally:
        asked.cancel()
        task.cancel()
        ended, _ = await asyncio.wait({task}, timeout=END_S)
        if ended and not task.cancelled():
            task.exception()  # is known, or is of no more interest beside why it was ended


async def _check(client: BrokerClient, servers: Sequence[Lease]) -> None:
    """Where rollouts failed: whether all servers are still there.

    Raises:
        AgentflyError: one is not, or the broker does not say. The failures are played again.
    """
    alive = await client.heartbeat([server.info.lease_id for server in servers])
    for server in servers:
        if not alive[server.info.lease_id]:
            raise _gone(server)


def _gone(server: Lease) -> AgentflyError:
    return AgentflyError(f"policy: its server {server.info.address} is gone")


def _config(config: RolloutWorkerConfig, shard: Shard) -> RolloutWorkerConfig:
    """The job's, with limits that one shard alone can break: its part of the failures that all may have."""
    budget = min(1.0, config.failure_budget * shard.tasks / len(shard.rows))
    shape = config.rollout.model_copy(update={"max_drift_fraction": None})
    return config.model_copy(update={"failure_budget": budget, "rollout": shape})


def _failed(code: int, message: str, counts: Counts, reason: Reason = Reason.AttemptFailed) -> Report:
    logger.error("%s", message)
    shard = None if counts.newest is None else worker.worker_report(counts.newest)
    return Report(phase="Ended", exit_code=code, reason=reason, message=message, shard=shard)


if __name__ == "__main__":
    sys.exit(main())
