"""The images that the product's Dockerfiles make, built on this machine without any registry of images.

Guarantees:
1. Same sources, same archive: an image is built once for each content of what its Dockerfile copies.
2. An archive under its name is complete. Of several processes that want one, one builds, the others wait.
3. What the build takes from this machine (package index, certificates, Go) is mounted while it builds: no
   image and no file of this repository has any of it.

The base is Debian with Python, made by mmdebstrap; a user's build takes the bases that the Dockerfiles name.
"""

import ast
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.cluster import binaries
from tests.cluster.machine import SYSTEM_PATH, ClusterError, Unavailable, cache, need_root, tool

ROOT = Path(__file__).parents[2]
AGENTFLY = "docker.io/agentfly/agentfly:dev"
SANDBOXD = "docker.io/agentfly/sandboxd:dev"
KEPT = 3
BUILD_S = 1200.0

_SUITE = "bookworm"
_BASE = (
    *("mmdebstrap", "--quiet", "--variant=essential", "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"),
    "--include=usr-is-merged,python3,python3-venv,ca-certificates",
    *(f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in ("doc", "locale", "man")),
)
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_LOCAL = "localhost/agentfly-base"

Mounts = Callable[[Path], list[tuple[str, str]]]
"""What is mounted while an image builds: (here, there and how); files may be written to the folder given."""


def agentfly_image() -> Path:
    """A docker-archive of the image of operator, broker and worker; its name is ``AGENTFLY``.

    Raises:
        Unavailable: this machine cannot build images.
        ClusterError: the build failed; the text has its last words.
    """
    sources = ("agentfly", "operator/agentfly_operator")
    files = ("pyproject.toml", "constraints.txt", "README.md", "LICENSE")
    return _image("agentfly", AGENTFLY, sources, files, f"BASE={_LOCAL}:python", _package_index)


def sandboxd_image() -> Path:
    """A docker-archive of the daemon's image; its name is ``SANDBOXD``.

    Raises: as ``agentfly_image``.
    """
    return _image("sandboxd", SANDBOXD, ("operator/sandboxd",), (), f"BUILDER={_LOCAL}:go", _go)


def _image(
    name: str, tag: str, folders: Sequence[str], files: Sequence[str], argument: str, mounts: Mounts
) -> Path:
    need_root()
    home = cache() / "product"
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="context-", dir=home) as scratch, _lock(home / ".lock"):
        context = Path(scratch) / "context"
        _snapshot(context, folders, (*files, f"operator/images/{name}/Dockerfile"))
        base = _base(home)
        target = home / f"{name}-{_digest(context, base.name)}.tar"
        if target.exists():
            target.touch()
            return target
        podman = _podman(home)
        _import_base(podman, base)
        _run(
            [
                *("nice", *podman, "build", "--quiet", "--isolation", "chroot", "--network", "host"),
                *(f"--volume={source}:{inside}" for source, inside in mounts(Path(scratch))),
                *("--build-arg", argument, "--tag", tag),
                *("--file", str(context / f"operator/images/{name}/Dockerfile"), str(context)),
            ]
        )
        fresh = Path(scratch) / "image.tar"
        _run([*podman, "save", "--quiet", "--format", "docker-archive", "--output", str(fresh), tag])
        # Layers of builds that nothing was made of for a day.
        _run([*podman, "image", "prune", "--force", "--filter", "until=24h"])
        fresh.rename(target)
        for old in sorted(home.glob(f"{name}-*.tar"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink()
        return target


def _snapshot(context: Path, folders: Sequence[str], files: Sequence[str]) -> None:
    """Copy first, hash the copy: the tree may be edited meanwhile."""
    skipped = shutil.ignore_patterns("__pycache__", "bin", "*_test.go", "testdata")
    for folder in folders:
        shutil.copytree(ROOT / folder, context / folder, ignore=skipped, symlinks=True)
    for file in files:
        (context / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, context / file)


def _digest(context: Path, base: str) -> str:
    digest = hashlib.sha256(base.encode())
    for path in sorted(path for path in context.rglob("*") if path.is_file()):
        content = path.read_bytes()
        digest.update(
            f"{path.relative_to(context)} {path.stat().st_mode:o} {len(content)}\0".encode() + content
        )
    return digest.hexdigest()[:16]


def _base(home: Path) -> Path:
    """A tar of a root file system with Python and certificates."""
    target = home / f"base-{hashlib.sha256(repr((_SUITE, _BASE)).encode()).hexdigest()[:16]}.tar"
    if not target.exists():
        installed("mmdebstrap")
        with tempfile.TemporaryDirectory(prefix="base-", dir=home) as scratch:
            fresh = Path(scratch) / "base.tar"
            _run(["nice", *_BASE, _SUITE, str(fresh)])
            fresh.rename(target)
    return target


def _podman(home: Path) -> list[str]:
    """podman with a store of its own, whose layers make the next build a short one."""
    installed("podman")
    run = Path("/run/agentfly-images")
    return ["podman", "--root", str(home / "store"), "--runroot", str(run), "--cgroup-manager", "cgroupfs"]


def _import_base(podman: list[str], base: Path) -> None:
    mark = f"agentfly.base={base.name}"
    known = _run(
        [*podman, "images", "--quiet", "--filter", f"label={mark}", "--filter", f"reference={_LOCAL}:*"]
    )
    if len(known.split()) == 2:
        return
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    for tag, search in {"python": path, "go": f"/usr/local/go/bin:{path}"}.items():
        changes = ("--change", f"ENV PATH={search}", "--change", f"LABEL {mark} agentfly.tag={tag}")
        _run([*podman, "import", "--quiet", *changes, str(base), f"{_LOCAL}:{tag}"])


def _package_index(scratch: Path) -> list[tuple[str, str]]:
    """Where this machine's pip gets packages from, told to pip and uv in the build."""
    listed = _run([sys.executable, "-m", "pip", "config", "list"])
    index = ""
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        if key.endswith(".index-url"):
            index = ast.literal_eval(value)
    pip, uv = scratch / "pip.conf", scratch / "uv.toml"
    pip.write_text(f"[global]\ncert = {_CERTIFICATES}\n" + (f"index-url = {index}\n" if index else ""))
    uv.write_text("native-tls = true\n" + (f'index-url = "{index}"\n' if index else ""))
    return [
        (str(_CERTIFICATES.parent), f"{_CERTIFICATES.parent}:ro"),
        (str(pip), "/etc/pip.conf:ro"),
        (str(uv), "/etc/uv/uv.toml:ro"),
    ]


def _go(_: Path) -> list[tuple[str, str]]:
    """This machine's Go and what it has compiled already."""
    where = _run([*binaries.go(), "env", "GOROOT", "GOCACHE"]).split()
    Path(where[1]).mkdir(parents=True, exist_ok=True)
    return list(zip(where, ("/usr/local/go:ro", "/root/.cache/go-build"), strict=True))


def installed(program: str, package: str = "") -> None:
    """Install a program of Debian's that this machine lacks.

    Raises:
        Unavailable: there is no apt.
        ClusterError: apt cannot.
    """
    package = package or program
    if shutil.which(program, path=f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"):
        return
    apt = [tool("apt-get", f"install {package}")]
    with Path(tempfile.gettempdir(), "agentfly-apt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", package]):
            _run([*apt, *command])


def _run(command: Sequence[str]) -> str:
    what = f"{Path(command[0]).name} {' '.join(command[-2:])}"
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    try:
        done = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BUILD_S,
            check=False,
        )
    except FileNotFoundError:
        raise Unavailable(
            f"{command[0]}: is not installed", hints=[f"apt-get install {command[0]}"]
        ) from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{what}: did not end within {BUILD_S:.0f} s") from None
    if done.returncode != 0:
        raise ClusterError(f"{what}: exit {done.returncode}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
