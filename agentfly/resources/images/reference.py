"""What ``image`` of a container means: the form of a reference, its path and what it picks there.

Guarantees:
1. What this machine cannot serve is refused with the remedy: who pulls it, or how to make it a file.
2. Paths come out absolute; what a form needs on disk exists, or the error says where it was looked for.
3. ``str`` of what comes out means the same again, wherever it is read.

Not here: what is inside (``sources``). Forms are named as in containers-transports(5).
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from agentfly.resources.errors import ResourceError

HOST = "host"
Form = Literal["host", "dir", "tar", "oci", "oci-archive", "docker-archive", "packages"]
ON_DISK = ("dir", "tar", "oci", "oci-archive", "docker-archive")
PICKING = ("oci", "oci-archive", "docker-archive")
"""Forms whose path may be followed by ``:`` and the name of one image of several."""

_SUITE = re.compile(r"[a-z][a-z0-9.-]*")
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+")


@dataclass(frozen=True, slots=True)
class Reference:
    """One image: ``path`` is empty for host, and ``SUITE/PACKAGE,PACKAGE`` for packages."""

    form: Form
    path: str = ""
    name: str = ""

    def __str__(self) -> str:
        if self.form in ("host", "dir"):
            return self.path or HOST
        return ":".join([self.form, self.path, *([self.name] if self.name else [])])


def locate(text: str, base: Path) -> Reference:
    """The image that a text names.

    Args:
        base: what a relative path is relative to.

    Raises:
        ResourceError: no form of image that this machine can serve, or nothing is there.
    """
    if text == HOST:
        return Reference("host")
    form, colon, rest = text.partition(":")
    if colon and form == "packages":
        return Reference("packages", _packages(text, rest))
    if colon and form in ON_DISK:
        path, name = rest, ""
        if form in PICKING:
            path, _, name = rest.partition(":")
        return Reference(_form(form), _found(text, form, path, base), name)
    if os.path.isdir(base / text):  # of a name of any length
        return Reference("dir", str((base / text).absolute()))
    if _looks_like_a_path(text):
        raise _absent(text, base / text, "a directory")
    raise ResourceError(
        f"image: {text} names an image of a registry, and sandboxes of this machine's bubblewrap pull none",
        hints=[
            f"make a file of it: docker save -o image.tar {text}, then image: docker-archive:image.tar",
            f"or a folder: skopeo copy docker://{text} oci:image:latest, then image: oci:image:latest",
            "or let a runner that pulls have it: runtime: ContainerCLI here, or a cluster",
        ],
    )


def is_on_disk(text: str) -> bool:
    """Whether a text can only mean a file or directory here, whoever else may have images by name."""
    return text.partition(":")[0] in ON_DISK or text.startswith(("/", "./", "../"))


def _form(name: str) -> Form:
    return next(form for form in get_args(Form) if form == name)


def _found(text: str, form: str, path: str, base: Path) -> str:
    where = (base / path).absolute()
    if form == "dir" and not where.is_dir():
        raise _absent(text, where, "a directory")
    if form == "oci" and not (where / "index.json").is_file():
        raise _absent(text, where, "an OCI image layout, a directory with an index.json")
    if form not in ("dir", "oci") and not where.is_file():
        raise _absent(text, where, "a file")
    return str(where)


def _absent(text: str, where: Path, what: str) -> ResourceError:
    hints = ["use host, a directory with a root file system, or tar:, oci:, docker-archive: and a path"]
    if where.is_file():
        hints = [f"for a tarball of a root file system write tar:{where.name}"]
    return ResourceError(f"image: {text} is not {what} (looked at {where})", hints=hints)


def _packages(text: str, rest: str) -> str:
    suite, _, listed = rest.partition("/")
    packages = listed.split(",") if listed else []
    wrong = [name for name in packages if not _PACKAGE.fullmatch(name)]
    if not _SUITE.fullmatch(suite) or wrong:
        raise ResourceError(
            f"image: {text}: {(wrong or [suite])[0]!r} is no name of a {'package' if wrong else 'suite'}",
            hints=["write packages:SUITE/PACKAGE,PACKAGE as in packages:bookworm/python3-minimal,git"],
        )
    return "/".join([suite, *([",".join(sorted(set(packages)))] if packages else [])])


def _looks_like_a_path(text: str) -> bool:
    """Whether a person meant a directory: a reference to an image has a tag or begins with its registry."""
    first, slash, _ = text.partition("/")
    return text.startswith((".", "/")) or (bool(slash) and ":" not in text and "." not in first)
