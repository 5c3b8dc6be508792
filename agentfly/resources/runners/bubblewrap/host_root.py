"""What a sandbox with the image ``host`` sees of this machine: its programs, and an /etc without secrets.

Guarantees:
1. Of /etc only what is listed here is copied, and of that only what everybody may read: no password hashes,
   no private keys, no tokens of package registries.
2. passwd and group name nobody but root and nobody.
3. Nothing else of this machine is visible: no /home, /root, /var, /run, /opt, /srv.
4. A command cannot change this machine's device files, also when the sandbox runs as this machine's root.
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Beside /usr: links into it on most systems, real folders on some."""

COPIED = (
    *("alternatives", "fonts", "java-*", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "magic"),
    *("mime.types", "nsswitch.conf", "os-release", "perl", "pki", "profile", "protocols", "python3*"),
    *("services", "shells", "ssl", "terminfo", "timezone", "crypto-policies", "ca-certificates.conf"),
)
WRITTEN = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "resolv.conf": "",  # a sandbox with network gets the machine's own over it
}


DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
"""Name -> (major, minor), fixed by the kernel."""
NOBODY = 65534


def build(base: Path) -> None:
    """Make what sandboxes of one owner share, ``etc`` and ``dev`` below ``base``, unless it is there."""
    for name, make in (("etc", build_etc), ("dev", build_devices)):
        if not (base / name).exists():
            fresh = base / f"{name}.new"  # left over if an earlier attempt failed
            shutil.rmtree(fresh, ignore_errors=True)
            make(fresh)
            fresh.rename(base / name)


def build_devices(target: Path) -> None:
    """Make device files for the sandboxes of root, in a new folder.

    bubblewrap shows this machine's own, and whoever owns a file may change its mode. An ordinary user does
    not own them; root does, without any capability. These belong to nobody. Where root may not make devices
    either (in a container), the folder stays empty and the container's own are shown.
    """
    target.mkdir()
    if os.geteuid() != 0 or os.statvfs(target).f_flag & os.ST_NODEV:
        return
    for name, (major, minor) in DEVICES.items():
        with contextlib.suppress(PermissionError):
            os.mknod(target / name, stat.S_IFCHR, os.makedev(major, minor))
            os.chmod(target / name, 0o666)
            os.chown(target / name, NOBODY, NOBODY)


def build_etc(target: Path, source: Path = Path("/etc")) -> None:
    """Make the /etc of sandboxes in a new folder."""
    target.mkdir()
    for pattern in COPIED:
        for entry in sorted(source.glob(pattern)):
            _copy(entry, target / entry.name)
    for name, content in WRITTEN.items():
        (target / name).write_text(content)


def _copy(entry: Path, target: Path) -> None:
    """Copy what everybody may read; links stay links, so that none is followed to a secret."""
    if entry.is_symlink():
        target.symlink_to(entry.readlink())
        return
    mode = entry.stat().st_mode
    if stat.S_ISDIR(mode) and mode & stat.S_IROTH and mode & stat.S_IXOTH:
        target.mkdir()
        for child in sorted(entry.iterdir()):
            _copy(child, target / child.name)
    elif stat.S_ISREG(mode) and mode & stat.S_IROTH:
        shutil.copyfile(entry, target)
        target.chmod(mode & 0o755)


def memory_has_attributes() -> bool:
    """Whether files in memory can have the attributes that an overlay writes (Linux 6.6 and later)."""
    file = os.memfd_create("attributes")
    try:
        os.setxattr(file, "user.overlay", b"")
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def links(root: Path = Path("/")) -> Iterator[tuple[str, str | None]]:
    """The folders beside /usr: (name, what it links to), or (name, None) for a real one."""
    for name in FOLDERS:
        path = root / name
        if path.is_symlink():
            yield name, str(path.readlink())
        elif path.is_dir():
            yield name, None
