"""Images for nodes, made from files of this machine: docker-archives, kept by the hash of what is in them.

Guarantees:
1. An archive is complete or absent, and made once for the same inputs.
2. Owners, modes, links and extended attributes of the files are those of the source.
"""

import hashlib
import io
import json
import os
import platform
import secrets
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster import debian
from tests.cluster.binaries import binaries, lock
from tests.cluster.machine import SYSTEM_PATH, ClusterError, cache, tool
from tests.cluster.node import PAUSE

BUSYBOX = "agentfly-test/busybox:1"
PYTHON = "agentfly-test/python:dev"
PYTHON_PACKAGES = ("python3", "git", "procps", "util-linux", "iproute2", "curl")
SUITE = "bookworm"
BUILD_S = 900.0
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def pause() -> Path:
    """What holds the namespaces of a pod."""
    return of_programs(PAUSE, {"/pause": binaries("pause") / "pause"}, ["/pause"])


def busybox() -> Path:
    """Debian's static busybox as ``/bin/sh`` and every other name. It cannot resolve host names."""
    program = debian.unpacked("busybox-static") / "bin" / "busybox"
    if not program.exists():
        program = debian.unpacked("busybox-static") / "usr" / "bin" / "busybox"
    listed = subprocess.run(
        [program, "--list"], capture_output=True, text=True, check=True, timeout=30
    ).stdout
    links = {f"/bin/{name}": "busybox" for name in listed.split() if name != "busybox"}
    return of_programs(BUSYBOX, {"/bin/busybox": program}, ["/bin/sh"], links)


def python() -> Path:
    """A small Debian with Python, git, curl and the user ``dev``: what sandboxes run in."""
    target = _target(PYTHON, f"{SUITE} {PYTHON_PACKAGES} {_sources()}")
    with lock(target.parent / ".python.lock"):
        if target.exists():
            return target
        program = tool("mmdebstrap", "apt install mmdebstrap")
        with tempfile.TemporaryDirectory(prefix=".python-", dir=target.parent) as scratch:
            root = Path(scratch) / "root.tar"
            _run(
                [
                    *("nice", program, "--quiet", "--variant=minbase"),
                    f"--include={','.join(PYTHON_PACKAGES)}",
                    '--customize-hook=chroot "$1" useradd --create-home --uid 1000 dev',
                    '--customize-hook=ln -s python3 "$1/usr/bin/python"',
                    *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "locale", "man")),
                    *(SUITE, str(root)),
                ]
            )
            _archive(PYTHON, root, ["/bin/bash"], target)
    return target


def of_programs(
    name: str, programs: Mapping[str, Path], command: Sequence[str], links: Mapping[str, str] | None = None
) -> Path:
    """An image that has these programs (place in it to file here) and links, and nothing else."""
    digest = hashlib.sha256(json.dumps([name, sorted(programs), list(command), dict(links or {})]).encode())
    for file in programs.values():
        digest.update(file.read_bytes())
    target = _target(name, digest.hexdigest())
    if not target.exists():
        with tempfile.TemporaryDirectory(prefix=".image-", dir=target.parent) as scratch:
            layer = Path(scratch) / "layer.tar"
            with tarfile.open(layer, "w") as tar:
                folders = {"tmp", "etc", "proc", "sys", "dev"}
                folders |= {str(Path(place).parent).strip("/") for place in (*programs, *(links or {}))}
                for folder in sorted(folders - {""}):
                    tar.addfile(_entry(folder, tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755))
                for place, file in programs.items():
                    entry = _entry(place.strip("/"), tarfile.REGTYPE, 0o755)
                    entry.size = file.stat().st_size
                    with file.open("rb") as content:
                        tar.addfile(entry, content)
                for place, to in (links or {}).items():
                    entry = _entry(place.strip("/"), tarfile.SYMTYPE, 0o777)
                    entry.linkname = to
                    tar.addfile(entry)
            _archive(name, layer, command, target)
    return target


def of_folder(name: str, root: Path, command: Sequence[str], key: str) -> Path:
    """An image of a root file system here; ``key`` says which content it has."""
    target = _target(name, key)
    if not target.exists():
        with tempfile.TemporaryDirectory(prefix=".image-", dir=target.parent) as scratch:
            layer = Path(scratch) / "layer.tar"
            _run(["tar", "--numeric-owner", "--xattrs", "-C", str(root), "-cf", str(layer), "."])
            _archive(name, layer, command, target)
    return target


def with_files(name: str, base: Path, files: Mapping[str, bytes], owner: int = 0) -> Path:
    """The image of an archive that was made here, with more files: place in it to content."""
    key = repr([base.name, owner, sorted(files.items())])
    target = _target(name, key)
    if not target.exists():
        with (
            tempfile.TemporaryDirectory(prefix=".image-", dir=target.parent) as scratch,
            tarfile.open(base) as archive,
        ):
            manifest = json.load(archive.extractfile("manifest.json"))[0]
            command = json.load(archive.extractfile(manifest["Config"]))["config"]["Cmd"]
            layer = Path(scratch) / "layer.tar"
            with archive.extractfile(manifest["Layers"][0]) as original, layer.open("wb") as copy:
                shutil.copyfileobj(original, copy)
            with tarfile.open(layer, "a") as tar:
                folders = {str(parent) for place in files for parent in Path(place.strip("/")).parents}
                present = set(tar.getnames())
                for folder in sorted(folders - {"."}):
                    if f"./{folder}" not in present and folder not in present:
                        tar.addfile(_entry(folder, tarfile.DIRTYPE, 0o755, owner))
                for place, content in files.items():
                    entry = _entry(place.strip("/"), tarfile.REGTYPE, 0o644, owner)
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
            _archive(name, layer, command, target)
    return target


def _archive(name: str, layer: Path, command: Sequence[str], target: Path) -> None:
    """Writes a docker-archive with one layer."""
    with layer.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    configuration = json.dumps(
        {
            "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Cmd": list(command), "Env": [f"PATH={SYSTEM_PATH}"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
    ).encode()
    image = f"{hashlib.sha256(configuration).hexdigest()}.json"
    manifest = json.dumps([{"Config": image, "RepoTags": [name], "Layers": [f"{digest}/layer.tar"]}]).encode()
    fresh = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(3)}")
    with tarfile.open(fresh, "w") as tar:
        for place, data in ((image, configuration), ("manifest.json", manifest)):
            entry = _entry(place, tarfile.REGTYPE, 0o644)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
        tar.add(layer, f"{digest}/layer.tar")
    fresh.rename(target)
    for old in target.parent.glob(f"{_stem(name)}-*.tar"):
        if old != target:
            old.unlink(missing_ok=True)


def _target(name: str, key: str) -> Path:
    folder = cache() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{_stem(name)}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.tar"


def _stem(name: str) -> str:
    return name.replace("/", "_").replace(":", "_")


def _entry(name: str, kind: bytes, mode: int, owner: int = 0) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.uid, entry.gid = kind, mode, owner, owner
    return entry


def _sources() -> str:
    files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    return "".join(file.read_text(errors="replace") for file in files if file.is_file())


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    if done.returncode != 0:
        raise ClusterError(f"{command[0]}: {done.stderr.strip()[-1500:]}")
