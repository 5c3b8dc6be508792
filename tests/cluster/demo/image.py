"""The images that run vLLM, rollout workers and verl in a cluster of this machine.

A user builds `agentfly/inference:dev` and `agentfly/trainer:dev` from their Dockerfiles, which takes
gigabytes. Here the packages of this machine's environments are mounted into the pods, on the claim that all
pods of a run have, and an image is that of agentfly with what reads them: a line for Python, and libraries
that they link.

Guarantees:
1. The layers of the image that it is made of are untouched; one is added.
2. Same inputs, same archive; an archive under its name is complete.
"""

import hashlib
import io
import json
import os
import secrets
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tests.cluster import debian
from tests.cluster.machine import cache

CACHE = "/agentfly-cache"
"""Where pods have the claim of a run or of models, and here environments too."""
PYTHON = "3.11"
"""Of the images: packages that are compiled for another one do not load."""
KEPT = 2
_LIBRARIES = {"libnuma1": "libnuma.so.1", "libstdc++6": "libstdc++.so.6", "libgcc-s1": "libgcc_s.so.1"}
"""Packages, and the files that torch and vLLM link: the image has no C++."""
SITE = f"/opt/agentfly/lib/python{PYTHON}/site-packages"
"""Where the image's Python has its packages."""
Role = Literal["inference", "trainer"]


def inside(role: Role) -> str:
    """The folder on a claim in which an environment is mounted."""
    return f"environment/{role}"


def role_image(role: Role, base: Path, more: Mapping[str, bytes] | None = None) -> Path:
    """A docker-archive of ``base``, an archive of agentfly's image, that finds the mounted environment.

    Args:
        more: further files, by absolute path.

    Raises:
        Unavailable, ClusterError: the libraries are not to be had.
    """
    root = debian.unpacked(*_LIBRARIES)
    libraries = {
        f"/usr/lib/{path.parent.name}/{path.name}": path.resolve().read_bytes()
        for name in _LIBRARIES.values()
        for path in (*root.glob(f"usr/lib/*-linux-gnu/{name}"), *root.glob(f"lib/*-linux-gnu/{name}"))
    }
    packages = f"{CACHE}/{inside(role)}/lib/python{PYTHON}/site-packages"
    # After Python's own modules, before the packages of the image: vLLM gets the versions it is tested with.
    line = f"import sys; sys.path.insert(len(sys.path) - 1, {packages!r})\n"
    files = {
        f"{SITE}/agentfly-environment.pth": line.encode(),
        **libraries,
        **(more or {}),
    }
    return with_layer(base, f"docker.io/agentfly/{role}:dev", files, ["HOME=/tmp"])


def with_layer(base: Path, name: str, files: Mapping[str, bytes], env: Sequence[str]) -> Path:
    """A docker-archive of ``base`` and one more layer, under another name.

    Args:
        files: content by absolute path.
        env: ``NAME=VALUE``, added to that of ``base``.
    """
    key = hashlib.sha256(repr((base.name, name, sorted(files.items()), list(env))).encode()).hexdigest()[:16]
    folder = cache() / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    stem = name.rpartition("/")[2].partition(":")[0]
    target = folder / f"{stem}-{key}.tar"
    if target.exists():
        target.touch()
        return target
    layer = _layer(files)
    fresh = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(3)}")
    with tarfile.open(base) as old, tarfile.open(fresh, "w") as new:
        (manifest,) = json.loads(_read(old, "manifest.json"))
        config: dict[str, Any] = json.loads(_read(old, manifest["Config"]))
        config["config"]["Env"] = [*config["config"].get("Env", ()), *env]
        config["rootfs"]["diff_ids"].append(f"sha256:{hashlib.sha256(layer).hexdigest()}")
        config.pop("history", None)  # it counts the layers
        for each in manifest["Layers"]:
            new.addfile(old.getmember(each), old.extractfile(each))
        text = json.dumps(config).encode()
        named = f"{hashlib.sha256(text).hexdigest()}.json"
        added = f"{hashlib.sha256(layer).hexdigest()}.tar"
        listed = [{"Config": named, "RepoTags": [name], "Layers": [*manifest["Layers"], added]}]
        for path, data in ((added, layer), (named, text), ("manifest.json", json.dumps(listed).encode())):
            _add(new, path, data)
    fresh.rename(target)
    for stale in sorted(folder.glob(f"{stem}-*.tar"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
        stale.unlink()
    return target


def _layer(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, content in sorted(files.items()):
            _add(tar, path.lstrip("/"), content)
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, path: str, content: bytes) -> None:
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode = len(content), 0o644
    tar.addfile(entry, io.BytesIO(content))


def _read(tar: tarfile.TarFile, path: str) -> bytes:
    file = tar.extractfile(path)
    assert file is not None, path
    return file.read()
