"""One RolloutJob on this machine, or at the broker of a namespace.

Guarantees:
1. However the job ends, its worker, sandboxes and servers end with it.
2. A job that was stopped goes on with the rollouts that have no outcome yet; a finished one stays finished,
   but for one that failed by its failure budget: it goes on when the budget was raised far enough.
3. A server of the policy that dies ends this life of the job, not the job: the same command goes on.
4. At a broker nothing is started here but the worker, with the Python that this is: pools are the broker's,
   and the policy is served by whoever `Elsewhere` names. A broker that is yet to come is waited for.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentfly.api import PoolUse, ResourcePool, RolloutJob, RolloutJobStatus
from agentfly.api.reasons import Reason
from agentfly.api.reasons import RolloutJobPhase as Phase
from agentfly.broker.access import TOKEN_FILE
from agentfly.broker.client import BrokerClient
from agentfly.errors import AgentflyError
from agentfly.local.plane import data_plane, pool_use
from agentfly.local.processes import role_environment, running, unguarded
from agentfly.local.rundir import RunDir
from agentfly.local.steps import StopAsked, ends_within, environment, lease_servers, make_model, prove, unless
from agentfly.resources.errors import Infra
from agentfly.resources.lease import Lease, Resources
from agentfly.roles.failure import reason_in
from agentfly.roles.plan import Places, Role, inference_pool, rollout_role
from agentfly.roles.status import JobSeen, rollout_status
from agentfly.roles.worker import EXIT_BUDGET, WorkerReport, log_file, report_file

TICK_S = 0.5
ASK_S = 2.0  # between two questions to a broker that is yet to come


@dataclass(frozen=True)
class Elsewhere:
    """Where a job has its resources, if not on this machine.

    Attributes:
        broker: its address.
        policy: who serves it: base URLs of vLLM servers, or ModelService pools of the broker, by name, each
            of which gives one.
    """

    broker: str
    policy: tuple[str, ...]


class RolloutRunner:
    """Runs a RolloutJob to its end; arguments as for `agentfly.local.training.TrainingRunner`.

    ``elsewhere`` None: its pools and the policy's servers are started on this machine.
    """

    def __init__(
        self,
        job: RolloutJob,
        pools: Sequence[ResourcePool],
        base_dir: Path,
        folder: RunDir,
        show: Callable[[RolloutJob], None],
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._job = job
        self._pools = tuple(pools)
        self._folder = folder
        self._show = show
        self._elsewhere = elsewhere
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
        if self._elsewhere is None:
            await self._on_this_machine()
        else:
            await self._at_broker(self._elsewhere)

    async def _on_this_machine(self) -> None:
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
            log = self._begin(role)
            command = [str(inference), *role.arguments]
            async with running(
                command, env=role_environment(role), log=log, cwd=self._places.base_dir
            ) as worker:
                late = await self._watch(worker, plane.engine, servers)
        self._end(None if late else worker.returncode, log)

    async def _at_broker(self, elsewhere: Elsewhere) -> None:
        name, deadline = self._job.metadata.name, self._job.spec.inference.start_timeout_seconds
        self._update(phase=Phase.Starting, message=f"asking the broker {elsewhere.broker}")
        async with BrokerClient(elsewhere.broker, share=name) as client:
            await unless(self._stop, self._known(client, deadline))
            servers: list[Lease] = []
            urls: list[str] = []
            for number, where in enumerate(elsewhere.policy):
                if "://" in where:
                    urls.append(where)
                    continue
                lease = await unless(
                    self._stop, client.acquire(where, name, key=f"server-{number}", deadline=deadline)
                )
                servers.append(lease)
                urls.append(lease.base_url)
            role = rollout_role(self._job, replace(self._places, broker=elsewhere.broker), urls)
            log = self._begin(role)
            env = role_environment(role)
            if TOKEN_FILE in os.environ:
                env[TOKEN_FILE] = os.environ[TOKEN_FILE]
            command = [sys.executable, *role.arguments]
            async with unguarded(command, env=env, log=log, cwd=self._places.base_dir) as worker:
                late = await self._watch(worker, client, servers)
        self._end(None if late else worker.returncode, log)

    async def _known(self, client: BrokerClient, deadline_s: float) -> None:
        """Wait until the broker knows the pools of the job.

        Raises:
            AgentflyError: it does not, or does not answer, within the deadline.
        """
        end = time.monotonic() + deadline_s
        while True:
            try:
                served = await client.status()
                missing = [name for name in self._job.spec.pools if name not in served]
                if not missing:
                    return
                known = ", ".join(sorted(served)) or "none"
                hint = f"kubectl apply the ResourcePool first; pools that are there: {known}"
                failure: AgentflyError = AgentflyError(
                    f"spec.pools: {missing[0]} is no pool of the broker {client.address}", hints=[hint]
                )
            except Infra as error:
                failure = error
            if time.monotonic() >= end:
                raise failure
            self._update(message=f"waiting, at most {deadline_s:.0f} s: {failure.message}")
            await asyncio.sleep(ASK_S)

    def _begin(self, role: Role) -> Path:
        """Write the files of the worker; its log."""
        for path, text in role.files.items():
            path.write_text(text)
        self._update(phase=Phase.Running, start_time=self._seen.start_time or datetime.now(UTC), message="")
        return log_file(self._folder.root)

    async def _watch(
        self, worker: asyncio.subprocess.Process, resources: Resources, servers: Sequence[Lease]
    ) -> bool:
        """Follow the worker to its end; True if its time is over.

        Raises:
            AgentflyError: a server of the policy is gone: what fails now is not for the failure budget.
        """
        deadline, began = self._job.spec.run_policy.active_deadline_seconds, time.monotonic()
        while not await unless(self._stop, ends_within(worker, TICK_S)):
            self._update(pools=await self._use(resources), report=self._report())
            await self._check(resources, servers)
            if deadline is not None and time.monotonic() - began >= deadline:
                return True
        if worker.returncode != 0:
            await self._check(resources, servers)
        return False

    async def _use(self, resources: Resources) -> dict[str, PoolUse]:
        """The counts of the job's pools; those from before while a broker is away."""
        try:
            seen = await resources.status()
        except Infra:
            return dict(self._seen.pools)
        return {name: pool_use(seen[name]) for name in self._job.spec.pools if name in seen}

    async def _check(self, resources: Resources, servers: Sequence[Lease]) -> None:
        alive = await resources.heartbeat([lease.info.lease_id for lease in servers]) if servers else {}
        for lease in servers:
            if lease.lost or not alive[lease.info.lease_id]:
                log = self._folder.logs / f"{lease.info.member_id}.log"
                hints = [f"read {log}"] if self._elsewhere is None else []
                raise AgentflyError(
                    f"policy: its server {lease.info.address} is gone",
                    hints=[*hints, "the same command goes on with the rollouts that are left"],
                )

    def _end(self, code: int | None, log: Path) -> None:
        done: dict[str, Any] = {"completion_time": datetime.now(UTC), "report": self._report(), "pools": {}}
        if code == 0:
            self._update(phase=Phase.Succeeded, message="every rollout has an outcome", **done)
            return
        reason = {None: Reason.DeadlineExceeded, EXIT_BUDGET: Reason.FailureBudgetExceeded}.get(
            code, Reason.AttemptFailed
        )
        if code == EXIT_BUDGET:
            what = f"more rollouts failed than spec.runPolicy.failureBudget allows; read {log}"
        elif code is None:
            what = "its time is over"
        else:
            what = f"worker: exit code {code}: {reason_in(log)}; read {log}"
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
