"""Sandboxes of enroot, for machines where users may have neither a container engine nor root: login nodes.

enroot gives an image and a root file system, but no namespace of processes, no network of its own, no limits,
and no layer that can be dropped. ``unshare`` and an overlay around it add these, without any privilege.

Guarantees:
1. ``start`` gives a member whose daemon answers, or raises ``StartFailed`` with enroot's words and leaves
   nothing; also when it is cancelled.
2. An image is imported and unpacked once for all members; what one writes goes to its own overlay, which is
   verified at a reset or dropped.
3. Commands run as an ordinary user who owns every file of the image, without capabilities. No hook, mount or
   setting of the machine's or the user's enroot takes part.
4. Where enroot or what it needs is missing, ``check`` says which.

Not here: the life of a sandbox (``sandboxd.runner``, ``attached_sandbox``).
"""

import asyncio
import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentfly.resources.errors import ResourceError, StartFailed
from agentfly.resources.images.reference import is_on_disk, locate
from agentfly.resources.runners.bubblewrap import host_root
from agentfly.resources.runners.bubblewrap.root import DAEMON, Scratch
from agentfly.resources.runners.container import command as container
from agentfly.resources.runners.container import layer
from agentfly.resources.runners.container.attached import reason
from agentfly.resources.runners.container.attached_sandbox import SHM, AttachedSandbox
from agentfly.resources.runners.container.command import HANDOVER, SHARED
from agentfly.resources.runners.container.engine import CallFailed, call, call_async
from agentfly.resources.runners.container.images import PULL_S, Once
from agentfly.resources.runners.sandboxd.cgroups import DAEMON_TASKS, Cgroups, Limits
from agentfly.resources.runners.sandboxd.owner_dir import OwnerDir, delete
from agentfly.resources.runners.sandboxd.runner import DEFAULT_ENV, SandboxdRunner, cause_in
from agentfly.resources.spec import ContainerSpec

ANSWER_S = 10.0
PROBE_S = 30.0
GROUP_S = 5.0
NAME = "r"
"""What enroot knows the root of a member by; each has a data folder of its own."""
USER = "1000"
"""Whom commands run as. enroot leaves root its capabilities, so nobody is root, not even for root."""
# The image's own start script needs a shell, and runs its entrypoint.
CONF = 'hooks() {\n    rm -f "${ENROOT_ROOTFS}/etc/rc"\n}\n'
# What enroot cannot do or not any more, its namespace being below the one that has these. Folders that
# enroot makes for mounts have no permission at all, and nobody could verify what is in them.
SETUP = (
    'mount -t overlay overlay -o "userxattr,lowerdir=$1,upperdir=$2,workdir=$3" "$4"; cd "$4"; '
    'mount -t mqueue mqueue "$5"; ip link set lo up 2>/dev/null || :; shift 5; '
    'while test "$1" != --; do mkdir -p "./$1"; shift; done; cd /; shift; exec "$@"'
)


@dataclass(frozen=True, slots=True)
class Home:
    """Where a member's files are on this machine; ``shared`` is the door's."""

    path: Path
    shared: Path

    @property
    def upper(self) -> Path:
        """What its commands write."""
        return self.path / "upper"

    @property
    def work(self) -> Path:
        """The overlay's own."""
        return self.path / "work"

    @property
    def queues(self) -> Path:
        """Where its message queues are mounted first."""
        return self.path / "mq"

    @property
    def data(self) -> Path:
        """Where enroot looks for its root."""
        return self.path / "data"

    @property
    def settings(self) -> Path:
        """What enroot reads in place of the machine's settings."""
        return self.path / "settings"

    def prepare(self, mounts: str) -> None:
        """Make the folders and settings."""
        own = (self.upper, self.work, self.queues, self.data / NAME, self.settings / "mounts.d")
        for folder in own:
            folder.mkdir(parents=True, exist_ok=True)
        (self.settings / "mounts.d/sandbox.fstab").write_text(mounts)
        (self.settings / "sandbox.conf").write_text(CONF)

    def environ(self) -> dict[str, str]:
        """The environment of enroot, and nothing of ours."""
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.settings),
            "ENROOT_SYSCONF_PATH": str(self.settings),
            "ENROOT_CONFIG_PATH": str(self.settings / "none"),
            "ENROOT_CACHE_PATH": str(self.settings / "cache"),
            "ENROOT_DATA_PATH": str(self.data),
            "ENROOT_RUNTIME_PATH": str(self.path / "run"),
            "ENROOT_TEMP_PATH": str(self.path),
            "ENROOT_LOGIN_SHELL": "no",
        }


def fstab(
    sandboxd: Path, home: Home, devices: Sequence[Path], shm_mb: int, folders: Sequence[Scratch]
) -> str:
    """The mounts of a sandbox, in the format and with the options of enroot's own: see fstab(5).

    There is no /sys: control groups below it would be writable for who owns them outside.

    Args:
        devices: files to show in /dev.
        shm_mb: size of /dev/shm, in MiB.
    """
    bind, memory = "rw,nosuid,noexec,private", "rw,nosuid,nodev"
    lines = [
        "/proc /proc none x-create=dir,rbind,rw,nosuid,nodev,noexec,rslave",
        # Modes of files in /proc are the kernel's, shared by every mount of it.
        "none /proc none remount,bind,ro,nosuid,nodev,noexec",
        "tmpfs /dev tmpfs x-create=dir,rw,nosuid,noexec,mode=755,size=1m",
        *(f"{device} /dev/{device.name} none x-create=file,bind,{bind}" for device in devices),
        "devpts /dev/pts devpts x-create=dir,rw,nosuid,noexec,newinstance,ptmxmode=0666,mode=620",
        f"{home.queues} /dev/mqueue none x-create=dir,bind,{bind},nodev",
        f"tmpfs {SHM} tmpfs x-create=dir,{memory},mode=1777,size={shm_mb}m",
        *(
            f"tmpfs {folder.path} tmpfs x-create=dir,{memory},mode={folder.mode},size={folder.size_mb}m"
            for folder in folders
        ),
        f"{sandboxd} {DAEMON} none x-create=file,bind,ro,nosuid,nodev,private",
        f"{home.shared} {SHARED} none x-create=dir,bind,ro,nosuid,nodev,noexec,private",
        "none /dev none remount,ro,nosuid,noexec",
    ]
    return "".join(f"{line} 0 -1\n" for line in lines)


def command(
    enroot: str, root: Path, home: Home, network: bool, folders: Sequence[Scratch], daemon: Sequence[str]
) -> list[str]:
    """The command line of a sandbox: namespaces, overlay, enroot, daemon.

    enroot starts a program by the container's shell. The daemon can be that, so the image needs none.

    Args:
        root: the unpacked image.
        daemon: its arguments.
    """
    identity = ("--user", f"--map-user={USER}", f"--map-group={USER}", "--keep-caps")
    processes = ("--pid", "--fork", "--kill-child", "--mount-proc")
    own = ("--mount", "--propagation", "slave", "--ipc", "--uts", *(() if network else ("--net",)))
    overlay = (root, home.upper, home.work, home.data / NAME, home.queues)
    return [
        *("unshare", *identity, *processes, *own, "--", "/bin/sh", "-ec", SETUP, "sh", *map(str, overlay)),
        *("/proc", "/dev", SHARED, *(folder.path for folder in folders), "--"),
        *(enroot, "start", "--rw", "--conf", str(home.settings / "sandbox.conf"), "--env", f"SHELL={DAEMON}"),
        *(NAME, DAEMON, *daemon),
    ]


def uri(image: str) -> str:
    """Where enroot imports an image from: the name of docker's, or a URI of its own.

    >>> uri("registry.example:5000/team/image:1")
    'docker://registry.example:5000#team/image:1'
    """
    if "://" in image:
        return image
    first, slash, rest = image.partition("/")
    has_registry = bool(slash) and ("." in first or ":" in first or first == "localhost")
    return f"docker://{first}#{rest}" if has_registry else f"docker://{image}"


class EnrootSandbox(AttachedSandbox):
    """One sandbox: its folder, its overlay and its control group."""

    def __init__(
        self, owner: OwnerDir, cgroups: Cgroups, enroot: str, sandboxd: Path, root: Path, spec: ContainerSpec
    ) -> None:
        number = owner.new_name()
        self._cgroups, self._enroot, self._sandboxd = cgroups, enroot, sandboxd
        self.group = cgroups.plan(f"agentfly-{owner.name}-{number}")
        super().__init__(owner, number, self.group.paths)
        self.root, self.spec = root, spec
        wanted = container.wanted_scratch(spec)
        self.folders = container.scratch(spec, layer.scratch_in(root, wanted))
        self._home = Home(self.door.path, self.door.shared)
        self._devices = devices(owner.path / "dev")

    def command(self) -> tuple[list[str], Mapping[str, str] | None]:
        """See ``AttachedSandbox.command``."""
        shm = max(1, self.spec.memory_mb // 16)
        self._home.prepare(fstab(self._sandboxd, self._home, self._devices, shm, self.folders))
        self._cgroups.create(self.group, Limits(self.spec.cpu, self.spec.memory_mb, self.spec.pids))
        daemon = ["--handover", HANDOVER]
        argv = command(self._enroot, self.root, self._home, self.spec.network, self.folders, daemon)
        return argv, self._home.environ()

    def scratch(self) -> list[str]:
        """See ``AttachedSandbox.scratch``."""
        return [SHM, *(folder.path for folder in self.folders)]

    def joined(self, pid: int) -> None:
        """See ``AttachedSandbox.joined``."""
        self.group.add(pid)
        super().joined(pid)

    def cause(self, memory_mb: int) -> str:
        """See ``Sandbox.cause``."""
        return cause_in(self.group, self.last_words(), memory_mb)

    async def force(self) -> None:
        """See ``AttachedSandbox.force``."""
        self.group.kill()

    async def tidy(self) -> None:
        """See ``AttachedSandbox.tidy``."""
        async with asyncio.timeout(GROUP_S):
            while not self.group.remove():  # noqa: ASYNC110 -- the kernel tells nobody when a group is empty
                await asyncio.sleep(0.002)


class EnrootRunner(SandboxdRunner):
    """Runner of containers whose ``runtime`` is ``enroot``. ``image`` is docker's name of one, a URI that
    ``enroot import`` takes, a ``.sqsh`` file, or a folder with a root file system.

    Args:
        run_dir: a folder for this runner alone, with a short path, on a local disk with room for the unpacked
            images. Made at the first start; ``sweep`` its parent.
        sandboxd: the daemon's binary, statically linked.
    """

    name = "enroot"

    def __init__(self, run_dir: Path, sandboxd: Path) -> None:
        super().__init__(run_dir, sandboxd)
        self._cgroups = Cgroups.find()
        self._roots = Once[str, Path]()
        self._enroot: str | None = None

    def check(self) -> str | None:
        """None if a sandbox ran here, else what is missing. A success is remembered."""
        if self._enroot is not None:
            return None
        if not os.access(self._sandboxd, os.X_OK):
            return f"sandboxd: {self._sandboxd} is not an executable file; make sandboxd builds it"
        for program, package in (("enroot", "enroot"), ("unshare", "util-linux")):
            if shutil.which(program) is None:
                return f"{program}: not found on PATH; install {package}"
        enroot = str(shutil.which("enroot"))
        try:
            call([enroot], "version", deadline=ANSWER_S)
        except CallFailed as error:
            return f"enroot version: {error}"
        problem = self._probe(enroot)
        self._enroot = enroot if problem is None else None
        return problem

    def _probe(self, enroot: str) -> str | None:
        self._run_dir.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix="probe-", dir=self._run_dir.parent))
        try:
            home = Home(path, path / "o")
            for folder in (home.shared, path / "root"):
                folder.mkdir()
            home.prepare(fstab(self._sandboxd, home, devices(Path("/dev")), 1, ()))
            argv = command(enroot, path / "root", home, False, (), ["--version"])
            ended = subprocess.run(
                argv, env=home.environ(), capture_output=True, text=True, timeout=PROBE_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"a first sandbox: no answer in {PROBE_S:g} s"
        except OSError as error:
            return f"a first sandbox: {error}"
        finally:
            delete([str(path)])
        if ended.returncode == 0:
            return None
        said = reason(ended.stderr) or f"exit code {ended.returncode}"
        return f"a first sandbox: {said}; it needs user namespaces and overlays in them (Linux 5.11)"

    def notes(self) -> tuple[str, ...]:
        """What works less well here than it could, for ``agentfly doctor``."""
        notes = [f"{name} of a sandbox: no control group can be written" for name in self._cgroups.missing]
        if shutil.which("unsquashfs") is None:
            notes.append("images other than folders: unsquashfs is not found; install squashfs-tools")
        return (*notes, "disk of a sandbox: not bounded")

    async def close(self) -> None:
        """See ``SandboxdRunner.close``."""
        await self._roots.close()
        if self._owner is not None:
            self._owner.drop(self._owner.path / "roots")
        await super().close()

    async def _plan(self, spec: ContainerSpec, member_id: str) -> EnrootSandbox:
        container.check(spec)
        problem = None if self._enroot else await asyncio.to_thread(self.check)
        if self._enroot is None:
            raise StartFailed(str(problem))
        owner = self._own()
        root = await self._roots.get(spec.image, lambda: self._unpacked(spec.image, owner))
        try:
            return EnrootSandbox(owner, self._cgroups, self._enroot, self._sandboxd, root, spec)
        except OSError as error:
            raise StartFailed(f"run_dir: {self._run_dir}: {error}") from error

    async def _unpacked(self, image: str, owner: OwnerDir) -> Path:
        """The folder with an image's root file system.

        Raises:
            StartFailed: with enroot's words.
        """
        if is_on_disk(image) and not image.endswith(".sqsh"):
            return _folder(image)
        name = hashlib.sha256(image.encode()).hexdigest()[:16]
        roots = owner.path / "roots"
        env = {**os.environ, "ENROOT_DATA_PATH": str(roots), "ENROOT_RUNTIME_PATH": str(roots / ".run")}
        enroot, file = [str(self._enroot)], Path(image)
        try:
            if not image.endswith(".sqsh"):
                file = roots / f"{name}.sqsh"
                into = ("--output", str(file))
                await call_async(enroot, "import", *into, uri(image), deadline=PULL_S, env=env)
            await call_async(enroot, "create", "--name", name, str(file), deadline=PULL_S, env=env)
        except CallFailed as error:
            raise StartFailed(f"image: {image}: {error}", reason=str(error)) from error
        finally:
            if not image.endswith(".sqsh"):
                file.unlink(missing_ok=True)
        return roots / name

    def _config(self, sandbox: EnrootSandbox) -> dict[str, object]:
        spec, missing = sandbox.spec, self._cgroups.missing
        limits = {
            **({"processes": spec.pids + DAEMON_TASKS} if "pids" in missing else {}),
            **({"dataBytes": spec.memory_mb << 20} if "memory" in missing else {}),
        }
        home = {"HOME": spec.workdir}
        return {
            "scratch": sandbox.scratch(),
            "ownNetwork": not spec.network,
            "workdir": spec.workdir,
            "env": DEFAULT_ENV | home | environment(sandbox.root) | spec.env,
            "limits": limits,
        }

    def _prepare(self, owner: OwnerDir) -> None:
        (owner.path / "roots").mkdir(exist_ok=True)
        if not (owner.path / "dev").exists():
            host_root.build_devices(owner.path / "dev")


def devices(folder: Path) -> list[Path]:
    """The device files to show: those made for us, or this machine's own."""
    made = {path.name: path for path in folder.iterdir()} if folder != Path("/dev") else {}
    return [made.get(name, Path("/dev", name)) for name in sorted(host_root.DEVICES)]


def environment(root: Path) -> dict[str, str]:
    """What an imported image sets: enroot writes it to /etc/environment."""
    found = {}
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in (root / "etc/environment").read_text().splitlines():
            name, equals, value = line.partition("=")
            if equals and name.isidentifier():
                found[name] = value.strip('"')
    return found


def _folder(image: str) -> Path:
    try:
        reference = locate(image, Path.cwd())
    except ResourceError as error:
        raise StartFailed(error.message, hints=error.hints) from error
    if reference.form != "dir" or {":", ","} & set(reference.path):
        raise StartFailed(
            f"image: {image} is not for enroot",
            hints=["use a name as in debian:12, a .sqsh file, or a directory without : and , in its path"],
        )
    return Path(reference.path)
