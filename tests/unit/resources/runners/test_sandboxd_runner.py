"""The life of a sandbox, with sandboxes that only pretend and a daemon that is a stand-in."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentfly.resources.errors import Infra, StartFailed
from agentfly.resources.runners.base import Unclean
from agentfly.resources.runners.sandboxd.cgroups import Group
from agentfly.resources.runners.sandboxd.owner_dir import OwnerDir
from agentfly.resources.runners.sandboxd.runner import Sandbox, SandboxdRunner, cause_in, declares
from agentfly.resources.spec import ContainerSpec, ModelServiceSpec, ResetSpec


class Pretended(Sandbox):
    def __init__(self, runner: "Pretending") -> None:
        self.address, self.runner = runner.address, runner
        self.config: dict[str, Any] = {}

    async def launch(self, config: bytes) -> None:
        self.runner.events.append("launch")
        self.config = json.loads(config)
        await self.runner.gate.wait()
        if self.runner.refusal is not None:
            raise self.runner.refusal

    async def dies_within(self, seconds: float) -> bool:
        return self.runner.dead

    def last_words(self) -> str:
        return self.runner.words

    def residue(self, declared: bool) -> str | None:
        return None if declared else self.runner.left

    async def remove(self) -> None:
        self.runner.events.append("remove")
        if self.runner.stuck:
            raise TimeoutError


class Pretending(SandboxdRunner):
    """A runner whose sandboxes share one daemon at ``address``."""

    name = "pretending"

    def __init__(self, folder: Path, address: str) -> None:
        super().__init__(folder / "r", Path("/bin/true"))
        self.address, self.events = address, list[str]()
        self.gate = asyncio.Event()
        self.gate.set()
        self.refusal: OSError | None = None
        self.words, self.dead, self.stuck = "", False, False
        self.left: str | None = None

    async def _plan(self, spec: ContainerSpec, member_id: str) -> Pretended:
        return Pretended(self)

    def _config(self, sandbox: Pretended) -> dict[str, object]:
        return {"workdir": "/w"}

    def _prepare(self, owner: OwnerDir) -> None:
        raise NotImplementedError


@pytest.fixture
async def runner(tmp_path: Path) -> AsyncIterator[Pretending]:
    async def health(_: web.Request) -> web.Response:
        body = {"state": "free", "incarnation": 1, "leases": 0, "owner": None, "expiresInSeconds": None}
        return web.json_response(body | {"idleSeconds": 0.0, "version": "0"})

    async def reset(_: web.Request) -> web.Response:
        return web.json_response({"clean": True})

    app = web.Application()
    app.router.add_get("/healthz", health)
    app.router.add_post("/reset", reset)
    server = web.AppRunner(app)
    await server.setup()
    await web.UnixSite(server, str(tmp_path / "s")).start()
    yield Pretending(tmp_path, f"unix://{tmp_path / 's'}")
    await server.cleanup()


def spec(**reset: Any) -> ContainerSpec:
    return ContainerSpec(reset=ResetSpec(**reset))


# 1. Start.


async def test_failed_start_gives_the_last_words_and_has_removed(runner: Pretending) -> None:
    runner.refusal, runner.words = OSError("pipe"), "no such image"
    with pytest.raises(StartFailed) as caught:
        await runner.start(spec(), "m-1")
    assert (str(caught.value), caught.value.reason) == ("member m-1: no such image", "no such image")
    assert runner.events == ["launch", "remove"]


async def test_cancelled_start_has_removed_before_it_ends(runner: Pretending) -> None:
    runner.gate.clear()
    start = asyncio.create_task(runner.start(spec(), "m-1"))
    while not runner.events:  # noqa: ASYNC110 -- a test
        await asyncio.sleep(0)
    start.cancel()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert runner.events == ["launch", "remove"]


async def test_other_kinds_are_refused(runner: Pretending) -> None:
    with pytest.raises(StartFailed, match="kind: model-service is not served by pretending"):
        await runner.start(ModelServiceSpec(model="m", max_model_len=1), "m-1")


async def test_daemon_is_told_its_token_and_how_to_reset(runner: Pretending) -> None:
    member = await runner.start(spec(paths=("/work",), timeout_s=7.0), "m-1")
    assert isinstance(member.handle, Pretended)
    assert member.handle.config == {
        "adminToken": member.admin_token,
        "incarnation": 1,
        "workdir": "/w",
        "reset": {"method": "auto", "paths": ["/work"], "git": "", "command": [], "timeoutSeconds": 7.0},
    }
    await runner.stop(member)


# 2. Reset.


@pytest.mark.parametrize(
    ("reset", "left", "same"),
    [
        ({}, None, True),
        ({}, "/etc/x was written", False),
        ({"method": "overlay"}, "/etc/x was written", False),
        ({"method": "recreate"}, None, False),
        ({"paths": ("/work",)}, "/work/x was written", True),  # the daemon has put it back
    ],
)
async def test_sandbox_is_kept_only_if_nothing_is_left(
    runner: Pretending, reset: dict[str, Any], left: str | None, same: bool
) -> None:
    member = await runner.start(spec(**reset), "m-1")
    runner.left = left
    again = await runner.reset(member)
    assert again is not None
    assert again.incarnation == 2
    assert (again.handle is member.handle) == same
    assert runner.events == ["launch"] if same else ["launch", "remove", "launch"]
    await runner.stop(again)


async def test_sandbox_is_left_as_it_is_for_a_look(runner: Pretending) -> None:
    member = await runner.start(spec(), "m-1")
    runner.left, member.keep_unclean = "/etc/x was written", True
    with pytest.raises(Unclean, match="member m-1: /etc/x was written"):
        await runner.reset(member)
    assert runner.events == ["launch"]
    await runner.stop(member)


async def test_reset_that_cannot_start_afresh_condemns(runner: Pretending) -> None:
    member = await runner.start(spec(method="recreate"), "m-1")
    runner.refusal = OSError("no")
    assert await runner.reset(member) is None
    assert runner.events == ["launch", "remove", "launch", "remove"]


async def test_dead_sandbox_says_why(runner: Pretending) -> None:
    member = await runner.start(spec(), "m-1")
    runner.dead, runner.words = True, "sandboxd: out of threads"
    await member.handle.admin.close()  # type: ignore[attr-defined]
    with pytest.raises(Infra, match="member m-1: the sandbox died: sandboxd: out of threads"):
        await runner.lease(member, "owner", 0, "token", 30)
    assert not (await runner.probe(member)).alive
    await runner.stop(member)


def test_cause_is_memory_where_the_kernel_counted_it(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("oom 1\noom_kill 1\n")
    assert cause_in(Group((tmp_path,)), "words", 64) == "oom, more than its 64 MiB were needed"
    assert cause_in(Group(()), "words", 64) == "words"


@pytest.mark.parametrize(
    ("reset", "declared"),
    [
        (ResetSpec(), False),
        (ResetSpec(method="overlay", paths=("/w",)), False),
        (ResetSpec(method="recreate", git="/w"), False),
        (ResetSpec(git="/w"), True),
        (ResetSpec(command=("x",)), True),
        (ResetSpec(method="paths"), True),
    ],
)
def test_what_is_declared_is_the_daemons(reset: ResetSpec, declared: bool) -> None:
    assert declares(reset) == declared


# 3. Removal.


async def test_removal_happens_once_and_a_failed_one_again(runner: Pretending) -> None:
    member = await runner.start(spec(), "m-1")
    runner.stuck = True
    with pytest.raises(Infra, match="member m-1: cannot be removed: TimeoutError"):
        await runner.stop(member)
    runner.stuck = False
    await asyncio.gather(runner.stop(member), runner.stop(member))
    await runner.stop(member)
    assert runner.events == ["launch", "remove", "remove"]
    assert await runner.reset(member) is None
