"""One RolloutJob on this machine.

Guarantees:
1. However the job ends, its worker, sandboxes and servers end with it.
2. A job that was stopped goes on with the rollouts that have no outcome yet; a finished one stays finished,
   but for one that failed by its failure budget: it goes on when the budget was raised far enough.
3. A server of the policy that dies ends this life of the job, not the job: the same command goes on.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentfly.api import ResourcePool, RolloutJob, RolloutJobStatus
from agentfly.api.reasons import Reason
from agentfly.api.reasons import RolloutJobPhase as Phase
from agentfly.errors import AgentflyError
from agentfly.local.plane import DataPlane, data_plane
from agentfly.local.processes import reason_in, role_environment, running
from agentfly.local.rundir import RunDir
from agentfly.local.steps import StopAsked, ends_within, environment, lease_servers, make_model, prove, unless
from agentfly.resources.lease import Lease
from agentfly.roles.plan import Places, inference_pool, rollout_role
from agentfly.roles.status import JobSeen, rollout_status
from agentfly.roles.worker import EXIT_BUDGET, WorkerReport, report_file

TICK_S = 0.5


class RolloutRunner:
    """Runs a RolloutJob to its end; arguments as for `agentfly.local.training.TrainingRunner`."""

    def __init__(
        self,
        job: RolloutJob,
        pools: Sequence[ResourcePool],
        base_dir: Path,
        folder: RunDir,
        show: Callable[[RolloutJob], None],
    ) -> None:
        self._job = job
        self._pools = tuple(pools)
        self._folder = folder
        self._show = show
        self._stop = asyncio.Event()
        self._places = Places(folder.root, base_dir)
        self._policy = inference_pool(job, self._places)
        self._seen = JobSeen(Phase.Pending)
        self.finished_before = False  # by an earlier process: this one started nothing

    def stop(self) -> None:
        """Ask the job to stop; what is finished stays."""
        self._stop.set()

    async def run(self) -> RolloutJobStatus:
        """Run to the end; returns the last status.

        Raises:
            AgentflyError: the job could not be started.
        """
        with self._folder.claim(self._job.spec.to_json()):
            stored = self._folder.read_status()
            if stored is not None:
                status = RolloutJobStatus.model_validate(stored)
                self._job = self._job.model_copy(update={"status": status})
                self._seen = replace(self._seen, start_time=status.start_time)
                if status.phase in (Phase.Succeeded, Phase.Failed) and not self._reopened(status):
                    self.finished_before = True
                    return status
            try:
                await self._life()
            except (StopAsked, asyncio.CancelledError):
                self._update(phase=Phase.Pending, message="stopped; the same command goes on")
            except Exception as error:
                self._update(phase=Phase.Pending, message=str(error))
                raise
            return self._job.status

    def _reopened(self, status: RolloutJobStatus) -> bool:
        """Whether the job failed by a failure budget that by now is large enough for what failed."""
        budget, counts = self._job.spec.run_policy.failure_budget, status.tasks
        if not any(condition.reason == Reason.FailureBudgetExceeded for condition in status.conditions):
            return False
        return counts is not None and counts.failed <= budget * counts.total

    async def _life(self) -> None:
        spec = self._job.spec
        self._update(phase=Phase.Starting, message="preparing the environment and the model")
        log = self._folder.logs / "environments.log"
        inference = await unless(self._stop, environment("inference", spec.inference.gpus, log))
        # A model is made by a script of the user: the trainer's environment has what it may need.
        maker = (
            inference
            if spec.model.path is not None
            else await unless(self._stop, environment("trainer", 0, log))
        )
        log = self._folder.logs / "model.log"
        await unless(self._stop, make_model(spec.model, spec.seed, self._places, maker, log))
        self._update(message="starting sandboxes and the policy's servers")
        async with data_plane(
            [*self._pools, self._policy],
            logs_in=self._folder.root,
            inference_python=inference,
            start_timeout_s=spec.inference.start_timeout_seconds,
        ) as plane:
            await unless(self._stop, prove(plane, self._pools, spec.inference.start_timeout_seconds))
            owner, deadline = self._job.metadata.name, spec.inference.start_timeout_seconds
            servers = await unless(self._stop, lease_servers(plane, self._policy, owner, deadline))
            urls = [lease.base_url for lease in servers]
            role = rollout_role(self._job, replace(self._places, broker=plane.broker), urls)
            for path, text in role.files.items():
                path.write_text(text)
            log = self._folder.logs / "rollout.log"
            command = [str(inference), *role.arguments]
            self._update(
                phase=Phase.Running, start_time=self._seen.start_time or datetime.now(UTC), message=""
            )
            async with running(
                command, env=role_environment(role), log=log, cwd=self._places.base_dir
            ) as worker:
                late = await self._watch(worker, plane, servers)
        self._end(None if late else worker.returncode, log)

    async def _watch(
        self, worker: asyncio.subprocess.Process, plane: DataPlane, servers: Sequence[Lease]
    ) -> bool:
        """Follow the worker to its end; True if its time is over.

        Raises:
            AgentflyError: a server of the policy is gone: what fails now is not for the failure budget.
        """
        deadline, began = self._job.spec.run_policy.active_deadline_seconds, time.monotonic()
        while not await unless(self._stop, ends_within(worker, TICK_S)):
            self._update(pools=plane.use(self._pools), report=self._report())
            await self._check(plane, servers)
            if deadline is not None and time.monotonic() - began >= deadline:
                return True
        if worker.returncode != 0:
            await self._check(plane, servers)
        return False

    async def _check(self, plane: DataPlane, servers: Sequence[Lease]) -> None:
        alive = await plane.engine.heartbeat([lease.info.lease_id for lease in servers])
        for lease in servers:
            if lease.lost or not alive[lease.info.lease_id]:
                log = self._folder.logs / f"{lease.info.member_id}.log"
                raise AgentflyError(
                    f"policy: its server {lease.info.address} is gone",
                    hints=[f"read {log}", "the same command goes on with the rollouts that are left"],
                )

    def _end(self, code: int | None, log: Path) -> None:
        done: dict[str, Any] = {"completion_time": datetime.now(UTC), "report": self._report(), "pools": {}}
        if code == 0:
            self._update(phase=Phase.Succeeded, message="every rollout has an outcome", **done)
            return
        reason = {None: Reason.DeadlineExceeded, EXIT_BUDGET: Reason.FailureBudgetExceeded}.get(
            code, Reason.AttemptFailed
        )
        what = (
            "its time is over" if code is None else f"worker: exit code {code}: {reason_in(log)}; read {log}"
        )
        self._update(phase=Phase.Failed, reason=reason, message=what, **done)

    def _report(self) -> WorkerReport | None:
        path = report_file(self._folder.root)
        return WorkerReport.model_validate_json(path.read_text()) if path.exists() else None

    def _update(self, **changes: Any) -> None:
        self._seen = replace(self._seen, **changes)
        status = rollout_status(self._job, self._seen, datetime.now(UTC))
        if status != self._job.status:
            self._job = self._job.model_copy(update={"status": status})
            self._folder.write_status(status.to_json())
            self._show(self._job)
