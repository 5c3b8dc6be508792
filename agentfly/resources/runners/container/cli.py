"""Containers of docker, podman or nerdctl, one for each member, with sandboxd as their first process.

Guarantees:
1. ``start`` gives a member whose daemon answers, or raises ``StartFailed`` with the engine's words and leaves
   no container, process or folder; also when it is cancelled.
2. ``reset`` keeps the container only if nothing was written to its writable layer, to its volumes or to its
   devices, seen from outside (``layer``). Where that cannot be seen, it starts a new one.
3. A container lives no longer than this process: its daemon ends with its standard input, and the engine
   removes it. What a killed engine leaves, and a container that never came to its daemon, ``remove_left``
   removes by label.
4. Any image will do: no shell, no Python, any user.
5. Processor, memory, processes and network are bounded by the engine; ``notes`` says what is not.

Not here: which command line works (``engine``), what it is given (``command``).
"""

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from agentfly.resources.errors import StartFailed
from agentfly.resources.finish import finished
from agentfly.resources.runners.bubblewrap.root import Scratch
from agentfly.resources.runners.container import command as command_line
from agentfly.resources.runners.container import engine as engines
from agentfly.resources.runners.container import layer
from agentfly.resources.runners.container.attached_sandbox import SHM, AttachedSandbox
from agentfly.resources.runners.container.command import Engine, Placing
from agentfly.resources.runners.container.images import Image, Images, Once
from agentfly.resources.runners.sandboxd.cgroups import DAEMON_TASKS
from agentfly.resources.runners.sandboxd.owner_dir import OwnerDir
from agentfly.resources.runners.sandboxd.runner import (
    DEFAULT_ENV,
    SandboxdRunner,
    removed,
)
from agentfly.resources.spec import ContainerSpec

logger = logging.getLogger(__name__)

REMOVE_S = 30.0
SETTLE_S = 10.0
"""A container that was being started when its owner was killed comes and goes by itself in a second."""
PAUSE_S = 0.1
RECORD = "containers.json"
"""In the owner's folder: which command removes its containers, and their label."""
ENGINE_FILES = frozenset({".containerenv"})
"""What an engine puts into an empty folder of an image by itself."""


class Container(AttachedSandbox):
    """One container. ``folders`` are those in memory."""

    def __init__(
        self, engine: Engine, owner: OwnerDir, sandboxd: Path, image: Image, spec: ContainerSpec, member: str
    ) -> None:
        number = owner.new_name()
        super().__init__(owner, number)
        self.image, self.spec = image, spec
        self.folders: tuple[Scratch, ...] = ()
        self._engine = engine
        name = f"agentfly-{owner.name}-{number}"
        self._placing = Placing(name, owner.name, member, sandboxd, self.door.shared, owner.path / "etc")

    def command(self) -> tuple[list[str], None]:
        """See ``AttachedSandbox.command``."""
        root = self.image.is_roots
        return command_line.run(
            self._engine, self.spec, self.image.id, root, self._placing, self.folders
        ), None

    def scratch(self) -> list[str]:
        """See ``AttachedSandbox.scratch``."""
        return [SHM, *(folder.path for folder in self.folders)]

    async def force(self) -> None:
        """See ``AttachedSandbox.force``."""
        await asyncio.to_thread(_discard, self._engine, [self._placing.name])


class ContainerCLIRunner(SandboxdRunner):
    """Runner of containers whose ``runtime`` is ``container-cli``.

    Args:
        run_dir: a folder for this runner alone, with a short path on a local disk. Made at the first start;
            ``sandboxd.owner_dir.sweep`` its parent, with ``remove_left``.
        sandboxd: the daemon's binary, statically linked.
        cli: the command to use, as in ``["docker", "--context", "mine"]``; None tries what there is.
    """

    name = "container-cli"

    def __init__(self, run_dir: Path, sandboxd: Path, cli: Sequence[str] | None = None) -> None:
        super().__init__(run_dir, sandboxd)
        self._commands = [list(cli)] if cli else engines.candidates(os.environ)
        self._found: engines.Found | None = None
        self._images: Images | None = None
        self._layouts = Once[tuple[str, str], tuple[str, ...]]()

    def check(self) -> str | None:
        """None if a container ran here, else why none did and what to change. A success is remembered."""
        if not os.access(self._sandboxd, os.X_OK):
            return f"sandboxd: {self._sandboxd} is not an executable file; make sandboxd builds it"
        if self._found is None or self._found.engine is None:
            self._found = engines.find(self._sandboxd, self._commands)
        if self._found.engine is not None:
            return None
        reasons = "; ".join(f"{cli}: {why}" for cli, why in self._found.refused)
        return f"no container engine works ({reasons}); start one, or name it in {engines.VARIABLE}"

    def notes(self) -> tuple[str, ...]:
        """Which engine it is, and what works less well here than it could, for ``agentfly doctor``."""
        if self._found is None or self._found.engine is None:
            return ()
        engine = self._found.engine
        notes = [" ".join(engine.command)]
        if not engine.limits:
            notes.append("processor, memory and processes of a container: the engine cannot bound them here")
        if not engine.disk:
            notes.append("disk of a container: the engine's storage driver cannot bound it")
        notes += [f"not {cli}: {why}" for cli, why in self._found.refused]
        return tuple(notes)

    async def close(self) -> None:
        """See ``SandboxdRunner.close``."""
        if self._images is not None:
            await self._images.close()
        await self._layouts.close()
        if self._owner is not None:
            if not await asyncio.to_thread(remove_left, self._owner.path):
                return  # its folder stays locked until this process ends: then the next sweep tries again
            (self._owner.path / RECORD).unlink(missing_ok=True)
        await super().close()

    async def _plan(self, spec: ContainerSpec, member_id: str) -> Container:
        command_line.check(spec)
        engine = await self._engine()
        if self._images is None:
            self._images = Images(engine)
        image = await self._images.get(spec.image)
        empty = await self._layouts.get((image.id, spec.workdir), lambda: self._layout(engine, image, spec))
        try:
            container = Container(engine, self._own(), self._sandboxd, image, spec, member_id)
        except OSError as error:
            raise StartFailed(f"run_dir: {self._run_dir}: {error}") from error
        container.folders = command_line.scratch(spec, empty)
        return container

    async def _engine(self) -> Engine:
        if self._found is None or self._found.engine is None:
            problem = await asyncio.to_thread(self.check)
            if problem is not None:
                raise StartFailed(problem)
        assert self._found is not None
        assert self._found.engine is not None
        return self._found.engine

    async def _layout(self, engine: Engine, image: Image, spec: ContainerSpec) -> tuple[str, ...]:
        """Which folders of an image hold nothing, found out by a container of it.

        Raises:
            StartFailed: with the engine's words.
        """
        container = Container(engine, self._own(), self._sandboxd, image, spec, "layout")
        try:
            pid = await container.connect()
            wanted = command_line.wanted_scratch(spec)
            return layer.scratch_in(Path(f"/proc/{pid}/root"), wanted, ENGINE_FILES)
        except (OSError, TimeoutError) as error:
            said = container.last_words() or str(error) or type(error).__name__
            assert self._images is not None
            self._images.forget(spec.image)  # it may have been removed
            raise StartFailed(f"image: {spec.image}: {said}", reason=said) from error
        finally:
            await finished(removed(container.remove()))

    def _config(self, container: Container) -> dict[str, object]:
        spec, image = container.spec, container.image
        env = DEFAULT_ENV | ({} if image.is_roots else {"HOME": spec.workdir}) | image.env | spec.env
        limits = {"processes": spec.pids + DAEMON_TASKS, "dataBytes": spec.memory_mb << 20}
        assert self._found is not None
        assert self._found.engine is not None
        return {
            "scratch": container.scratch(),
            "ownNetwork": not spec.network,
            "workdir": spec.workdir,
            "env": env,
            "limits": {} if self._found.engine.limits else limits,
        }

    def _prepare(self, owner: OwnerDir) -> None:
        etc = owner.path / "etc"
        etc.mkdir(exist_ok=True)
        (etc / "hosts").write_text("127.0.0.1 localhost sandbox\n::1 localhost\n")
        (etc / "hostname").write_text("sandbox\n")
        (etc / "resolv.conf").write_text("")
        assert self._found is not None
        assert self._found.engine is not None
        record = {"command": self._found.engine.command, "owner": owner.name}
        (owner.path / RECORD).write_text(json.dumps(record))


def remove_left(folder: Path) -> bool:
    """Remove the containers of a dead owner. False if the engine does not say that none is left.

    Args:
        folder: the owner's, whose lock the caller holds.
    """
    try:
        record = json.loads((folder / RECORD).read_text())
        engine, owner = Engine(tuple(record["command"])), record["owner"]
    except FileNotFoundError:
        return True  # it never had one
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if not os.access(engine.command[0], os.X_OK):
        return True  # the engine was uninstalled
    label = f"label={command_line.OWNER_LABEL}={owner}"
    try:
        deadline = time.monotonic() + SETTLE_S
        while True:
            listed = engines.call(
                engine.command, "ps", "--all", "--quiet", "--filter", label, deadline=REMOVE_S
            )
            if not listed:
                return True
            if time.monotonic() > deadline:
                return False
            _discard(engine, listed.split())
            time.sleep(PAUSE_S)
    except engines.CallFailed as error:
        logger.warning("containers of %s: not removed: %s", owner, error)
        return False


def _discard(engine: Engine, names: Sequence[str]) -> None:
    """Remove containers that may be going by themselves.

    Killed first: to remove one, podman asks it to stop for ten seconds, and the first process of a
    namespace hears no signal that it has not asked for.
    """
    for command in (["kill", "--signal", "KILL"], ["rm", "--force", "--volumes"]):
        with contextlib.suppress(engines.CallFailed):
            engines.call(engine.command, *command, *names, deadline=REMOVE_S)
