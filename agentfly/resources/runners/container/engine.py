"""Which container command line works on this machine, found by starting a container with it.

Guarantees:
1. The first of ``CANDIDATES`` that ran a container with the spec's kind of limits is taken; of the others the
   reason is kept. ``AGENTFLY_CONTAINER_CLI`` or the caller names another, which is then the only one.
2. Flags that this machine makes necessary are found by trying, never by names or versions.
3. Every call has a deadline; a command that does not keep it is killed.
"""

import asyncio
import contextlib
import hashlib
import io
import json
import platform
import resource
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentfly.resources.runners.bubblewrap.root import DAEMON
from agentfly.resources.runners.container.attached import reason
from agentfly.resources.runners.container.command import Engine, limits, seals
from agentfly.resources.spec import ContainerSpec

CANDIDATES = ("docker", "podman", "nerdctl")
VARIABLE = "AGENTFLY_CONTAINER_CLI"
PROBE_IMAGE = "localhost/agentfly-probe:1"
"""An image with nothing in it; the engine keeps it."""
ANSWER_S = 10.0
"""``version`` asks the engine, which answers in milliseconds or is not there."""
PROBE_S = 60.0
"""A first container may have to wait for an engine that is only starting."""


@dataclass(frozen=True, slots=True)
class Found:
    """The engine, None if none works; ``refused`` says of every other why it does not: (command, reason)."""

    engine: Engine | None
    refused: tuple[tuple[str, str], ...]


class CallFailed(Exception):
    """A command ended with an error, or not in time. Its text is the reason."""


class NoAnswer(CallFailed):
    """It did not end in time; trying again would take as long."""


def find(sandboxd: Path, commands: Sequence[Sequence[str]]) -> Found:
    """Try these in turn.

    Args:
        sandboxd: what the container runs.
        commands: from ``candidates``.
    """
    refused: list[tuple[str, str]] = []
    for command in commands:
        try:
            return Found(_probe(tuple(command), sandboxd), tuple(refused))
        except CallFailed as error:
            refused.append((shlex.join(command), str(error)))
    return Found(None, tuple(refused))


def candidates(environ: Mapping[str, str]) -> list[list[str]]:
    """The commands to try."""
    if named := environ.get(VARIABLE):
        return [shlex.split(named)]
    return [[name] for name in CANDIDATES]


def _probe(command: tuple[str, ...], sandboxd: Path) -> Engine:
    """The engine with the first set of flags that works.

    Raises:
        CallFailed: none does; the reason is that of the first, or that one did not end.
    """
    path = shutil.which(command[0])
    if path is None:
        raise CallFailed("not found on PATH")
    engine = Engine((path, *command[1:]))
    call(engine.command, "version", deadline=ANSWER_S)
    try:
        call(engine.command, "image", "inspect", PROBE_IMAGE, deadline=ANSWER_S)
    except CallFailed:
        call(engine.command, "load", deadline=PROBE_S, stdin=docker_archive(PROBE_IMAGE, empty_layer(), {}))
    first: CallFailed | None = None
    for attempt in _variants(engine):
        try:
            _run(attempt, sandboxd)
        except NoAnswer:
            raise
        except CallFailed as error:
            first = first or error
            continue
        with contextlib.suppress(CallFailed):
            _run(attempt, sandboxd, "--storage-opt", "size=64m")
            return attempt
        return replace(attempt, disk=False)
    assert first is not None
    raise first


def _variants(engine: Engine) -> Iterator[Engine]:
    """From what is wanted to what may still do."""
    bounds = [word for name, value in _own_limits() for word in ("--ulimit", f"{name}={value}:{value}")]
    for bounded in (True, False):
        for flags in ([], bounds, [*bounds, "--runtime", "runc"], [*bounds, "--runtime", "crun"]):
            yield replace(engine, flags=tuple(flags), limits=bounded)


def _own_limits() -> Iterator[tuple[str, int]]:
    """Engines raise these two for a container, which takes a privilege that even root may lack."""
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    yield "nofile", resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    yield "nproc", most if processes == resource.RLIM_INFINITY else min(processes, most)


def _run(engine: Engine, sandboxd: Path, *more: str) -> None:
    bounds = limits(ContainerSpec(runtime="container-cli")) if engine.limits else []
    call(
        engine.command,
        *(
            "run",
            "--rm",
            "--pull",
            "never",
            "--log-driver",
            "none",
            "--network",
            "none",
            "--entrypoint",
            DAEMON,
        ),
        *("--mount", f"type=bind,source={sandboxd},target={DAEMON},readonly"),
        *seals(root=True),
        *bounds,
        *engine.flags,
        *more,
        PROBE_IMAGE,
        "--version",
        deadline=PROBE_S,
    )


def call(command: Sequence[str], *arguments: str, deadline: float, stdin: bytes = b"") -> str:
    """Run a command and return what it printed.

    Raises:
        CallFailed: its last line is the reason.
    """
    try:
        ended = subprocess.run(
            [*command, *arguments], input=stdin, capture_output=True, timeout=deadline, check=False
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"no answer in {deadline:g} s") from None
    except OSError as error:
        raise CallFailed(str(error)) from error
    return _result(ended.returncode, ended.stdout, ended.stderr)


async def call_async(
    command: Sequence[str],
    *arguments: str,
    deadline: float,
    stdin: int | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """``call`` for an event loop; a cancelled caller leaves no process.

    Args:
        stdin: a descriptor for its standard input; the caller closes it.
        env: its environment; None is ours.

    Raises:
        CallFailed: its last line is the reason.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL if stdin is None else stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
    except OSError as error:
        raise CallFailed(str(error)) from error
    try:
        async with asyncio.timeout(deadline):
            out, err = await process.communicate()
    except TimeoutError:
        raise NoAnswer(f"no answer in {deadline:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await asyncio.shield(process.wait())
    return _result(process.returncode or 0, out, err)


def _result(code: int, out: bytes, err: bytes) -> str:
    if code != 0:
        said = reason(err.decode(errors="replace")) or reason(out.decode(errors="replace"))
        raise CallFailed(said or f"exit code {code}")
    return out.decode(errors="replace").strip()


def empty_layer() -> bytes:
    """A layer with one empty folder: some engines refuse one with nothing at all."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        folder = tarfile.TarInfo("tmp")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
        archive.addfile(folder)
    return buffer.getvalue()


def docker_archive(name: str, layer: bytes, settings: Mapping[str, object]) -> bytes:
    """An image of one layer, in the form that ``docker save`` writes and every engine loads.

    Args:
        layer: a tar.
        settings: the ``config`` of the image: ``User``, ``Env`` and so on.
    """
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    config = {
        "architecture": machine,
        "os": "linux",
        "config": dict(settings),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for member, content in (
            ("layer.tar", layer),
            ("config.json", json.dumps(config).encode()),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            info = tarfile.TarInfo(member)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
