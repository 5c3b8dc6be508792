"""The command line: ``agentfly run | rollout | pools | leases | env | crds | doctor``.

Exit codes: 0 done, 1 failed, 2 wrong input (nothing was started and nothing was written), 130 stopped on
request (the same command goes on).
"""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agentfly.api.reasons import RolloutJobPhase as JobPhase
from agentfly.api.reasons import TrainingRunPhase as Phase
from agentfly.errors import AgentflyError

if TYPE_CHECKING:
    from agentfly.local.rundir import RunDir

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

    for name, text in (
        ("pools", "how the pools of what runs here are doing"),
        ("leases", "who holds which member of what runs here, and for how long"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "--broker", metavar="ADDRESS", help="unix:///path or http://host:port; default: all that run here"
        )
        command.add_argument("-o", "--output", choices=["table", "json"], default="table")
        command.set_defaults(command=_look, what=name)

    env = commands.add_parser(
        "env", help="build the environments of trainer and inference; prints their Python"
    )
    env.add_argument("names", nargs="+", choices=["trainer", "inference"])
    env.add_argument("--accelerator", choices=["cpu", "cuda"], default="cpu")
    env.set_defaults(command=_env)

    crds = commands.add_parser("crds", help="write the CustomResourceDefinitions")
    crds.add_argument("--directory", type=Path, default=Path("crds"), help="where to (default: crds)")
    crds.add_argument("--check", action="store_true", help="write nothing; fail if the files differ")
    crds.set_defaults(command=_crds)

    doctor = commands.add_parser("doctor", help="what works on this machine, and why the rest does not")
    doctor.set_defaults(command=_doctor)
    return parser


def _run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from agentfly.local.preflight import training_run
    from agentfly.local.rundir import RunDir
    from agentfly.local.training import TrainingRunner
    from agentfly.local.view import message, training_summary, view

    work = training_run(args.file, args.sets, args.name)
    folder = RunDir((args.runs / work.run.metadata.name).resolve())
    with view(Console()) as show:
        runner = TrainingRunner(work.run, work.pools, work.base_dir, folder, show)
        with _begun():
            status = asyncio.run(_until_stopped(runner.run(), runner.suspend))
    if runner.finished_before:
        _tell_finished(folder, message(status))
    sys.stdout.write(training_summary(work.run.metadata.name, status, folder.read_metrics()) + "\n")
    return {Phase.Succeeded: DONE, Phase.Suspended: STOPPED}.get(status.phase or Phase.Failed, FAILED)


def _rollout(args: argparse.Namespace) -> int:
    from rich.console import Console

    from agentfly.local.preflight import rollout_job
    from agentfly.local.rollouts import RolloutRunner
    from agentfly.local.rundir import RunDir
    from agentfly.local.view import message, rollout_summary, view

    work = rollout_job(args.file, args.sets, args.name)
    folder = RunDir((args.runs / work.run.metadata.name).resolve())
    with view(Console()) as show:
        runner = RolloutRunner(work.run, work.pools, work.base_dir, folder, show)
        with _begun():
            status = asyncio.run(_until_stopped(runner.run(), runner.stop))
    if runner.finished_before:
        _tell_finished(folder, message(status))
    sys.stdout.write(rollout_summary(work.run.metadata.name, status) + "\n")
    return {JobPhase.Succeeded: DONE, JobPhase.Pending: STOPPED}.get(status.phase or JobPhase.Failed, FAILED)


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


def _tell_finished(folder: "RunDir", how: str) -> None:
    told = AgentflyError(
        f"run {folder.name}: was finished before: {how}",
        hints=["give a new run a name of its own: --name NAME", f"or start over: rm -r {folder.root}"],
    )
    sys.stderr.write(told.render() + "\n")


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

    from agentfly.local import look
    from agentfly.local.paths import run_dir

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
