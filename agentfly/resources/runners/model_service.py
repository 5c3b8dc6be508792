"""vLLM servers as members: one ``vllm serve`` on this machine for each.

Guarantees (beside those of every runner, see ``base``):
1. A member was seen to answer a real request before it is handed out.
2. A start that fails says why in one line and gives the end of the server's log.
3. A server ends with the process that started it, whatever ends that.
4. A port that somebody took between choosing and using it costs another try, not a failed start.
5. Servers listen on the loopback only: the endpoints that change weights have no other protection.

``reset`` aborts what runs and drops cached prefixes, verified by the server; the weights stay as they are.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from agentfly.errors import AgentflyError
from agentfly.resources.errors import LeaseLost, StartFailed
from agentfly.resources.runners import vllm
from agentfly.resources.runners.base import Member, Vitals
from agentfly.resources.runners.guard import end_guard, find_bubblewrap, start_guarded, without
from agentfly.resources.runners.vllm import CPU_SWITCHES, SWITCHES, serve_arguments
from agentfly.resources.spec import ModelServiceSpec, ResourceSpec

logger = logging.getLogger(__name__)

_PORT_TRIES = 3
_POLL_S = 0.2
_LOG_TAIL_BYTES = 4000


@dataclass
class _Server:
    process: asyncio.subprocess.Process
    log: Path


class ModelServiceRunner:
    """Starts vLLM from the environment of ``python``; logs go to ``run_dir/logs/<member>.log``.

    ``hidden`` names variables that servers do not inherit: the keys of others.
    """

    name = "model-service"

    def __init__(
        self, python: Path, run_dir: Path, *, start_timeout_s: float = 300.0, hidden: Collection[str] = ()
    ) -> None:
        self._python = python
        self._hidden = hidden
        self._logs = run_dir / "logs"
        self._start_timeout_s = start_timeout_s

    def check(self) -> str | None:
        """See ``Runner.check``."""
        if not self._python.exists():
            return f"{self._python}: no Python interpreter; agentfly env inference builds it"
        try:
            find_bubblewrap()
        except AgentflyError as error:
            return error.render()
        return None

    async def start(self, spec: ResourceSpec, member_id: str) -> Member:
        """See ``Runner.start``. Takes half a minute on a CPU, minutes for a large model."""
        assert isinstance(spec, ModelServiceSpec)
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{member_id}.log"
        for attempt in range(1, _PORT_TRIES + 1):
            port = free_port()
            server = await self._launch(spec, port, log)
            try:
                async with asyncio.timeout(self._start_timeout_s):
                    await self._wait_ready(server, port)
                return Member(member_id, spec, 1, f"http://127.0.0.1:{port}", handle=server)
            except TimeoutError:
                await end_guard(server.process)
                raise _failed(member_id, f"not ready within {self._start_timeout_s:.0f} s", log) from None
            except vllm.Refused as refused:
                await end_guard(server.process)
                raise _failed(member_id, f"answered {refused.status} to its first request", log) from None
            except _ExitedError as ended:
                if "address already in use" not in _tail(log).lower() or attempt == _PORT_TRIES:
                    raise _failed(member_id, f"exited with {ended.code} before it was ready", log) from None
                logger.warning("%s: port %d was taken, trying another", member_id, port)
            except BaseException:
                await end_guard(server.process)
                raise
        raise AssertionError("unreachable")

    async def probe(self, member: Member) -> Vitals:
        """See ``Runner.probe``."""
        if _server(member).process.returncode is not None:
            return Vitals(alive=False)
        try:
            return Vitals(alive=await vllm.healthy(member.address))
        except aiohttp.ClientConnectionError:
            return Vitals(alive=False)
        except TimeoutError:
            return Vitals(alive=True)

    async def lease(
        self, member: Member, owner: str, attempt: int, token: str, ttl_s: float, note: str = ""
    ) -> None:
        """See ``Runner.lease``. Many hold a server at once; a lease is lost with the process, not by time."""
        if (code := _server(member).process.returncode) is not None:
            raise LeaseLost(
                f"{member.id}: the server exited with {code}: {_last_line(_server(member).log)}",
                incarnation=member.incarnation,
            )

    async def reset(self, member: Member) -> Member | None:
        """See ``Runner.reset``."""
        try:
            await vllm.clear(member.address)
        except (vllm.Refused, aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            logger.warning("%s: reset: %s", member.id, error or type(error).__name__)
            return None
        member.incarnation += 1
        return member

    async def stop(self, member: Member) -> None:
        """See ``Runner.stop``."""
        await end_guard(_server(member).process)

    async def _launch(self, spec: ModelServiceSpec, port: int, log: Path) -> _Server:
        command = serve_command(self._python, spec, port, model_config(spec.model))
        with log.open("ab") as output:
            process = await start_guarded(
                command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=serve_environment(spec, without(os.environ, self._hidden)),
            )
        return _Server(process, log)

    async def _wait_ready(self, server: _Server, port: int) -> None:
        url = f"http://127.0.0.1:{port}"
        while True:
            if server.process.returncode is not None:
                raise _ExitedError(server.process.returncode)
            with contextlib.suppress(aiohttp.ClientConnectionError, TimeoutError):
                if await vllm.healthy(url):
                    break
            await asyncio.sleep(_POLL_S)
        await vllm.first_request(url)


class _ExitedError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def serve_command(
    python: Path, spec: ModelServiceSpec, port: int, config: Mapping[str, Any] | None
) -> list[str]:
    """The command line of one server; ``config`` is the content of the model's config.json, if it is here."""
    arguments = serve_arguments(spec, host="127.0.0.1", port=port, config=config)
    return [str(python), "-m", "vllm.entrypoints.cli.main", *arguments]


def model_config(model: str) -> dict[str, Any] | None:
    """The config.json of a model directory; None for a model that is not a directory here."""
    path = Path(model) / "config.json"
    return dict(json.loads(path.read_text())) if path.is_file() else None


def serve_environment(spec: ModelServiceSpec, base: Mapping[str, str]) -> dict[str, str]:
    """``base`` without what would lead the server into another Python, plus vLLM's switches."""
    environment = {k: v for k, v in base.items() if not k.startswith("PYTHON") and k != "VIRTUAL_ENV"}
    environment |= SWITCHES
    environment["VLLM_RPC_BASE_PATH"] = "/dev/shm"  # the guard's own: a killed server leaves its sockets
    if not spec.gpus:
        environment |= CPU_SWITCHES
        environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override --kv-cache-memory-bytes
    if Path(spec.model).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    return environment


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _server(member: Member) -> _Server:
    assert isinstance(member.handle, _Server)
    return member.handle


def _failed(member_id: str, what: str, log: Path) -> StartFailed:
    reason = f"{what}: {_last_line(log)}"
    return StartFailed(
        f"{member_id}: {reason}", reason=reason, hints=[f"read {log}", f"it ends with:\n{_tail(log)}"]
    )


def _tail(log: Path) -> str:
    with log.open("rb") as handle:
        handle.seek(max(0, handle.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
        return handle.read().decode(errors="replace").strip()


def _last_line(log: Path) -> str:
    """The last line that names an error, else the last line."""
    lines = _tail(log).splitlines() or ["(no output)"]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1]).strip()[-300:]
