"""`make kills`: every part of a run and of a job, struck in every phase, on a cluster made for it.

    python -m tests.kills [--only PATTERN]...

Guarantees:
1. Trainer, vLLM, sandboxes, operator and broker are the product's, on a real node.
2. Its output is one table, each row as soon as it is known, also if it is broken off. What goes on meanwhile
   is told on the other stream.
3. The exit status is 0 only if every cell was struck and all is right.
"""

import argparse
import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.cluster import images, product
from tests.cluster.cluster import Cluster
from tests.cluster.demo import command, image, storage
from tests.cluster.machine import ClusterError, cache
from tests.e2e.objects import apply
from tests.e2e.runs import EXAMPLES, shell
from tests.e2e.world import World, install
from tests.kills import drive, table
from tests.kills.drive import Lane
from tests.kills.look import Eyes, watched
from tests.kills.matrix import USUAL, Cell, Work, chosen
from tests.kills.table import Row

NAMESPACE, CLAIM = "kills", "runs"
MODEL_S = 600.0
SANDBOXES = {"shell": 6, "play": 3}


def main(arguments: list[str]) -> int:
    """Plays it and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=__doc__)
    command.flags(parser, cache() / "kills-run")
    parser.add_argument("--only", action="append", help="cells whose name matches, such as 'run/*/head/kill'")
    options = parser.parse_args(arguments)
    cells = chosen(options.only or USUAL)
    if not cells:
        parser.error(f"--only: no cell is called {' or '.join(options.only)}")
    return command.status_of(lambda: _kill(options.dir, cells, options.keep))


def _kill(folder: Path, cells: tuple[Cell, ...], keep: bool) -> int:
    cluster, say = Cluster(folder), _Teller()
    roles: tuple[image.Role, ...] = ("inference", "trainer")
    homes = {role: storage.environment(role) for role in roles}
    say("the images of operator, broker, sandboxes, vLLM and verl")
    agentfly = product.agentfly_image()
    archives = [images.python(), agentfly, product.sandboxd_image()]
    archives += [image.role_image(role, agentfly) for role in roles]
    begun, rows = time.monotonic(), list[Row]()
    sys.stdout.write(f"{table.HEAD}\n")
    try:
        with (
            _model(homes["trainer"], folder.with_name(f"{folder.name}-model")) as model,
            command.a_cluster(cluster, archives, keep, say),
            install(cluster, NAMESPACE) as world,
        ):
            claim = storage.provide(cluster, NAMESPACE, CLAIM, homes)
            shutil.copytree(model(), claim / drive.MODEL)
            _furnish(world)
            with watched(cluster.api, NAMESPACE, SANDBOXES).watching() as observer:
                eyes = Eyes(observer, NAMESPACE, claim)
                for row in _rows(_lanes(world, eyes, cells, say), eyes, say):
                    rows.append(row)
                    _write(row)
    finally:
        told = {row.text.split()[0] for row in rows}
        left = [table.row_of_none(cell, "it was broken off") for cell in cells if cell.name not in told]
        for row in left:
            _write(row)
        _write(table.last_line([*rows, *left], (time.monotonic() - begun) / 60))
    return 1 if any(row.wrong for row in rows) else 0


def _write(line: object) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@contextlib.contextmanager
def _model(home: Path, target: Path) -> Iterator[Callable[[], Path]]:
    """Makes the quickstart's while the cluster comes up; what it gives waits for it.

    Raises:
        ClusterError: of the latter: it is not made.
    """
    python, script = str(home / "bin" / "python"), str(EXAMPLES / "quickstart/model.py")
    made = subprocess.Popen([python, script, "--output", str(target)], stdout=sys.stderr)

    def done() -> Path:
        if made.wait(MODEL_S) != 0:
            raise ClusterError(f"{script}: exit {made.returncode}")
        for path in target.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)  # for the user of the pods
        return target

    try:
        yield done
    finally:
        made.kill()
        made.wait()


def _furnish(world: World) -> None:
    """What a namespace needs for runs and jobs: their folder, a claim, sandboxes."""
    here = ("-n", world.namespace)
    world.cluster.kubectl("apply", "-k", str(EXAMPLES / "quickstart"), *here)
    world.cluster.kubectl("apply", "-f", str(EXAMPLES / "cluster/runs.yaml"), *here)
    for name, members in SANDBOXES.items():
        pool = shell(members)
        pool["metadata"]["name"] = name
        apply(world, pool)


def _lanes(world: World, eyes: Eyes, cells: tuple[Cell, ...], say: Callable[[str], None]) -> list[list[Lane]]:
    """Two beside each other: a start of one is hidden by what the other waits for."""
    run, cycle, job = (
        Lane(world, eyes, work, [cell for cell in cells if cell.work is work], say) for work in Work
    )
    return [[run], [cycle, job]]


def _rows(lanes: list[list[Lane]], eyes: Eyes, say: Callable[[str], None]) -> Iterator[Row]:
    while going := [next(lane for lane in each if not lane.over) for each in lanes if not _over(each)]:
        wrongs = eyes.observer.take_wrongs()
        for lane in going:
            away = any(other.away for other in going if other is not lane)
            try:
                yield from lane.look([wrong for wrong in wrongs if lane.name in wrong], away)
            except (OSError, ClusterError) as error:  # an API server that has much to do
                say(f"{lane.name}: is looked at again: {error}")
        others = [wrong for wrong in wrongs if not any(lane.name in wrong for lane in going)]
        if others:
            yield table.row_of_end("beside all cells", "; ".join(others))
        time.sleep(drive.TICK_S)


def _over(lanes: list[Lane]) -> bool:
    return all(lane.over for lane in lanes)


class _Teller(command.Teller):
    """Tells on the other stream."""

    def __call__(self, text: str) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            super().__call__(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
