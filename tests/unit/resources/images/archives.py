"""Small real archives for tests: tars entry by entry, OCI layouts and what ``docker save`` writes."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agentfly.resources.images.oci import machine

Entry = tuple[tarfile.TarInfo, bytes]


def entry(
    name: str, type: bytes = tarfile.REGTYPE, *, data: bytes = b"", link: str = "", **fields: object
) -> Entry:
    """One entry; fields are those of TarInfo."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = type, link, len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def file(name: str, data: bytes | str = b"", mode: int = 0o644, **fields: object) -> Entry:
    return entry(name, data=data.encode() if isinstance(data, str) else data, mode=mode, **fields)


def folder(name: str, mode: int = 0o755) -> Entry:
    return entry(name, tarfile.DIRTYPE, mode=mode)


def link(name: str, target: str) -> Entry:
    return entry(name, tarfile.SYMTYPE, link=target)


def hard(name: str, target: str) -> Entry:
    return entry(name, tarfile.LNKTYPE, link=target)


def hide(name: str) -> Entry:
    head, slash, tail = name.rpartition("/")
    return file(f"{head}{slash}.wh.{tail}")


def opaque(name: str) -> Entry:
    return file(f"{name}/.wh..wh..opq")


def tar(*entries: Entry, format: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar of these entries, as they are: nothing is checked."""
    out = io.BytesIO()
    with tarfile.TarFile(fileobj=out, mode="w", format=format) as made:
        for info, data in entries:
            made.addfile(info, io.BytesIO(data))
    return out.getvalue()


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def config(layers: Sequence[bytes], env: Sequence[str] = (), platform: str = "") -> bytes:
    """An image's configuration; layers are plain tars."""
    os, _, architecture = (platform or machine()).partition("/")
    return json.dumps(
        {
            "os": os,
            "architecture": architecture,
            "config": {"Env": list(env), "WorkingDir": "/app", "Cmd": ["/bin/sh"]},
            "rootfs": {"type": "layers", "diff_ids": [digest(layer) for layer in layers]},
        }
    ).encode()


class Layout:
    """An OCI layout in a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "blobs/sha256").mkdir(parents=True)
        (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def blob(self, data: bytes, media_type: str, **more: object) -> dict[str, object]:
        """Add a blob; its descriptor."""
        (self.path / "blobs/sha256" / digest(data)[7:]).write_bytes(data)
        return {"mediaType": media_type, "digest": digest(data), "size": len(data), **more}

    def image(
        self,
        layers: Sequence[bytes],
        *,
        env: Sequence[str] = (),
        platform: str = "",
        pack: Callable[[bytes], bytes] = gzip.compress,
        **more: object,
    ) -> dict[str, object]:
        """Add an image of plain tars; the descriptor of its manifest."""
        settings = config(layers, env, platform)
        manifest = {
            "schemaVersion": 2,
            "config": self.blob(settings, "application/vnd.oci.image.config.v1+json"),
            "layers": [
                self.blob(pack(layer), "application/vnd.oci.image.layer.v1.tar+gzip") for layer in layers
            ],
        }
        media_type = "application/vnd.oci.image.manifest.v1+json"
        return self.blob(json.dumps(manifest).encode(), media_type, **more)

    def index(self, *manifests: Mapping[str, object]) -> Path:
        """Write the index; the layout's folder."""
        (self.path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))
        return self.path

    def archive(self, path: Path) -> Path:
        """The layout as a tar."""
        with tarfile.open(path, "w") as made:
            made.add(self.path, ".")
        return path


def oci_layout(path: Path, *layers: bytes, env: Sequence[str] = ()) -> Path:
    """A layout of one image."""
    layout = Layout(path)
    return layout.index(layout.image(layers, env=env))


def docker_archive(path: Path, *layers: bytes, env: Sequence[str] = (), tags: Sequence[str] = ()) -> Path:
    """What ``docker save`` wrote before it wrote layouts: a layer that is there twice is a link."""
    settings = config(layers, env)
    places: dict[bytes, str] = {}
    entries, names = [file(f"{digest(settings)[7:]}.json", settings)], []
    for number, layer in enumerate(layers):
        names.append(f"{number}/layer.tar")
        entries.append(link(names[-1], f"../{places[layer]}") if layer in places else file(names[-1], layer))
        places.setdefault(layer, names[-1])
    saved = [{"Config": f"{digest(settings)[7:]}.json", "RepoTags": list(tags) or None, "Layers": names}]
    path.write_bytes(tar(*entries, file("manifest.json", json.dumps(saved))))
    return path
