"""An image as its layers and settings, and the root file system that comes of them.

Guarantees:
1. Every digest that a layer has is compared with what was really read, all of it, before the root is used.
2. ``/etc/resolv.conf`` is no link, so that a sandbox with network can have the machine's in its place.
3. A source opens its files for as long as its block lasts, and writes nothing but what ``scratch`` is for.

Not here: which files those are (``sources``, ``oci``), where the root is kept (``cache``).
"""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from agentfly.resources.errors import ResourceError
from agentfly.resources.images.compression import Reader, inflate
from agentfly.resources.images.stream import Budget, Hashed, Stream, blaming
from agentfly.resources.images.tree import Tree


@dataclass(frozen=True, slots=True)
class Layer:
    """One tar, compressed or not.

    ``name`` is for errors; ``digest`` is of the bytes as they are opened, ``diff_id`` of those behind the
    compression, both ``sha256:`` and 64 hex digits.
    """

    name: str
    open: Callable[[], AbstractContextManager[Reader]]
    digest: str | None = None
    diff_id: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """An image: what it is called by its content, its layers from the lowest, its environment."""

    digest: str
    layers: tuple[Layer, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def unpack(source: Source, root: str, budget: Budget) -> None:
    """Make an image's root file system.

    Args:
        root: an empty folder.

    Raises:
        ResourceError: a layer is damaged, is not what its digest says, or does not fit the budget.
    """
    tree = Tree(root, budget)
    for layer in source.layers:
        with layer.open() as file:
            packed = Hashed(file)
            with blaming(layer.name, "its first bytes"):
                plain = Hashed(inflate(packed))
            stream = Stream(plain, budget)
            tree.apply(layer.name, stream)
            with blaming(layer.name, "after its last entry"):
                stream.drain()
        _compare(layer.name, layer.digest, packed.digest())
        _compare(layer.name, layer.diff_id, plain.digest())
    resolver = f"{root}/etc/resolv.conf"
    if os.path.islink(resolver) and not os.path.islink(f"{root}/etc"):
        os.unlink(resolver)
        os.close(os.open(resolver, os.O_CREAT | os.O_EXCL, 0o644))


def _compare(name: str, expected: str | None, found: str) -> None:
    if expected not in (None, found):
        raise ResourceError(
            f"image: {name}: has the digest {found}, and should have {expected}",
            hints=["it is damaged or was changed while it was read: make or download it again"],
        )
