"""The head of a training run's pods: one attempt, from an empty pod to its last word.

    python3 -m agentfly.launch.head

Guarantees:
1. From its first second on ``GET /state`` says how it is; its end is the same report, as the termination
   message, and its exit code is the trainer's. What fails before there is a trainer is exit code 1, what
   would fail again ``EXIT_INVALID``.
2. The trainer starts when every pod of the attempt has joined Ray and all servers of the policy, if it has
   any beside the trainer, are leased; pods that did not join in time are named. It ends when Ray ends or a
   server is lost. What an attempt before it still had leased, because it was killed, it takes over at once.
3. Asked to suspend, by the annotation or by SIGTERM, it lets the trainer write its checkpoint and end by
   itself, however often it is asked; before there is a trainer it ends at once, which loses nothing.
4. A checkpoint of another number of ranks is cut for this one first.
5. All that it started has ended when it ends, and all leases are released.
6. It does not begin after a later attempt has, and ends when it sees that one has begun.
7. Its last word is on the claim too, as ``control/report-N.json``.
8. Where another pod was the head of this attempt before, it does nothing but repeat that one's last word, or
   say that it is gone. Once all pods have joined, none is let in that would replace one of them.
9. The loop that sends heartbeats never waits for the claim while the trainer runs.

Not here: a trainer that hangs. It ends itself, from its first step on; the time until then is limited by
whoever made the pods.
"""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agentfly.api.reasons import Reason
from agentfly.broker.client import BrokerClient
from agentfly.errors import AgentflyError
from agentfly.launch.asked import asks
from agentfly.launch.attempt import log_file, resolved, this_pod
from agentfly.launch.child import Child, reap_orphans, running
from agentfly.launch.follow import Follower, Sight
from agentfly.launch.pod import main_process, stop_asked
from agentfly.launch.ray import PYTHON, Place, authentication, head_command
from agentfly.launch.state import State, serving
from agentfly.resources.errors import ResourceError
from agentfly.resources.lease import Lease, Request
from agentfly.roles.failure import reason_in, why
from agentfly.roles.launch import ASKED_FILE, STATE_PORT, Report, TrainerLaunch
from agentfly.roles.life import begin_attempt, close_attempt, read_failure, take_head
from agentfly.roles.trainer import (
    ENV_BROKER,
    ENV_INFERENCE_URLS,
    ENV_JOB,
    ENV_RUN_DIR,
    EXIT_INVALID,
    EXIT_SUSPENDED,
)
from agentfly.training import checkpoints
from agentfly.training.verl_config import environment

logger = logging.getLogger("agentfly.head")

TICK_S = 0.5
MARGIN_S = 30.0  # for a process that limits its own time
CUT_S = 1800.0  # to cut a checkpoint for another number of ranks: it is read and written once
CANCEL_S = 30.0
BEAT_S = 10.0  # a server that died is noticed by then; the lease itself lives much longer
WRITE_S = 30.0  # for a file on the claim that is not worth waiting for

Value = TypeVar("Value")


@dataclass(frozen=True)
class Programs:
    """What the head starts, each with its arguments; the head adds what it knows only later."""

    ray: Sequence[str]
    joined: Sequence[str] = (*PYTHON, "agentfly.launch.joined")
    reshard: Sequence[str] = (*PYTHON, "agentfly.training.reshard")
    trainer: Sequence[str] = (*PYTHON, "agentfly.training.main")


class Failed(Exception):
    """The attempt has ended without success."""

    def __init__(self, reason: Reason, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.reason, self.message, self.exit_code = reason, message, exit_code


class SuspendedEarly(Exception):
    """It was asked to suspend before there was a trainer."""


class Replaced(Exception):
    """``first`` is the pod that was the head of this attempt before."""

    def __init__(self, first: str) -> None:
        super().__init__(first)
        self.first = first


class Head:
    """One attempt.

    Args:
        launch: of the attempt.
        place: of this pod.
        programs: what is started.
        state: told of everything that happens.
        stop: set when the pod has to end.
        asked_file: the annotation of the pod.
    """

    def __init__(
        self,
        launch: TrainerLaunch,
        place: Place,
        programs: Programs,
        state: State,
        stop: asyncio.Event,
        asked_file: Path = ASKED_FILE,
    ) -> None:
        self._launch = launch
        self._config = resolved(launch.trainer)
        self._place = place
        self._programs = programs
        self._state = state
        self._stop = stop
        self._asked_file = asked_file
        self._asked = False
        self._ray_key: dict[str, str] = {}
        self._ray: Child | None = None
        self._trainer: Child | None = None
        self._servers: Sequence[Lease] = ()
        self._lost: set[str] = set()
        self._follower = Follower(self._config)

    async def run(self) -> Report:
        """The last word of the attempt."""
        file = self._config.run_dir / "control" / f"report-{self._config.attempt}.json"
        try:
            report = await self._run()
        except Replaced as replaced:
            return await self._repeat(replaced.first, file)
        try:
            async with asyncio.timeout(WRITE_S):
                await asyncio.to_thread(file.write_text, report.model_dump_json(exclude_none=True))
        except OSError as error:  # TimeoutError is one
            logger.warning("%s: not written: %s", file, error)
        return report

    async def _repeat(self, first: str, file: Path) -> Report:
        """The last word of the pod that was the head before."""
        try:
            async with asyncio.timeout(WRITE_S):
                said = Report.read(await asyncio.to_thread(file.read_text))
        except (OSError, UnicodeDecodeError) as error:  # TimeoutError is one
            logger.warning("%s: cannot be read: %s", file, error)
            said = None
        if said is None:
            number = self._config.attempt
            return self._failed(Reason.PodLost, f"pod {first}, the head of attempt {number}, is gone", 1)
        logger.info("pod %s was the head of attempt %d, and said: %s", first, said.attempt, said.message)
        self._state.report = said
        return said

    async def _run(self) -> Report:
        try:
            async with AsyncExitStack() as stack:
                await asyncio.to_thread(self._make_files)
                await self._see_before()
                await self._start_ray(stack)
                await self._barrier()
                await self._lease(stack)
                await self._cut_checkpoint()
                code = await self._train(stack)
                return self._ended(code)
        except SuspendedEarly:
            message = "stopped before the trainer was up"
            return self._state.update(
                phase="Ended", message=message, suspended=True, exit_code=EXIT_SUSPENDED
            )
        except Failed as failed:
            return self._failed(failed.reason, failed.message, failed.exit_code)
        except AgentflyError as error:
            return self._failed(Reason.StartFailed, error.render(), 1)
        except Replaced:
            raise
        except Exception as error:
            logger.exception("the attempt failed")
            return self._failed(self._reason, f"{type(error).__name__}: {error}", 1)

    def _make_files(self) -> None:
        """What is written to, and what the trainer reads; what earlier attempts were asked is over."""
        config = self._config
        for folder in (config.run_dir / "logs", config.suspend_file.parent, config.checkpoint_dir):
            folder.mkdir(parents=True, exist_ok=True)
        if (newer := begin_attempt(config.run_dir, config.attempt)) is not None:
            raise _superseded(newer)
        first = take_head(config.run_dir, config.attempt, self._place.pod, self._place.uid)
        if first is not None:
            raise Replaced(first)
        config.suspend_file.unlink(missing_ok=True)
        config.suspended_file.unlink(missing_ok=True)
        config.config_file.write_text(config.model_dump_json(indent=2) + "\n")

    async def _see_before(self) -> None:
        """See what earlier attempts have finished: which checkpoint there is must be known."""
        sight = await self._follower.last()
        if sight is None:
            raise Failed(Reason.StartFailed, f"{self._config.run_dir}: what is there cannot be read")
        self._saw(sight)

    async def _start_ray(self, stack: AsyncExitStack) -> None:
        self._say("starting Ray")
        self._ray_key = authentication(self._config, os.environ)
        self._ray = await stack.enter_async_context(self._child("ray-head", self._programs.ray))

    async def _barrier(self) -> None:
        """Wait until all pods of the attempt are nodes of Ray."""
        launch, found = self._launch, self._config.run_dir / "control" / f"missing-{self._config.attempt}"
        found.unlink(missing_ok=True)
        who = ["--pods", *launch.pods] if launch.pods else ["--count", str(self._config.nodes)]
        arguments = [*who, "--missing", str(found), "--deadline", str(launch.barrier_s)]
        async with self._child("joined", [*self._programs.joined, *arguments]) as child:
            code = await self._meanwhile(self._joined(child, found))
        if code == 0:
            await asyncio.to_thread(close_attempt, self._config.run_dir, self._config.attempt)
            return
        if missing := _names(found):
            pods = ("pod " if len(missing) == 1 else "pods ") if launch.pods else ""
            raise Failed(
                Reason.StartFailed,
                f"{pods}{', '.join(missing)}: did not join Ray within {launch.barrier_s:.0f} s",
            )
        log = log_file(self._config, "joined")
        raise Failed(Reason.StartFailed, f"Ray: does not answer: {reason_in(log)}; read {log}")

    async def _joined(self, child: Child, found: Path) -> int:
        end = asyncio.get_running_loop().time() + self._launch.barrier_s + MARGIN_S
        while not await child.ends_within(TICK_S):
            if missing := _names(found):
                self._say(f"waiting for {', '.join(missing)} to join Ray")
            if asyncio.get_running_loop().time() >= end:
                raise Failed(Reason.StartFailed, "Ray: does not say which pods have joined")
        return await child.wait(TICK_S)

    async def _lease(self, stack: AsyncExitStack) -> None:
        """Lease all servers of the policy, until the attempt ends; none where the trainer serves it."""
        launch = self._launch
        if not launch.servers:
            return
        self._say("waiting for the policy's servers")
        client = await stack.enter_async_context(BrokerClient(launch.broker, share=launch.job))
        wanted = [Request(launch.policy, f"server-{number}") for number in range(launch.servers)]
        # The same owner in every attempt: a later one is given what an earlier one that was killed still has.
        # Its folder has the run's uid in its name: a run of the same name that is gone is somebody else.
        owner, attempt = self._config.run_dir.name, self._config.attempt
        acquiring = client.acquire_many(wanted, owner, attempt=attempt, deadline=launch.servers_deadline_s)
        self._servers = await self._meanwhile(acquiring)
        beating = asyncio.ensure_future(self._beat(client))
        stack.callback(beating.cancel)

    async def _beat(self, client: BrokerClient) -> None:
        """Ask for the servers more often than their leases need: these outlive a broker that is away.

        What the broker does not answer is no news.
        """
        while not self._lost:
            await asyncio.sleep(BEAT_S)
            try:
                alive = await client.heartbeat([server.info.lease_id for server in self._servers])
            except ResourceError as error:
                logger.warning("the policy's servers: the broker does not say whether they live: %s", error)
                continue
            self._lost = {lease_id for lease_id, lives in alive.items() if not lives}

    async def _cut_checkpoint(self) -> None:
        """Have the newest checkpoint cut for as many ranks as there are, if it has others."""
        folder, ranks, newest = self._config.checkpoint_dir, self._config.ranks, self._state.report.checkpoint
        if newest is None or newest.ranks is None or newest.ranks == ranks:
            return
        self._say(f"cutting the checkpoint of {newest.ranks} ranks for {ranks}")
        path = checkpoints.path_of(folder, newest.latest_step)
        arguments = ["--checkpoint", str(path), "--ranks", str(ranks)]
        async with self._child("reshard", [*self._programs.reshard, *arguments]) as child:
            code = await self._meanwhile(child.wait(CUT_S))
        if code != 0:
            cause = reason_in(log_file(self._config, "reshard"))
            raise Failed(
                Reason.CheckpointWorldSizeMismatch if code == EXIT_INVALID else Reason.StartFailed,
                f"checkpoint {path}: has {newest.ranks} ranks and was not cut for {ranks}: {cause}",
                EXIT_INVALID if code == EXIT_INVALID else 1,
            )

    async def _train(self, stack: AsyncExitStack) -> int:
        """The exit code of the trainer."""
        self._say("waiting for the first step")
        config, launch = self._config, self._launch
        child = await stack.enter_async_context(
            self._child(
                "trainer",
                [*self._programs.trainer, "--config", str(config.config_file)],
                {
                    ENV_JOB: launch.job,
                    ENV_BROKER: launch.broker,
                    ENV_RUN_DIR: str(config.run_dir),
                    ENV_INFERENCE_URLS: ",".join(server.base_url for server in self._servers),
                },
                config.base_dir,
            )
        )
        self._trainer = child
        self._follower = Follower(config)  # a checkpoint that was cut is looked at again
        while not await child.ends_within(TICK_S):
            self._look()
        self._saw(await self._follower.last())
        return await child.wait(TICK_S)

    async def _meanwhile(self, work: Coroutine[Any, Any, Value]) -> Value:
        """The result of the work, unless something else ends the attempt before."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=TICK_S))[0]:
                self._look()
            return task.result()
        finally:
            task.cancel()
            ended, _ = await asyncio.wait({task}, timeout=CANCEL_S)
            if ended and not task.cancelled():
                task.exception()  # is known, or of no interest beside what ended the attempt

    def _look(self) -> None:
        """See what has happened.

        Raises:
            Failed: something without which the attempt cannot go on.
            SuspendedEarly: it was asked to suspend, and there is no trainer.
        """
        if os.getpid() == 1:
            reap_orphans()
        if not self._asked and (self._stop.is_set() or asks(self._asked_file)):
            self._asked = True
            if self._trainer is None:
                raise SuspendedEarly
            self._say("suspending after this step, with a checkpoint")
        if self._ray is not None and self._ray.exit_code is not None:
            log = log_file(self._config, "ray-head")
            cause = f"Ray: ended with exit code {self._ray.exit_code}: {reason_in(log)}; read {log}"
            raise Failed(self._reason, cause)
        for server in self._servers:
            if server.lost or server.info.lease_id in self._lost:
                what = f"{server.info.key} of pool {server.info.pool} at {server.info.address}"
                raise Failed(self._reason, f"the policy's {what}: its lease is lost")
        if self._trainer is not None:
            self._saw(self._follower.look(suspend=self._asked))

    def _saw(self, sight: Sight | None) -> None:
        """Tell what the trainer has finished.

        Raises:
            Failed: another attempt has taken its place.
        """
        if sight is None:
            return
        if sight.newer is not None:
            raise _superseded(sight.newer)
        self._state.update(progress=sight.progress, checkpoint=sight.checkpoint)
        if sight.step_time is not None and sight.step_time != self._state.report.step_time:
            waiting = "" if not self._asked else self._state.report.message
            self._state.update(phase="Running", step_time=sight.step_time, message=waiting)

    def _ended(self, code: int) -> Report:
        config = self._config
        if code == 0:
            message = f"all {config.steps} steps are done"
            return self._state.update(phase="Ended", message=message, exit_code=0)
        if code == EXIT_SUSPENDED and self._asked:
            message = "suspended, with a checkpoint"
            return self._state.update(phase="Ended", message=message, suspended=True, exit_code=code)
        kept = read_failure(config.run_dir, config.attempt)
        reason, message = kept or why(code, log_file(config, "trainer"))
        return self._failed(reason, message, code)

    @property
    def _reason(self) -> Reason:
        """Of what fails beside the trainer."""
        return Reason.StartFailed if self._trainer is None else Reason.AttemptFailed

    def _failed(self, reason: Reason, message: str, code: int) -> Report:
        logger.error("%s", message)
        return self._state.update(phase="Ended", reason=reason.value, message=message, exit_code=code)

    def _say(self, message: str) -> None:
        if message != self._state.report.message:
            logger.info("%s", message)
            self._state.update(message=message)

    def _child(
        self, name: str, argv: Sequence[str], more: dict[str, str] | None = None, cwd: Path | None = None
    ) -> AbstractAsyncContextManager[Child]:
        """A child with the variables that verl needs, and the address of this pod's Ray."""
        return running(
            argv,
            env={
                **environment(self._config, self._config.config_file, os.environ),
                **self._ray_key,
                "RAY_ADDRESS": f"{self._place.ip}:{self._place.port}",
                **(more or {}),
            },
            log=log_file(self._config, name),
            cwd=cwd or self._config.run_dir,
        )


def _superseded(newer: int) -> Failed:
    return Failed(Reason.AttemptFailed, f"attempt {newer} has begun: this one is over")


def _names(path: Path) -> list[str]:
    """The pods that have not joined; none while nobody knows."""
    try:
        names: list[str] = json.loads(path.read_text())
    except FileNotFoundError:
        return []
    return names


async def attempt(launch: TrainerLaunch, programs: Programs, place: Place, state_port: int) -> Report:
    """Run one attempt in this pod, and tell of it at the port; its last word."""
    state = State(Report(attempt=launch.trainer.attempt))
    with stop_asked() as stop:
        async with serving(state, place.ip, state_port):
            return await Head(launch, place, programs, state, stop).run()


async def _this_attempt(launch: TrainerLaunch) -> Report:
    place = this_pod(launch.trainer)
    return await attempt(launch, Programs(head_command(place)), place, STATE_PORT)


if __name__ == "__main__":
    sys.exit(main_process("agentfly.launch.head", TrainerLaunch, _this_attempt))
