"""From a reference to the layers and settings of its image.

Guarantees:
1. A tarball is called by the digest of its bytes; a saved image, of its configuration; packages, of what was
   asked.
2. Opening a source reads what that needs and writes nothing; only a compressed archive of several files is
   unpacked aside.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from agentfly.resources.errors import ResourceError
from agentfly.resources.images import oci
from agentfly.resources.images.compression import CHUNK
from agentfly.resources.images.files import Folder, opened_archive, read
from agentfly.resources.images.layers import Layer, Source
from agentfly.resources.images.packages import packages
from agentfly.resources.images.reference import Reference
from agentfly.resources.images.stream import Budget, Hashed


@contextlib.contextmanager
def opened(reference: Reference, scratch: Path, budget: Budget) -> Iterator[Source]:
    """The image of a reference to anything but a folder.

    Args:
        scratch: a folder on a disk with room for the unpacked form of a compressed archive.

    Raises:
        ResourceError: it cannot be read, is damaged, or is for another platform.
    """
    path, name = reference.path, reference.name
    match reference.form:
        case "tar":
            yield _tarball(path, budget)
        case "packages":
            yield packages(path, budget)
        case "oci":
            yield oci.layout(Folder(path), name, budget)
        case "oci-archive":
            with opened_archive(path, scratch, budget) as files:
                yield oci.layout(files, name, budget)
        case "docker-archive":
            with opened_archive(path, scratch, budget) as files:
                yield oci.docker_archive(files, name, budget)
        case _:
            raise ResourceError(f"image: {reference} is used as it is, not unpacked")


def _tarball(path: str, budget: Budget) -> Source:
    with read(path) as file:
        whole = Hashed(file)
        while whole.read(CHUNK):
            budget.check()
    return Source(whole.digest(), (Layer(path, lambda: read(path), whole.digest()),))
