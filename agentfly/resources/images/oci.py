"""Images as they are saved: OCI layouts, and the archives of ``docker save``.

Guarantees:
1. Whatever a document names by digest is what that digest says; the size of documents is bounded.
2. Of several images the one that is named is taken, of several platforms this machine's; where that leaves
   none or more than one, the error lists what there is.
3. An image is called by the digest of its configuration, so that one saved in both ways is unpacked once.

Not here: layers' contents, which ``layers`` compares with both digests that a layer has.
"""

import functools
import hashlib
import platform
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, StringConstraints, TypeAdapter, ValidationError

from agentfly.resources.errors import ResourceError
from agentfly.resources.images.files import Files
from agentfly.resources.images.layers import Layer, Source
from agentfly.resources.images.stream import Budget, shown

DOCUMENT_MAX = 4 << 20
"""Bytes; what registries accept of a manifest."""
INDEXES_MAX = 64
REF_NAME = "org.opencontainers.image.ref.name"
CONTAINERD_NAME = "io.containerd.image.name"
CONFIGS = (
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
)
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}
"""Names that differ between the kernel and Go."""

Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]


class _Platform(BaseModel):
    os: str = ""
    architecture: str = ""

    def __str__(self) -> str:
        return f"{self.os}/{self.architecture}"


class _Descriptor(BaseModel):
    digest: Digest
    media_type: str = Field(default="", alias="mediaType")
    annotations: dict[str, str] | None = None
    platform: _Platform | None = None

    def names(self) -> Iterator[str]:
        for key in (REF_NAME, CONTAINERD_NAME):
            if name := (self.annotations or {}).get(key):
                yield name

    def is_index(self) -> bool:
        return self.media_type.endswith((".index.v1+json", ".manifest.list.v2+json"))


class _Index(BaseModel):
    manifests: list[_Descriptor]


class _Manifest(BaseModel):
    config: _Descriptor
    layers: list[_Descriptor]


class _Settings(BaseModel):
    env: list[str] | None = Field(default=None, alias="Env")


class _Rootfs(BaseModel):
    diff_ids: list[Digest]


class _Config(_Platform):
    config: _Settings | None = None
    rootfs: _Rootfs


class _Saved(BaseModel):
    """One image of the manifest.json that ``docker save`` writes."""

    config: str = Field(alias="Config")
    tags: list[str] | None = Field(default=None, alias="RepoTags")
    layers: list[str] = Field(alias="Layers")


_SAVED = TypeAdapter(list[_Saved])
Document = TypeVar("Document")


def machine() -> str:
    """This machine's platform, as images call it."""
    return f"linux/{ARCHITECTURES.get(platform.machine(), platform.machine())}"


def layout(files: Files, name: str, budget: Budget) -> Source:
    """The image of an OCI layout.

    Args:
        name: its ``org.opencontainers.image.ref.name``; empty if there is one only.

    Raises:
        ResourceError: there is no such image for this machine, or a document is damaged.
    """
    index = _document(files, "index.json", None, TypeAdapter(_Index), budget)
    named = [item for item in index.manifests if not name or name in item.names()]
    if not named:
        raise _unknown(files, name, [label for item in index.manifests for label in item.names()])
    manifest = _choose(files, _flat(files, named, budget))
    chosen = _document(files, _blob(manifest.digest), manifest.digest, TypeAdapter(_Manifest), budget)
    if chosen.config.media_type not in CONFIGS:
        raise ResourceError(
            f"image: {files.place}: is no image: its configuration is of type {chosen.config.media_type!a}"
        )
    digest = chosen.config.digest
    config = _document(files, _blob(digest), digest, TypeAdapter(_Config), budget)
    blobs = [(_blob(layer.digest), layer.digest) for layer in chosen.layers]
    return _source(files, digest, config, blobs)


def docker_archive(files: Files, name: str, budget: Budget) -> Source:
    """The image of an archive that ``docker save`` wrote.

    Args:
        name: its tag, with or without the registry; empty if there is one image only.

    Raises:
        ResourceError: as `layout` does.
    """
    saved = _document(files, "manifest.json", None, _SAVED, budget)
    tags = [tag for image in saved for tag in image.tags or ()]
    found = [image for image in saved if not name or any(_same(name, tag) for tag in image.tags or ())]
    if len(found) != 1:
        raise _unknown(files, name, tags)
    image = found[0]
    # Its name is its digest in every version of the format, with or without .json.
    inside = re.fullmatch(r"(?:.*/)?([0-9a-f]{64})(?:\.json)?", image.config)
    if inside is None:
        raise ResourceError(f"image: {files.place}: {image.config!a} is not named by its digest")
    digest = f"sha256:{inside.group(1)}"
    config = _document(files, image.config, digest, TypeAdapter(_Config), budget)
    return _source(files, digest, config, [(layer, None) for layer in image.layers])


def _source(files: Files, digest: str, config: _Config, blobs: Sequence[tuple[str, str | None]]) -> Source:
    _check_platform(files, [_Platform(os=config.os, architecture=config.architecture)])
    diff_ids = config.rootfs.diff_ids
    if len(diff_ids) != len(blobs):
        raise ResourceError(
            f"image: {files.place}: has {len(blobs)} layers in its manifest, {len(diff_ids)} in its settings"
        )
    layers = tuple(
        Layer(f"{files.place}: {blob}", functools.partial(files.open, blob), packed, plain)
        for (blob, packed), plain in zip(blobs, diff_ids, strict=True)
    )
    env = dict(entry.split("=", 1) for entry in (config.config and config.config.env) or () if "=" in entry)
    if wrong := [name for name, value in env.items() if not name or "\0" in name + value]:
        raise ResourceError(
            f"image: {files.place}: its environment has {shown(wrong[0])}, which no process can"
        )
    return Source(digest, layers, env)


def _document(
    files: Files, name: str, digest: str | None, of: TypeAdapter[Document], budget: Budget
) -> Document:
    data = b""
    with files.open(name) as file:
        while len(data) <= DOCUMENT_MAX and (more := file.read(DOCUMENT_MAX)):
            data += more
    budget.spend(len(data))
    where, remedy = f"image: {files.place}: {name}", ["write the whole image again"]
    if len(data) > DOCUMENT_MAX:
        raise ResourceError(f"{where}: has more than {DOCUMENT_MAX >> 20} MiB", hints=remedy)
    found = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if digest not in (None, found):
        raise ResourceError(f"{where}: has the digest {found}, and should have {digest}", hints=remedy)
    try:
        return of.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ResourceError(f"{where}: {field or 'it'}: {first['msg']}", hints=remedy) from error


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _flat(files: Files, items: list[_Descriptor], budget: Budget) -> list[_Descriptor]:
    """Every manifest, also of indexes within indexes."""
    found: list[_Descriptor] = []
    rest, opened = list(items), 0
    while rest:
        item = rest.pop(0)
        if not item.is_index():
            found.append(item)
            continue
        opened += 1
        if opened > INDEXES_MAX:
            raise ResourceError(f"image: {files.place}: has more than {INDEXES_MAX} indexes")
        inner = _document(files, _blob(item.digest), item.digest, TypeAdapter(_Index), budget)
        rest = [*inner.manifests, *rest]
    return found


def _choose(files: Files, items: list[_Descriptor]) -> _Descriptor:
    """This machine's of several manifests. One without a platform is judged later, by its configuration."""
    ours = [item for item in items if item.platform is not None and str(item.platform) == machine()]
    ours = ours or [item for item in items if item.platform is None]
    if not ours:
        _check_platform(files, [item.platform for item in items if item.platform])
    if len({item.digest for item in ours}) != 1:
        raise _unknown(files, "", [label for item in ours for label in item.names()])
    return ours[0]


def _check_platform(files: Files, found: list[_Platform]) -> None:
    names = sorted({str(each) for each in found})
    if machine() not in names:
        raise ResourceError(
            f"image: {files.place}: is for {' and '.join(names)}, and this machine is {machine()}",
            hints=[f"save the image for --platform {machine()}"],
        )


def _unknown(files: Files, name: str, names: list[str]) -> ResourceError:
    listed = ", ".join(sorted(set(names))) or "without names"
    if name:
        problem = f"has no image {name}, or several; it has {listed}"
    else:
        problem = f"has not exactly one image; it has {listed}"
    return ResourceError(
        f"image: {files.place}: {problem}", hints=["name one after the path, as in oci:PATH:NAME"]
    )


def _same(name: str, tag: str) -> bool:
    return _full(name) == _full(tag)


def _full(name: str) -> str:
    """A name with what Docker leaves out of it."""
    first, slash, _ = name.partition("/")
    if not slash:
        name = f"docker.io/library/{name}"
    elif not ({".", ":"} & set(first)) and first != "localhost":
        name = f"docker.io/{name}"
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"
