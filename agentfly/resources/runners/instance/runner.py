"""Python objects as members: games, simulators, anything with methods.

Guarantees (beside those of every runner, see ``base``):
1. ``isolated`` instances have a process each, which dies with the process that started it, and with it every
   process that it started.
2. Without it, all instances live in this process: what they keep in modules, they share, and no reset sees.
3. Sockets are open to this user alone. Where there is a door, holders on other machines come in by it, and
   can do nothing there but to call.

Not here: the rules of calls and resets (``host``), HTTP (``server``).
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import sys
from collections.abc import Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentfly.errors import AgentflyError
from agentfly.resources.errors import Infra, LeaseLost, ResourceError, StartFailed
from agentfly.resources.instance import InstanceClient
from agentfly.resources.runners.base import Member, Vitals
from agentfly.resources.runners.door import Door
from agentfly.resources.runners.guard import end_guard, find_bubblewrap, start_guarded, without
from agentfly.resources.runners.instance.calls import calls_through
from agentfly.resources.runners.instance.host import Host
from agentfly.resources.runners.instance.server import serving
from agentfly.resources.spec import InProcessSpec, ResourceSpec

logger = logging.getLogger(__name__)

SERVER = "agentfly.resources.runners.instance.server"
CALL_S = 10.0


@dataclass(eq=False)
class _Instance:
    """What the runner keeps of one member: the end of it, its client, its process if it has one."""

    life: AsyncExitStack
    client: InstanceClient
    process: asyncio.subprocess.Process | None = None
    stopped: bool = False

    async def ask(self, method: str, path: str, body: Any = None, *, within: float = CALL_S) -> Any:
        """One request to its server; none once it is stopped."""
        if self.stopped:
            raise Infra("instance: was stopped")
        return await self.client.request(method, path, body, within=within)


class InProcessRunner:
    """Keeps instances.

    Args:
        run_dir: a private folder with a short path, for their sockets.
        hidden: variables that isolated instances do not inherit: the keys of others.
        door: where holders come in; None: at the sockets.
        contained: this process is the first of a container, and isolated instances die with that.
    """

    name = "in-process"

    def __init__(
        self,
        run_dir: Path,
        hidden: Collection[str] = (),
        door: Door | None = None,
        *,
        contained: bool = False,
    ) -> None:
        self._run_dir = run_dir
        self._hidden = hidden
        self._door = door
        self._contained = contained

    def check(self) -> str | None:
        """See ``Runner.check``. Isolated instances need bubblewrap, to die with their owner."""
        try:
            if not self._contained:
                find_bubblewrap()
        except AgentflyError as error:
            return error.render()
        return None

    def close(self) -> None:
        """Remove the folder of the sockets. Stop every member first."""
        with contextlib.suppress(FileNotFoundError):
            self._run_dir.rmdir()

    async def start(self, spec: ResourceSpec, member_id: str) -> Member:
        """See ``Runner.start``."""
        assert isinstance(spec, InProcessSpec)
        self._run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        socket = self._run_dir / secrets.token_hex(6)
        token = secrets.token_urlsafe(32)
        async with AsyncExitStack() as life:
            process = None
            life.callback(socket.unlink, missing_ok=True)
            if spec.isolated:
                environment = without(os.environ, self._hidden)
                process = await _launch(life, spec, socket, token, environment, self._contained)
            else:
                host = Host(spec)
                life.push_async_callback(host.close)
                await host.start()
                await life.enter_async_context(serving(host, socket, token))
            client = InstanceClient(f"unix://{socket}", token)
            life.push_async_callback(client.close)
            address = f"unix://{socket}"
            if self._door is not None:
                address = await life.enter_async_context(calls_through(self._door, member_id, socket))
            handle = _Instance(life.pop_all(), client, process)
        return Member(member_id, spec, 1, address, admin_token=token, handle=handle)

    async def probe(self, member: Member) -> Vitals:
        """See ``Runner.probe``. Of an isolated instance the memory is that of its process."""
        instance = _instance(member)
        if instance.process is not None and instance.process.returncode is not None:
            return Vitals(alive=False)
        try:
            answer = await instance.ask("GET", "/healthz")
        except ResourceError as error:
            return Vitals(alive=isinstance(error.__cause__, TimeoutError))
        return Vitals(alive=answer["broken"] is None, memory_mb=_memory(instance.process))

    async def lease(
        self, member: Member, owner: str, attempt: int, token: str, ttl_s: float, note: str = ""
    ) -> None:
        """See ``Runner.lease``. An instance may have several holders; their calls take turns."""
        body = {"owner": owner, "attempt": attempt, "token": token, "ttl_s": ttl_s}
        try:
            await _instance(member).ask("POST", "/lease", body)
        except LeaseLost as error:
            raise LeaseLost(f"member {member.id}: {error.message}", incarnation=member.incarnation) from error
        except ResourceError as error:
            raise Infra(f"member {member.id}: {error.message}") from error

    async def reset(self, member: Member) -> Member | None:
        """See ``Runner.reset``."""
        assert isinstance(member.spec, InProcessSpec)
        within = member.spec.call_timeout_s + member.spec.start_timeout_s + CALL_S  # the turn of a last call
        try:
            report = await _instance(member).ask("POST", "/reset", within=within)
        except ResourceError as error:
            report = {"clean": False, "reason": error.message}
        if not report["clean"]:
            logger.warning("member %s: %s", member.id, report["reason"])
            return None
        return replace(member, incarnation=member.incarnation + 1)

    async def stop(self, member: Member) -> None:
        """See ``Runner.stop``."""
        instance = _instance(member)
        instance.stopped = True
        await instance.life.aclose()


async def _launch(
    life: AsyncExitStack,
    spec: InProcessSpec,
    socket: Path,
    token: str,
    environment: dict[str, str],
    contained: bool,
) -> asyncio.subprocess.Process:
    log = socket.with_suffix(".log")
    life.callback(log.unlink, missing_ok=True)
    reading, writing = os.pipe()
    try:
        with log.open("wb") as output:
            process = await start_guarded(
                [sys.executable, "-m", SERVER, str(writing)],
                contained=contained,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(writing,),
                env=environment,
            )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    life.push_async_callback(end_guard, process)
    config = {"spec": spec.model_dump(mode="json"), "socket": str(socket), "admin_token": token}
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(config).encode() + b"\n")
        async with asyncio.timeout(spec.start_timeout_s + CALL_S):
            told = await _line(reading)
    except TimeoutError:
        raise StartFailed(f"entrypoint: {spec.entrypoint}: its process did not start") from None
    finally:
        os.close(reading)
    if told is None:
        last = log.read_text(errors="replace").strip().rpartition("\n")[2][-300:]
        raise StartFailed(f"entrypoint: {spec.entrypoint}: its process ended before it was ready: {last}")
    if "failed" in told:
        raise StartFailed(told["failed"], hints=told["hints"])
    return process


async def _line(descriptor: int) -> dict[str, Any] | None:
    """The one line of JSON that a process writes when it is ready or has failed; None if it writes none."""
    os.set_blocking(descriptor, False)
    loop, data = asyncio.get_running_loop(), b""
    while not data.endswith(b"\n"):
        ready = asyncio.Event()
        loop.add_reader(descriptor, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(descriptor)
        if not (more := os.read(descriptor, 1 << 16)):
            return None
        data += more
    return dict(json.loads(data))


def _memory(process: asyncio.subprocess.Process | None) -> float | None:
    """MiB that the processes of an isolated instance hold in memory."""
    if process is None:
        return None
    total = 0
    waiting = [process.pid]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError, ValueError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            waiting += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return total * os.sysconf("SC_PAGE_SIZE") / 2**20


def _instance(member: Member) -> _Instance:
    assert isinstance(member.handle, _Instance), "a member of another runner"
    return member.handle
