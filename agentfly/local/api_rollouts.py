"""``agentfly rollout --url``: a RolloutJob whose turns an OpenAI-compatible API writes, in this process.

Guarantees:
1. Tasks, groups, strategy, deadlines, budget and pools are the job's. Its model is not touched, and need not
   be there; no environment is built.
2. Trajectories are in the folder of the run as ever, without token ids. A job that was stopped, or that
   failed, goes on with the rollouts that have no outcome yet.
3. A folder belongs to one model: another one needs another name.
4. Exit codes are those of the command line; one that failed says why. A job that was finished before says so.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from agentfly.errors import AgentflyError

if TYPE_CHECKING:
    from agentfly.api import RolloutJob
    from agentfly.local.preflight import Work
    from agentfly.local.rundir import RunDir
    from agentfly.rollout import RolloutReport

ENV_KEY = "OPENAI_API_KEY"


def add_api(command: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add the arguments that name an API."""
    command.add_argument("--url", required=required, help="of an OpenAI-compatible API, with its /v1")
    command.add_argument("--model", required=required, help="its name at the API")
    command.add_argument("--key-env", default=ENV_KEY, metavar="VAR", help=f"of the key; default: {ENV_KEY}")


def key_of(args: argparse.Namespace) -> str | None:
    """The key of the API that the arguments name; None if it needs none.

    Raises:
        AgentflyError: the address is none, or the variable that was named for the key is not set.
    """
    if not args.url.startswith(("http://", "https://")):
        raise AgentflyError(f"--url: {args.url} has no scheme", hints=[f"write http://{args.url}"])
    key = os.environ.get(args.key_env)
    if not key and args.key_env != ENV_KEY:
        hints = [f"export {args.key_env}=... before, or leave --key-env out"]
        raise AgentflyError(f"--key-env: {args.key_env} is not set in this environment", hints=hints)
    return key or None


def run(args: argparse.Namespace) -> int:
    """Run the job of the command line; returns its exit code."""
    from rich.console import Console

    from agentfly.api.reasons import RolloutJobPhase as Phase
    from agentfly.local.preflight import rollout_job
    from agentfly.local.rundir import RunDir, was_finished
    from agentfly.local.view import rollout_end, rollout_summary, view
    from agentfly.roles.status import JobSeen, rollout_status
    from agentfly.roles.worker import trajectories_file
    from agentfly.rollout import RolloutReport
    from agentfly.worker import worker_report

    if args.model is None:
        raise AgentflyError("--url: names an API and no model of it", hints=["add --model NAME"])
    if args.policy:
        hints = ["leave one of the two out"]
        raise AgentflyError(f"--policy: {args.policy[0]} and an API cannot both be the policy", hints=hints)
    key, work = key_of(args), rollout_job(args.file, args.sets, args.name, served=False)
    folder = RunDir((args.runs / work.run.metadata.name).resolve())
    api = {"url": args.url, "model": args.model}
    last, error, started = RolloutReport(total=0), None, datetime.now(UTC)
    spec = {name: value for name, value in work.run.spec.to_json().items() if name != "model"}
    with folder.claim({**spec, "api": api}), view(Console()) as show:

        def job(phase: Phase, message: str = "") -> "RolloutJob":
            seen = JobSeen(phase, worker_report(last), start_time=started, message=message)
            status = rollout_status(work.run, seen, datetime.now(UTC))
            return work.run.model_copy(update={"status": status})

        def progress(report: "RolloutReport") -> None:
            nonlocal last
            last = report
            show(job(Phase.Running))

        try:
            asyncio.run(_play(args, key, work, folder, progress))
            done = job(Phase.Succeeded)
        except AgentflyError as failure:
            error, done = failure, job(Phase.Failed, failure.message)
        show(done)
    if error is not None:
        sys.stderr.write(error.render() + "\n")
    elif last.resumed == last.total:
        sys.stderr.write(was_finished(folder, "every rollout has an outcome").render() + "\n")
    told = last.told(folder.logs / "agentfly.log")
    sys.stdout.write(rollout_end(told, trajectories_file(folder.root), work.unnamed))
    sys.stdout.write(rollout_summary(work.run.metadata.name, done.status) + "\n")
    return int(error is not None)


async def _play(
    args: argparse.Namespace,
    key: str | None,
    work: "Work[RolloutJob]",
    folder: "RunDir",
    progress: "Callable[[RolloutReport], None]",
) -> None:
    from agentfly.local.pools import running
    from agentfly.models import ChatModel
    from agentfly.roles.plan import Places, rollout_config
    from agentfly.rollout import TrajectoryWriter
    from agentfly.worker import play_by, rows_of

    config = rollout_config(work.run, Places(folder.root, work.base_dir))
    rows = rows_of(config)
    with TrajectoryWriter(config.trajectories_file) as file:
        async with ChatModel(args.url, args.model, api_key=key) as model, running(work.pools) as resources:
            await play_by(model, config, rows, None, resources, file, progress=progress)
