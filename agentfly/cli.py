"""The command line: ``agentfly run | rollout | chat | top | pools | leases | broker | env | crds | doctor``.

Exit codes: 0 done, 1 failed, 2 wrong input (nothing was started and nothing was written), 130 stopped on
request (the same command goes on).
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agentfly.api.reasons import RolloutJobPhase as JobPhase
from agentfly.api.reasons import TrainingRunPhase as Phase
from agentfly.errors import AgentflyError
from agentfly.local import api_rollouts, chat
from agentfly.roles.trainer import ENV_BROKER, ENV_INFERENCE_URLS

if TYPE_CHECKING:
    from agentfly.local.rollouts import Elsewhere

Status = TypeVar("Status")
DONE, FAILED, WRONG_INPUT, STOPPED = 0, 1, 2, 130


class Broke(AgentflyError):
    """Work that was begun failed: not for its input."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    args = _parser().parse_args(argv)
    logger = logging.getLogger("agentfly")
    logger.setLevel(logging.INFO)
    logger.propagate = args.verbose  # otherwise it goes to the log of the run alone
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        return command(args)
    except AgentflyError as error:
        sys.stderr.write(error.render() + "\n")
        return FAILED if isinstance(error, Broke) else WRONG_INPUT
    except KeyboardInterrupt:
        return STOPPED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="agentfly", description="Agentic reinforcement learning.")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what happens inside")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    for name, function, text in (
        ("run", _run, "train: run the TrainingRun of a manifest on this machine, or go on with it"),
        ("rollout", _rollout, "run the RolloutJob of a manifest on this machine"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "-f", "--file", required=True, type=Path, help="manifest, with its ResourcePools"
        )
        command.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="PATH=VALUE",
            dest="sets",
            help="change a field, such as model.path=DIR or pool/shell.capacity.max=4",
        )
        command.add_argument("--name", help="name of the run; default: that of the manifest")
        command.add_argument(
            "--runs", type=Path, default=Path("runs"), help="where runs are kept (default: runs)"
        )
        command.set_defaults(command=function)
        if name == "rollout":
            api_rollouts.add_api(command)
            command.add_argument(
                "--broker",
                metavar="URL",
                default=os.environ.get(ENV_BROKER),
                help=f"the broker of a namespace, which has the pools; default: {ENV_BROKER}, else none",
            )
            command.add_argument(
                "--policy",
                action="append",
                metavar="URL|POOL",
                help="with a broker: a vLLM server, or a ModelService pool of the broker that gives one; "
                f"may be repeated; default: {ENV_INFERENCE_URLS}",
            )

    for name, text in (
        ("pools", "how the pools of what runs here, or in a namespace of a cluster, are doing"),
        ("leases", "who holds which member of what runs here, or in a namespace, and for how long"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "--broker", metavar="ADDRESS", help="unix:///path or http://host:port; default: all that run here"
        )
        _add_cluster(command)
        command.add_argument("-o", "--output", choices=["table", "json"], default="table")
        command.set_defaults(command=_look, what=name)

    text = "runs, jobs and pools of a namespace of a cluster, on one screen"
    top = commands.add_parser("top", help=text, description=text)
    _add_cluster(top)
    top.add_argument("--once", action="store_true", help="print it once; so it is where there is no terminal")
    top.set_defaults(command=_top)

    text = "serve the pools of a namespace; the operator runs this in a pod of each"
    broker = commands.add_parser("broker", help=text, description=text)
    _add_cluster(broker)
    broker.add_argument("--listen", metavar="HOST:PORT", help="default: 0.0.0.0:7080")
    broker.add_argument("--log-format", choices=["text", "json"], help="default: text")
    broker.set_defaults(command=_broker)

    env = commands.add_parser("env", help="build environments of trainer and policy; prints their Python")
    env.add_argument("names", nargs="+", choices=["trainer", "inference", "colocated"])
    env.add_argument("--accelerator", choices=["cpu", "cuda"], default="cpu")
    env.set_defaults(command=_env)

    crds = commands.add_parser("crds", help="write the CustomResourceDefinitions")
    crds.add_argument("--directory", type=Path, default=Path("crds"), help="where to (default: crds)")
    crds.add_argument("--check", action="store_true", help="write nothing; fail if the files differ")
    crds.set_defaults(command=_crds)

    chat.add_command(commands)

    doctor = commands.add_parser("doctor", help="what works on this machine, and why the rest does not")
    doctor.set_defaults(command=_doctor)
    return parser


def _add_cluster(command: argparse.ArgumentParser) -> None:
    command.add_argument("-n", "--namespace", help="of the cluster; default: that of the context")
    command.add_argument("--context", help="of the kubeconfig; default: the current one")
    command.add_argument("--kubeconfig", type=Path, metavar="FILE", help="default: as for kubectl")


def _run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from agentfly.local.preflight import training_run
    from agentfly.local.rundir import RunDir, was_finished
    from agentfly.local.training import TrainingRunner
    from agentfly.local.view import message, training_summary, view

    work = training_run(args.file, args.sets, args.name)
    folder = RunDir((args.runs / work.run.metadata.name).resolve())
    with view(Console()) as show:
        runner = TrainingRunner(work.run, work.pools, work.base_dir, folder, show)
        with _begun():
            status = asyncio.run(_until_stopped(runner.run(), runner.suspend))
    if runner.finished_before:
        sys.stderr.write(was_finished(folder, message(status)).render() + "\n")
    sys.stdout.write(training_summary(work.run.metadata.name, status, folder.read_metrics()) + "\n")
    return {Phase.Succeeded: DONE, Phase.Suspended: STOPPED}.get(status.phase or Phase.Failed, FAILED)


def _rollout(args: argparse.Namespace) -> int:
    if args.url is not None:
        return api_rollouts.run(args)
    from rich.console import Console

    from agentfly.local.preflight import rollout_job
    from agentfly.local.rollouts import RolloutRunner
    from agentfly.local.rundir import RunDir, was_finished
    from agentfly.local.view import message, rollout_end, rollout_summary, view
    from agentfly.roles.worker import told_file, trajectories_file

    elsewhere = _elsewhere(args)
    work = rollout_job(args.file, args.sets, args.name, here=elsewhere is None)
    folder = RunDir((args.runs / work.run.metadata.name).resolve())
    with view(Console()) as show:
        runner = RolloutRunner(work.run, work.pools, work.base_dir, folder, show, elsewhere)
        with _begun():
            status = asyncio.run(_until_stopped(runner.run(), runner.stop))
    if runner.finished_before:
        sys.stderr.write(was_finished(folder, message(status)).render() + "\n")
    told = told_file(folder.root)
    lines = told.read_text().splitlines() if told.exists() else []
    sys.stdout.write(rollout_end(lines, trajectories_file(folder.root), work.unnamed))
    sys.stdout.write(rollout_summary(work.run.metadata.name, status) + "\n")
    return {JobPhase.Succeeded: DONE, JobPhase.Pending: STOPPED}.get(status.phase or JobPhase.Failed, FAILED)


def _elsewhere(args: argparse.Namespace) -> "Elsewhere | None":
    from agentfly.local.rollouts import Elsewhere

    policy = tuple(args.policy or filter(None, os.environ.get(ENV_INFERENCE_URLS, "").split(",")))
    if args.broker is None:
        if args.policy:
            raise AgentflyError(
                f"--policy: {args.policy[0]} is for a job at a broker",
                hints=["add --broker URL, or leave --policy out: the policy is then served here"],
            )
        return None
    if not policy:
        raise AgentflyError(
            f"--policy: nobody serves the policy of a job at the broker {args.broker}",
            hints=["add --policy http://HOST:PORT of a vLLM server, or --policy POOL of type ModelService"],
        )
    return Elsewhere(args.broker, policy)


@contextmanager
def _begun() -> Iterator[None]:
    """What fails inside was begun, unless the folder of the run refused it."""
    from agentfly.local.rundir import FolderRefused

    try:
        yield
    except FolderRefused:
        raise
    except AgentflyError as error:
        raise Broke(error.message, hints=error.hints) from error


async def _until_stopped(work: Coroutine[Any, Any, Status], stop: Callable[[], None]) -> Status:
    """Run the work; the first SIGINT or SIGTERM asks it to stop, the second one cancels it."""
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    asked = False

    def on_signal() -> None:
        nonlocal asked
        task.cancel() if asked else stop()
        asked = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    return await task


def _look(args: argparse.Namespace) -> int:
    from rich.console import Console

    from agentfly.broker.proxied import ProxiedBroker
    from agentfly.local import look
    from agentfly.local.paths import run_dir

    if args.namespace or args.context or args.kubeconfig:
        if args.broker:
            raise AgentflyError(
                "--broker: names a broker, and so do --namespace, --context and --kubeconfig",
                hints=["keep --broker alone, or leave it out"],
            )
        addresses = [f"namespace {args.namespace}" if args.namespace else "namespace of the context"]
        broker = ProxiedBroker(args.namespace, kubeconfig=args.kubeconfig, context=args.context)
        pools = look.pools_of(broker, addresses[0]) if args.what == "pools" else {}
        leases = look.leases_of(broker, addresses[0]) if args.what == "leases" else {}
    else:
        addresses = [args.broker] if args.broker else look.listening(run_dir())
        pools = look.pools(addresses) if args.what == "pools" else {}
        leases = look.leases(addresses) if args.what == "leases" else {}
    if args.output == "json":
        sys.stdout.write(look.as_json(pools or leases, args.what) + "\n")
        return DONE
    several = len(addresses) > 1
    tables = [look.pool_table(found, address if several else None) for address, found in pools.items()]
    tables += [look.lease_table(found, address if several else None) for address, found in leases.items()]
    for table in tables:
        Console(width=look.WIDTH).print(table)
    return DONE


def _top(args: argparse.Namespace) -> int:
    from rich.console import Console

    from agentfly.local.top import top

    where = {"namespace": args.namespace, "kubeconfig": args.kubeconfig, "context": args.context}
    top(Console(), **where, once=args.once)
    return DONE


def _broker(args: argparse.Namespace) -> int:
    from agentfly.broker import cluster, config, logs

    variables = dict(os.environ)
    for name, value in (
        (config.NAMESPACE, args.namespace),
        (config.LISTEN, args.listen),
        (config.LOG_FORMAT, args.log_format),
    ):
        if value is not None:
            variables[name] = value
    logging.getLogger("agentfly").propagate = True
    if variables.get(config.LOG_FORMAT) == "json":
        logs.log_json()
    settings = replace(config.config_from(variables), kubeconfig=args.kubeconfig, context=args.context)
    asyncio.run(cluster.run(settings))
    return DONE


def _env(args: argparse.Namespace) -> int:
    from agentfly.local import environments

    with _begun():
        for name in args.names:
            sys.stdout.write(f"{environments.build(name, accelerator=args.accelerator)}\n")
    return DONE


def _crds(args: argparse.Namespace) -> int:
    from agentfly.api import crd

    if not args.check:
        crd.write(args.directory)
        return DONE
    differing = crd.check(args.directory)
    for line in differing:
        sys.stderr.write(f"{line}\n")
    return FAILED if differing else DONE


def _doctor(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Column, Table

    from agentfly.local.doctor import examine

    findings = examine()
    # A path is of use as a whole only.
    table = Table(Column("part", overflow="fold"), "", Column("found", overflow="fold"), "needed for")
    for finding in findings:
        colour = {"ok": "green", "missing": "red", "optional": "yellow"}[finding.state]
        table.add_row(finding.part, f"[{colour}]{finding.state}[/]", finding.detail, finding.needed)
    Console().print(table)
    return FAILED if any(finding.state == "missing" for finding in findings) else DONE


if __name__ == "__main__":
    sys.exit(main())
