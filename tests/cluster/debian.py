"""Files of Debian packages, unpacked below the cache: nothing is installed on the machine.

Guarantees:
1. A folder of unpacked packages is complete or absent.
2. Where apt is missing, the error names the packages that are needed.
"""

import hashlib
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.cluster.machine import ClusterError, Unavailable, cache

FETCH_S = 600.0


def unpacked(*packages: str) -> Path:
    """A folder like ``/`` with the files of these packages, without their dependencies.

    Raises:
        Unavailable: this machine has no apt.
        ClusterError: a package cannot be fetched.
    """
    release = platform.freedesktop_os_release()
    asked = (
        f"{release.get('ID')} {release.get('VERSION_ID')} {platform.machine()} {' '.join(sorted(packages))}"
    )
    target = cache() / "debian" / hashlib.sha256(asked.encode()).hexdigest()[:16]
    if target.is_dir():
        return target
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise Unavailable(
            f"packages: {' '.join(packages)} cannot be fetched without apt-get",
            hints=["use a Debian machine"],
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
        archives, root = Path(scratch) / "archives", Path(scratch) / "root"
        archives.mkdir()
        _run(["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", *packages], archives)
        for archive in archives.glob("*.deb"):
            _run(["dpkg", "-x", str(archive), str(root)], archives)
        try:
            root.rename(target)
        except OSError:  # somebody else was first
            if not target.is_dir():
                raise
    return target


def libraries(root: Path) -> str:
    """The LD_LIBRARY_PATH for programs of an unpacked folder."""
    folders = [*root.glob("usr/lib/*-linux-gnu"), *root.glob("lib/*-linux-gnu")]
    return ":".join(str(path) for path in sorted(folders))


def compile_flags(*packages: str) -> dict[str, str]:
    """The environment with which a C compiler and pkg-config see unpacked development packages.

    They are linked statically: only their archives are there.
    """
    root = unpacked(*packages)
    folder = next(iter(sorted(root.glob("usr/lib/*-linux-gnu"))))
    return {
        "PKG_CONFIG_PATH": str(folder / "pkgconfig"),
        "CGO_CFLAGS": f"-I{root}/usr/include",
        "CGO_LDFLAGS": f"-L{folder}",
    }


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=FETCH_S, check=False, env=None
    )
    if done.returncode != 0:
        raise ClusterError(f"{command[0]}: failed: {done.stderr[-1000:]}", hints=["apt-get update"])
