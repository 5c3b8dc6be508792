"""The command line that starts a container with sandboxd as its first process: docker, podman, nerdctl.

Guarantees:
1. The container has the spec's limits, no capability beyond ``CAPABILITIES``, no way to gain one, and no
   network unless the spec asks for it. It is removed when it ends.
2. Any image will do: the daemon is mounted into it and replaces its entrypoint; its user stays.
3. Files that an engine would keep writable for a container (hosts, hostname, resolv.conf) are read-only.
4. Paths that would hide or be hidden by what is mounted are refused by name.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from agentfly.resources.errors import StartFailed
from agentfly.resources.runners.bubblewrap.root import DAEMON, OURS, Scratch
from agentfly.resources.runners.sandboxd.cgroups import DAEMON_TASKS
from agentfly.resources.spec import ContainerSpec

SHARED = f"{OURS}/owner"
HANDOVER = f"{SHARED}/h"
RESERVED = ("/proc", "/sys", "/dev", OURS)
OWNER_LABEL = "agentfly.owner"
MEMBER_LABEL = "agentfly.member"
# docker's own list without what commands of an agent have no use for: making devices, raw sockets, binding
# low ports, changing the root folder, file capabilities, writing to the machine's audit log.
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
ETC = ("hosts", "hostname", "resolv.conf")
"""Files of /etc that all our containers share, read-only; with a network, the last is the engine's."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A command line that works here.

    ``command`` is what it is called with. ``flags`` are those that containers need on this machine;
    ``limits``: whether processor, memory and processes can be bounded; ``disk``: whether the writable layer.
    """

    command: tuple[str, ...]
    flags: tuple[str, ...] = ()
    limits: bool = True
    disk: bool = True

    @property
    def name(self) -> str:
        """``docker``, ``podman`` or ``nerdctl``."""
        return PurePosixPath(self.command[0]).name


@dataclass(frozen=True, slots=True)
class Placing:
    """Where things of one container are on this machine, and what it is called there.

    ``etc`` is the folder with the files of ``ETC``; ``owner`` and ``member`` go into labels.
    """

    name: str
    owner: str
    member: str
    sandboxd: Path
    shared: Path
    etc: Path


def check(spec: ContainerSpec) -> None:
    """Refuse what cannot be mounted.

    Raises:
        StartFailed: names the field.
    """
    workdir = PurePosixPath(spec.workdir)
    for other in (*RESERVED, "/tmp", "/run"):
        inside = PurePosixPath(other) in workdir.parents
        if inside or str(workdir) == "/" or spec.workdir in RESERVED:
            raise StartFailed(
                f"workdir: {spec.workdir} lies inside {other}, which is mounted over",
                hints=["use /workspace"],
            )


def wanted_scratch(spec: ContainerSpec) -> tuple[str, ...]:
    """The folders to keep in memory, unless the image has something there."""
    return tuple(dict.fromkeys(("/tmp", "/run", spec.workdir)))


def scratch(spec: ContainerSpec, empty: Sequence[str]) -> tuple[Scratch, ...]:
    """Every folder that a reset empties, /dev/shm apart.

    Args:
        empty: those of ``wanted_scratch`` in which the image has nothing.
    """
    share = max(1, spec.memory_mb // 16)
    known = {"/tmp": ("1777", 4 * share), "/run": ("0755", max(1, share // 4))}
    # The image decides who the commands run as, and not every engine gives a folder in memory an owner.
    other = ("0777", max(1, spec.memory_mb // 2))
    return tuple(Scratch(path, *known.get(path, other)) for path in empty)


def run(
    engine: Engine, spec: ContainerSpec, image: str, root: bool, placing: Placing, folders: Sequence[Scratch]
) -> list[str]:
    """The whole command line.

    Args:
        image: its id.
        root: whether the image's user is root.
        folders: what ``scratch`` gave.
    """
    return [
        *engine.command,
        *("run", "--rm", "--interactive", "--pull", "never", "--log-driver", "none", "--name", placing.name),
        *("--label", f"{OWNER_LABEL}={placing.owner}", "--label", f"{MEMBER_LABEL}={placing.member}"),
        *("--hostname", "sandbox", "--entrypoint", DAEMON),
        *seals(root),
        *(() if spec.network else ("--network", "none")),
        *(limits(spec) if engine.limits else ()),
        *(("--storage-opt", f"size={spec.disk_mb}m") if spec.disk_mb is not None and engine.disk else ()),
        *_files(engine, spec, placing, folders),
        *engine.flags,
        image,
        *("--handover", HANDOVER),
    ]


def seals(root: bool) -> list[str]:
    """What a container may not do.

    Args:
        root: whether its commands are root's. Others have nothing from capabilities, as setting the user id
            is off; podman would give them all that is added.
    """
    added = [word for name in CAPABILITIES for word in ("--cap-add", name)] if root else []
    return ["--cap-drop", "ALL", *added, "--security-opt", "no-new-privileges"]


def limits(spec: ContainerSpec) -> list[str]:
    """What a container may use. Swap counts as memory."""
    memory = f"{spec.memory_mb}m"
    return [
        *("--cpus", f"{spec.cpu:g}", "--memory", memory, "--memory-swap", memory),
        *("--pids-limit", str(spec.pids + DAEMON_TASKS)),
    ]


def _files(
    engine: Engine, spec: ContainerSpec, placing: Placing, folders: Sequence[Scratch]
) -> Iterator[str]:
    # podman copies what the image has at a mount point into it, unless it is told not to.
    copied = ",notmpcopyup" if engine.name == "podman" else ""
    for folder in folders:
        yield "--tmpfs"
        yield f"{folder.path}:rw,exec,nosuid,nodev,size={folder.size_mb}m,mode={folder.mode}{copied}"
    yield from ("--shm-size", f"{max(1, spec.memory_mb // 16)}m")
    yield from _read_only(placing.sandboxd, DAEMON)
    yield from _read_only(placing.shared, SHARED)
    for name in ETC:
        if not (spec.network and name == "resolv.conf"):
            yield from _read_only(placing.etc / name, f"/etc/{name}")


def _read_only(source: Path, target: str) -> tuple[str, str]:
    """``--mount``, since ``--volume`` makes a folder of a source that is missing."""
    return "--mount", f"type=bind,source={source},target={target},readonly"
