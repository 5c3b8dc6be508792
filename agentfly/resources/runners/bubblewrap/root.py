"""The command line that makes a sandbox: namespaces, root file system, devices, all of it for bubblewrap.

Guarantees:
1. Writes go to an overlay's upper folder or to a scratch folder, each in memory and of bounded size; nothing
   else of this machine can be written, not even the mode of a device. Where the kernel cannot have an upper
   in memory it is a folder on disk, and its size is not bounded.
2. The result has no environment, no capability, no way to a further user namespace, and no network unless
   the spec asks for it.
3. Paths that would hide or be hidden by a part of the sandbox are refused by name. So is an image with a link
   in such a place: bubblewrap follows it before the root is the sandbox's own, to files of this machine.
"""

import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from agentfly.resources.errors import StartFailed
from agentfly.resources.images.inside import follow, link_on_the_way, refuse
from agentfly.resources.runners.bubblewrap import host_root
from agentfly.resources.spec import ContainerSpec

HOST = "host"
OURS = "/.agentfly"
DAEMON = f"{OURS}/sandboxd"
UPPER = f"{OURS}/upper"
KEYS = "keys"
"""What anybody may read of /proc, and is about the user outside."""


@cache
def hidden(proc: Path = Path("/proc")) -> tuple[str, ...]:
    """Files of /proc about the whole machine that a sandbox must not open.

    What root alone may read opens for this machine's root without any capability, also in a sandbox.
    """
    files = [path for path in proc.iterdir() if not path.name.isdigit() and not path.is_symlink()]
    modes = {path.name: path.stat().st_mode for path in files if path.is_file()}
    closed = [name for name, mode in modes.items() if not mode & stat.S_IROTH]
    return tuple(sorted({*closed, KEYS} & modes.keys()))


@dataclass(frozen=True, slots=True)
class Scratch:
    """A folder in memory, emptied at every reset: its mode and its size in MiB."""

    path: str
    mode: str
    size_mb: int


@dataclass(frozen=True, slots=True)
class Home:
    """Where a member's files are on this machine."""

    path: Path

    @property
    def socket(self) -> Path:
        return self.path / "s"

    @property
    def log(self) -> Path:
        return self.path / "log"


@dataclass(frozen=True, slots=True)
class Root:
    """One spec's root file system on this machine.

    Args:
        spec: what to build.
        base: the folder with the ``etc`` and ``dev`` that ``host_root`` made.
        sandboxd: the daemon's binary.
        bounded: whether overlays may write to memory: see ``host_root.memory_has_attributes``.
    """

    spec: ContainerSpec
    base: Path
    sandboxd: Path
    bounded: bool

    def check(self) -> None:
        """Refuse what cannot be built.

        Raises:
            StartFailed: names the field.
        """
        image, workdir = self.spec.image, PurePosixPath(self.spec.workdir)
        if image != HOST and not Path(image).is_dir():
            raise StartFailed(
                f"image: {image} is neither 'host' nor a folder with a root file system",
                hints=["mmdebstrap --variant=minbase bookworm FOLDER makes one"],
            )
        mounted = [PurePosixPath(scratch.path) for scratch in self._fixed_scratch()]
        reserved = [PurePosixPath(path) for path in ("/proc", "/dev", OURS)]
        for other in (*mounted, *reserved):
            if other in workdir.parents or (workdir == other and other in reserved) or str(workdir) == "/":
                raise StartFailed(
                    f"workdir: {self.spec.workdir} lies inside {other}, which the sandbox mounts itself",
                    hints=["use /workspace"],
                )
        for place in self._mount_points() if image != HOST else ():
            if (link := link_on_the_way(image, place)) is not None:
                raise StartFailed(
                    f"image: {image} has a link at {link}, and the sandbox mounts its own {place}",
                    hints=[f"use an image in which {link} is no link, or another workdir if it is that"],
                )

    def _mount_points(self) -> Iterator[str]:
        """What bubblewrap makes in an image. Below /dev it makes everything in a file system of its own."""
        yield from ("/proc", "/dev", DAEMON, UPPER)
        yield from (scratch.path for scratch in self.scratch() if not scratch.path.startswith("/dev/"))
        if self.spec.network:
            yield "/etc/resolv.conf"

    def overlays(self) -> Iterator[tuple[str, str, str]]:
        """(lower folder on this machine, name below upper and work, place in the sandbox)."""
        if self.spec.image != HOST:
            yield self.spec.image, "", "/"
            return
        yield "/usr", "usr", "/usr"
        yield str(self.base / "etc"), "etc", "/etc"
        for name, link in host_root.links():
            if link is None:
                yield f"/{name}", name, f"/{name}"

    def scratch(self) -> tuple[Scratch, ...]:
        """Every folder that a reset empties."""
        fixed = self._fixed_scratch()
        workdir = self.spec.workdir
        if any(scratch.path == workdir for scratch in fixed) or self._in_image(workdir):
            return fixed
        return (*fixed, Scratch(workdir, "0755", max(1, self.spec.memory_mb // 2)))

    def _fixed_scratch(self) -> tuple[Scratch, ...]:
        share = max(1, self.spec.memory_mb // 16)
        folders = [Scratch("/tmp", "1777", 4 * share), Scratch("/dev/shm", "1777", share)]
        folders.append(Scratch("/run", "0755", max(1, share // 4)))
        if self.spec.image == HOST:
            folders.append(Scratch("/root", "0700", share))
        return tuple(folders)

    def _in_image(self, folder: str) -> bool:
        """A workdir with content belongs to the image; a folder in memory over it would hide that."""
        if self.spec.image == HOST and PurePosixPath(folder).parts[1] not in ("usr", "etc"):
            return False
        root = "" if self.spec.image == HOST else self.spec.image
        try:
            return any(Path(f"{root}/{follow(root, folder.split('/'), refuse)}").iterdir())
        except OSError:
            return False

    @property
    def disk_mb(self) -> int:
        """What may be written to the root file system, in MiB."""
        return self.spec.memory_mb if self.spec.disk_mb is None else self.spec.disk_mb

    def prepare(self, home: Home) -> None:
        """Make the folders that the overlays write to, or those that stand for them on this machine."""
        disk = self._disk(home)
        for part in self._parts():
            (disk / part).mkdir(parents=True, exist_ok=True)

    def arguments(self, home: Home, ceilings: Mapping[str, int]) -> list[str]:
        """bubblewrap's arguments up to the command.

        Args:
            home: the member's files.
            ceilings: settings of the sandbox's user namespace, as file below /proc/sys: a descriptor from
                which bubblewrap reads the value.
        """
        return [*self._namespaces(), *self._files(home), *self._seals(ceilings)]

    def _disk(self, home: Home) -> Path:
        """The folder with upper and work. In memory it is each sandbox's own, though all name it alike."""
        return self.base.resolve() / "disk" if self.bounded else home.path

    def _parts(self) -> list[str]:
        names = [name for _, name, _ in self.overlays()]
        return [str(PurePosixPath(part, name)) for name in names for part in ("upper", "work")]

    def _namespaces(self) -> list[str]:
        network = ["--share-net"] if self.spec.network else []
        return [
            *("--unshare-all", *network, "--unshare-user", "--disable-userns"),
            # The daemon has its own guard, a pipe, of no use while a command keeps it from running.
            *("--die-with-parent", "--cap-drop", "ALL", "--new-session", "--as-pid-1", "--clearenv"),
            *("--uid", "0", "--gid", "0", "--hostname", "sandbox"),
        ]

    def _files(self, home: Home) -> Iterator[str]:
        disk = self._disk(home)
        if self.bounded:
            # bubblewrap mounts below /newroot and looks for its sources below /oldroot: through the parent
            # of both, what it mounts here is found there, in this sandbox and nowhere else.
            here = f"/../oldroot{disk}"
            yield from ("--size", str(self.disk_mb << 20), "--tmpfs", here)
            for part in self._parts():
                yield from ("--dir", f"{here}/{part}")
        for lower, name, place in self.overlays():
            yield from ("--overlay-src", lower)
            yield from ("--overlay", str(disk / "upper" / name), str(disk / "work" / name), place)
        if self.spec.image == HOST:
            for name, link in host_root.links():
                if link is not None:
                    yield from ("--symlink", link, f"/{name}")
            yield from ("--dir", "/home", "--dir", "/opt", "--dir", "/var", "--symlink", "../tmp", "/var/tmp")
        yield from ("--proc", "/proc", "--dev", "/dev")
        for scratch in self.scratch():
            size = str(scratch.size_mb << 20)
            yield from ("--perms", scratch.mode, "--size", size, "--tmpfs", scratch.path)
        yield from ("--mqueue", "/dev/mqueue")
        yield from ("--ro-bind", str(self.sandboxd), DAEMON, "--ro-bind", str(disk / "upper"), UPPER)
        if self.spec.network:
            yield from ("--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf")

    def _seals(self, ceilings: Mapping[str, int]) -> Iterator[str]:
        for file, value in ceilings.items():
            yield from ("--file", str(value), f"/proc/sys/{file}")
        for device in sorted((self.base / "dev").iterdir()):
            yield from ("--dev-bind", str(device), f"/dev/{device.name}")
        for name in hidden():
            yield from ("--ro-bind", "/dev/null", f"/proc/{name}")
        # Modes of files in /proc are the kernel's, shared by every mount of it.
        yield from ("--remount-ro", "/proc", "--remount-ro", "/dev")
        if self.spec.image == HOST:
            yield from ("--remount-ro", "/")
