"""One TrainingRun on this machine: from its manifest to a finished, suspended or failed run.

Guarantees:
1. However the run ends, its processes, sandboxes and servers end with it.
2. Asked to stop, it ends the step, writes a checkpoint and stops; asked again, it stops at once. The same
   command goes on from the last checkpoint.
3. A failed attempt is tried again from the last checkpoint, under the rules of `agentfly.roles.life`.
4. A finished run stays finished: running it again starts nothing.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from agentfly.api import ResourcePool, TrainingRun, TrainingRunStatus
from agentfly.api.reasons import Reason
from agentfly.api.reasons import TrainingRunPhase as Phase
from agentfly.api.trainingrun import RoleStatus
from agentfly.errors import AgentflyError
from agentfly.local.environments import Name
from agentfly.local.keeper import Keeper, Show
from agentfly.local.plane import DataPlane, data_plane
from agentfly.local.processes import role_environment, running
from agentfly.local.rundir import RunDir
from agentfly.local.steps import StopAsked, ends_within, environment, lease_servers, make_model, prove, unless
from agentfly.observe.curve import write_reward_png
from agentfly.roles.failure import why
from agentfly.roles.life import Clock, Ended, after_attempt, overdue, read_failure
from agentfly.roles.plan import Places, inference_pool, serves_itself, trainer_role
from agentfly.roles.trainer import EXIT_INVALID, EXIT_SUSPENDED

TICK_S = 0.5
KILLED = -9


class TrainingRunner:
    """Runs a TrainingRun to its end.

    Args:
        run: what to run; its status is ignored, the folder's counts.
        pools: the pools it names.
        base_dir: folder of the manifest.
        folder: where everything about the run is kept.
        show: called with the run whenever its status changed.
    """

    def __init__(
        self, run: TrainingRun, pools: Sequence[ResourcePool], base_dir: Path, folder: RunDir, show: Show
    ) -> None:
        self._spec = run.spec
        self._run = run
        self._pools = tuple(pools)
        self._folder = folder
        self._show = show
        self._stop = asyncio.Event()
        self._places = Places(folder.root, base_dir)
        self._policy = None if serves_itself(run) else inference_pool(run, self._places)
        self._ran = 0.0
        self.finished_before = False  # by an earlier process: this one started nothing

    def suspend(self) -> None:
        """Ask for a checkpoint and the end of the run."""
        self._stop.set()

    async def run(self) -> TrainingRunStatus:
        """Run to the end; returns the last status.

        Raises:
            AgentflyError: the run could not be started.
        """
        with self._folder.claim(self._spec.to_json()):
            self._keeper = keeper = Keeper(self._run, self._folder, self._show)
            if keeper.finished:
                self.finished_before = True
                return keeper.run.status
            # What earlier processes ran is in the steps that they left.
            self._ran = sum(float(step.get("step_seconds", 0)) for step in keeper.seen.steps)
            self._folder.suspend_request.unlink(missing_ok=True)
            try:
                await self._prepare()
                await self._train()
            except StopAsked:
                keeper.update(phase=Phase.Suspended, message="stopped before the trainer was up")
            except asyncio.CancelledError:
                keeper.update(phase=Phase.Suspended, message="stopped at once")
            except Exception as error:
                # Nothing of the run itself is wrong: the same command may find the machine mended.
                keeper.failed(keeper.seen.attempt, Reason.StartFailed, str(error), None)
                keeper.update(phase=Phase.Pending, roles={}, pools={}, message=str(error))
                raise
            finally:
                if keeper.seen.steps:
                    write_reward_png(keeper.seen.steps, self._folder.picture, self._run.metadata.name)
            return keeper.run.status

    async def _prepare(self) -> None:
        """Environments, then the model."""
        self._keeper.update(
            phase=Phase.Starting, message="preparing the environments of trainer and inference"
        )
        spec, log = self._spec, self._folder.logs / "environments.log"
        both = serves_itself(self._run)  # then one has verl and vLLM, for pools of models too
        name: Name = "colocated" if both else "trainer"
        self._trainer_python = await unless(self._stop, environment(name, spec.trainer.gpus_per_node, log))
        self._inference_python = (
            self._trainer_python
            if both
            else await unless(self._stop, environment("inference", spec.inference.gpus, log))
        )
        if spec.model.path is None:
            self._keeper.update(message="making the model")
        log = self._folder.logs / "model.log"
        await unless(self._stop, make_model(spec.model, spec.seed, self._places, self._trainer_python, log))

    async def _train(self) -> None:
        """Attempts until the run is done, suspended or failed."""
        self._keeper.update(message="starting sandboxes and the policy's servers")
        failures = 0
        async with data_plane(
            [*self._pools, *([] if self._policy is None else [self._policy])],
            logs_in=self._folder.root,
            inference_python=self._inference_python,
            start_timeout_s=self._spec.inference.start_timeout_seconds,
        ) as plane:
            self._places = replace(self._places, broker=plane.broker)
            await unless(self._stop, prove(plane, self._pools, self._spec.inference.start_timeout_seconds))
            while True:
                ended = await self._attempt(plane)
                verdict = after_attempt(ended, failures, self._spec.run_policy.backoff_limit)
                failures = verdict.failures
                self._keeper.update(failures=failures, attempt_time=datetime.now(UTC))
                if not await self._go_on(verdict.phase, verdict.pause_s):
                    return

    async def _go_on(self, phase: str, pause_s: float) -> bool:
        """Write what an attempt led to; after the pause True if there is another one."""
        keeper, failure = self._keeper, self._keeper.seen.failure
        if phase == "Succeeded":
            keeper.update(phase=Phase.Succeeded, message=f"all {self._spec.steps} steps are done")
        elif phase == "Suspended":
            keeper.update(phase=Phase.Suspended, message="on request, with a checkpoint")
        elif failure is not None and failure.reason == Reason.DeadlineExceeded:
            keeper.update(phase=Phase.Failed, reason=Reason.DeadlineExceeded, message=failure.message)
        elif phase == "Failed" and failure is not None:
            final = failure.exit_code == EXIT_INVALID
            reason = Reason(failure.reason) if final else Reason.BackoffLimitExceeded
            keeper.update(phase=Phase.Failed, reason=reason, message=failure.message)
        else:
            keeper.update(
                phase=Phase.Restarting,
                restarts=keeper.seen.restarts + 1,
                restart_time=datetime.now(UTC) + timedelta(seconds=pause_s),
                message=f"the next attempt starts in {pause_s:.0f} s",
            )
            await unless(self._stop, asyncio.sleep(pause_s))
            return True
        return False

    async def _attempt(self, plane: DataPlane) -> Ended:
        keeper, saved = self._keeper, self._keeper.saved_step
        attempt = keeper.seen.attempt + 1
        keeper.update(
            phase=Phase.Starting,
            attempt=attempt,
            attempt_time=datetime.now(UTC),
            resumed_step=saved,
            message="starting the policy's servers",
        )
        owner, deadline = f"{self._run.metadata.name}.{attempt}", self._spec.inference.start_timeout_seconds
        async with AsyncExitStack() as stack:
            stack.push_async_callback(plane.engine.release_owner, owner)
            urls: list[str] = []
            try:
                if self._policy is not None:
                    servers = await unless(self._stop, lease_servers(plane, self._policy, owner, deadline))
                    urls = [lease.base_url for lease in servers]
            except AgentflyError as error:
                keeper.failed(attempt, Reason.StartFailed, error.render(), None)
                return Ended(1, False, False)
            keeper.update(roles=_roles(len(urls), 0), message="starting the trainer")
            role = trainer_role(self._run, self._places, attempt, urls)
            for path, text in role.files.items():
                path.write_text(text)
            log = self._folder.logs / f"trainer-{attempt}.log"
            process = await stack.enter_async_context(
                running(
                    [str(self._trainer_python), *role.arguments],
                    env=role_environment(role),
                    log=log,
                    cwd=self._places.base_dir,
                )
            )
            late = await self._watch(process, plane, len(urls))
        code = process.returncode if process.returncode is not None else KILLED
        keeper.observe(plane.use(self._pools))
        suspended = code == EXIT_SUSPENDED and self._stop.is_set()
        if late is not None or (code != 0 and not suspended):
            kept = read_failure(self._folder.root, attempt)
            reason, message = late or kept or why(code, log)
            keeper.failed(attempt, reason, message, code)
        return Ended(KILLED if late is not None else code, suspended, keeper.saved_step > saved)

    async def _watch(
        self, process: asyncio.subprocess.Process, plane: DataPlane, servers: int
    ) -> tuple[Reason, str] | None:
        """Follow the trainer to its end; a reason if it must be ended before it ends by itself."""
        began = time.monotonic()
        first: float | None = None
        last: float | None = None
        asked: float | None = None
        try:
            while not await ends_within(process, TICK_S):
                now = time.monotonic()
                if self._keeper.observe(plane.use(self._pools)):
                    first, last = first or now, now
                    if asked is None:
                        self._keeper.update(phase=Phase.Running, roles=_roles(servers, 1), message="")
                if self._stop.is_set() and asked is None:
                    asked = now
                    self._folder.suspend_request.touch()
                    self._keeper.update(phase=Phase.Suspending, message="after this step, with a checkpoint")
                late = overdue(Clock(now, began, first, last, self._ran, asked), self._spec.run_policy)
                if late is not None:
                    return late
            return None
        finally:
            self._ran += time.monotonic() - first if first is not None else 0.0


def _roles(servers: int, trainers: int) -> dict[str, RoleStatus]:
    trainer = RoleStatus(desired=1, ready=trainers, reason=None if trainers else "no step yet")
    inference = {"inference": RoleStatus(desired=servers, ready=servers)} if servers else {}
    return {**inference, "trainer": trainer}
