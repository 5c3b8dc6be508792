"""The command of the test cluster: `python -m tests.cluster up|down|status|env|x|load|build`."""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from agentfly.errors import AgentflyError
from tests.cluster import images, network, product
from tests.cluster.binaries import MODULES, binaries
from tests.cluster.cluster import Cluster
from tests.cluster.machine import Unavailable, cache, need_root
from tests.cluster.node import KINDS, Kind

# Of Debian, for programs, images and nodes.
NEEDED = {
    "gcc": "gcc",
    "pkg-config": "pkg-config",
    "mmdebstrap": "mmdebstrap",
    "iptables": "iptables",
    "ip": "iproute2",
}
IMAGES: dict[str, Callable[[], Path]] = {
    "busybox": images.busybox,
    "python": images.python,
    "agentfly": product.agentfly_image,
    "sandboxd": product.sandboxd_image,
}


def main(arguments: list[str]) -> int:
    """Runs one subcommand and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument(
        "--dir", type=Path, default=cache() / "run", help="the cluster's folder (%(default)s)"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start it")
    up.add_argument("--nodes", type=_kinds, default=KINDS[:1], help=f"of {', '.join(KINDS)}; '' for none")
    up.add_argument("--gates", type=_words, default=(), help="feature gates to switch on")
    commands.add_parser("down", help="stop it and remove its files")
    commands.add_parser("status", help="what runs")
    commands.add_parser("env", help="shell lines that point kubectl there")
    build = commands.add_parser(
        "build", help="make programs and images, which takes some minutes the first time"
    )
    build.add_argument(
        "--if-possible",
        action="store_true",
        help="succeed where this machine cannot run a cluster, and say why",
    )
    load = commands.add_parser("load", help="put images into the nodes")
    load.add_argument("images", nargs="+", metavar="IMAGE", help=f"{', '.join(IMAGES)}, or an archive's path")
    inside = commands.add_parser("x", help="run a command inside the cluster's namespaces")
    inside.add_argument("--where", default="control", help="control or a node's name")
    inside.add_argument("argv", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    cluster = Cluster(options.dir)
    begun = time.monotonic()
    try:
        match options.command:
            case "up":
                _up(cluster, options.nodes, options.gates)
                _say(f"up after {time.monotonic() - begun:.1f} s: export KUBECONFIG={cluster.kubeconfig}")
            case "down":
                cluster.down()
            case "status":
                for name, alive in cluster.names().items():
                    _say(f"{name:28} {'runs' if alive else 'dead'}")
                return 0 if cluster.is_up() else 1
            case "env":
                _say(f"export KUBECONFIG={shlex.quote(str(cluster.kubeconfig))}")
                _say(f"export PATH={shlex.quote(str(cluster.kubectl_path.parent))}:$PATH")
            case "build":
                need_root()
                for program, package in NEEDED.items():
                    product.installed(program, package)
                for name in MODULES:
                    _say(str(binaries(name)))
                for make in (images.pause, network.coredns_image, *IMAGES.values()):
                    _say(str(make()))
            case "load":
                cluster.import_image(*(_archive(name) for name in options.images))
            case "x":
                command = [*cluster.enter(options.where), *options.argv]
                os.execvp(command[0], command)
    except AgentflyError as error:
        if isinstance(error, Unavailable) and getattr(options, "if_possible", False):
            _say(f"test cluster: not on this machine: {error.render()}")
            return 0
        print(error.render(), file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _up(cluster: Cluster, kinds: Sequence[Kind], gates: Sequence[str]) -> None:
    """A cluster with these nodes: the one that is up if it has them, with the missing ones if it has some."""
    there = [node.kind for node in cluster.nodes()] if cluster.is_up() else None
    if there is None or there != list(kinds[: len(there)]):
        cluster.up(nodes=kinds, gates=gates)
    elif there == list(kinds):
        return
    else:
        for kind in kinds[len(there) :]:
            cluster.add_node(kind, gates)
    if kinds:
        cluster.import_image(images.busybox(), images.python())


def _archive(name: str) -> Path:
    return IMAGES[name]() if name in IMAGES else Path(name)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _kinds(text: str) -> tuple[Kind, ...]:
    if unknown := set(_words(text)) - set(KINDS):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: is none of {', '.join(KINDS)}")
    return tuple(kind for word in _words(text) for kind in KINDS if kind == word)


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
