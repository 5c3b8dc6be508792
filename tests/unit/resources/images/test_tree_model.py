"""Any sequence of layers gives what a plain model of the OCI image specification gives."""

import os
import shutil
import stat
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.resources.images.stream import Budget, Stream
from agentfly.resources.images.tree import Tree
from tests.unit.resources.images import archives
from tests.unit.resources.images.test_tree import Reading

NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(tuple)
Path_ = tuple[str, ...]


@dataclass(frozen=True)
class Node:
    """What is at a path. ``number`` is the same for all names of one file."""

    kind: str
    content: str = ""
    mode: int = 0
    number: int = 0


FOLDER = Node("folder")


@dataclass(frozen=True)
class Change:
    """One entry of a layer."""

    kind: str
    path: Path_
    content: str = ""
    mode: int = 0
    target: Path_ = ()


CHANGES = st.builds(
    Change,
    st.sampled_from(["file", "file", "folder", "link", "hard", "hide", "opaque"]),
    PATHS,
    st.sampled_from(["", "x", "y" * 700]),
    st.sampled_from([0o755, 0o644, 0o4711, 0o000]),
    PATHS,
)


def valid(layer: list[Change], below: dict[Path_, Node]) -> list[Change]:
    """Changes that a layer may consist of: no name twice, and none that leads through a link or a file."""
    kept: list[Change] = []
    for change in layer:
        world, trial = model(kept, below), model([*kept, change], below)
        hides = change.kind in ("hide", "opaque")
        parents = [change.path[:depth] for depth in range(1, len(change.path) + (change.kind == "opaque"))]
        passed = [each.get(parent, FOLDER).kind for each in (below, world) for parent in parents]
        if any(kind == "link" or (kind == "file" and not hides) for kind in passed):
            continue
        added = [each.path for each in kept if each.kind not in ("hide", "opaque")]
        if not hides and any(path[: len(change.path)] == change.path for path in added):
            continue
        if change.kind == "hard" and world.get(change.target, FOLDER).kind != "file":
            continue
        if change.kind == "hard" and change.target[: len(change.path)] == change.path:
            continue  # what it links to goes with the folder that it takes the place of
        if all(node.kind != "none" for node in trial.values()):
            kept.append(change)
    return kept


def model(layer: list[Change], below: dict[Path_, Node]) -> dict[Path_, Node]:
    """The specification: first everything is hidden in what is below, then everything is added."""
    world = dict(below)
    for change in layer:
        if change.kind in ("hide", "opaque"):
            whole = change.kind == "hide"
            for path in list(world):
                under = path[: len(change.path)] == change.path
                if under and (whole or len(path) > len(change.path)):
                    del world[path]
    number = max((node.number for node in below.values()), default=0)
    for change in layer:
        if change.kind in ("hide", "opaque"):
            continue
        number += 1
        for depth in range(1, len(change.path)):
            world.setdefault(change.path[:depth], Node("folder", mode=0o755))
        if change.kind != "folder" or world.get(change.path, Node("none")).kind != "folder":
            for path in list(world):
                if path[: len(change.path)] == change.path and not (
                    change.kind == "hard" and path == change.target
                ):
                    del world[path]
        if change.kind == "hard":
            world[change.path] = world.get(change.target, Node("none"))
        elif change.kind == "link":
            world[change.path] = Node("link", "/".join(change.target))
        elif change.kind == "folder":
            world[change.path] = Node("folder", mode=change.mode | 0o700)
        else:
            world[change.path] = Node("file", change.content, change.mode | 0o600, number)
    return world


def tar(layer: list[Change]) -> bytes:
    entries = []
    for change in layer:
        name = "/".join(change.path)
        match change.kind:
            case "file":
                entries.append(archives.file(name, change.content, change.mode))
            case "folder":
                entries.append(archives.folder(name, change.mode))
            case "link":
                entries.append(archives.link(name, "/".join(change.target)))
            case "hard":
                entries.append(archives.hard(name, "/".join(change.target)))
            case "hide":
                entries.append(archives.hide(name))
            case "opaque":
                entries.append(archives.opaque(name))
    return archives.tar(*entries)


def found(root: Path) -> dict[Path_, Node]:
    world: dict[Path_, Node] = {}
    for path in root.rglob("*"):
        facts = path.lstat()
        parts, mode = path.relative_to(root).parts, stat.S_IMODE(facts.st_mode)
        if path.is_symlink():
            world[parts] = Node("link", os.readlink(path))
        elif path.is_dir():
            world[parts] = Node("folder", mode=mode)
        else:
            world[parts] = Node("file", path.read_text(), mode, facts.st_ino)
    return world


def numbered(world: dict[Path_, Node]) -> dict[Path_, Node]:
    """The same world, with files numbered by their first names."""
    numbers: dict[int, int] = {}
    return {
        path: replace(
            node, number=numbers.setdefault(node.number, len(numbers)) if node.kind == "file" else 0
        )
        for path, node in sorted(world.items())
    }


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(CHANGES, max_size=6), min_size=1, max_size=4))
def test_layers_give_what_the_model_gives(drawn: list[list[Change]]) -> None:
    budget = Budget(1 << 30, lambda: None)
    root = Path(tempfile.mkdtemp())
    try:
        tree, expected = Tree(str(root), budget), dict[Path_, Node]()
        for layer in drawn:
            changes = valid(layer, expected)
            tree.apply("layer", Stream(Reading(tar(changes)), budget))
            expected = model(changes, expected)
            assert numbered(found(root)) == numbered(expected)
    finally:
        shutil.rmtree(root)
