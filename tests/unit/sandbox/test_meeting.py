"""Meeting daemons, one over an event loop or many in a thread, against raw answers."""

import asyncio
import json
import os
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agentfly.errors import AgentflyError
from agentfly.sandbox import Holding, Owner, SandboxError, SandboxUnreachable, meet, meet_all
from tests.unit.kube.object_server import until

HEALTH = {
    "state": "leased",
    "incarnation": 3,
    "leases": 1,
    "owner": "o",
    "expiresInSeconds": 9.0,
    "idleSeconds": 0.5,
    "version": "1",
    "boot": "b7",
    "member": "box-1",
    "ownerKey": "ours",
}
FREE = HEALTH | {"state": "free", "owner": None, "expiresInSeconds": None}
HOLDING = {"state": "leased", "incarnation": 3, "note": "n" * 8192, "expiresInSeconds": 9.0}


def answer(body: object, status: int = 200) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status} Word\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


class Daemon:
    """Says one thing to each request, and then hangs up, or ``waits``."""

    def __init__(self, *says: bytes, waits: bool = False) -> None:
        self.says, self.waits, self.heard = says, waits, list[bytes]()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for said in self.says:
                self.heard.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(said)
            await reader.read() if self.waits else await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the other side hung up
        finally:
            writer.close()


class Hasty(Daemon):
    """Hangs up as soon as it has said its last word."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for said in self.says:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(said)
        writer.close()


def owner() -> Owner:
    return Owner("box-1", "ours", lambda boot: f"token-of-{boot}")


def unasked() -> Owner:
    def token(boot: str) -> str:
        raise AssertionError("a token was made")

    return Owner("box-1", "ours", token)


async def one(address: str, whose: Owner):
    return await meet(address, whose)


async def many(address: str, whose: Owner):
    [met] = await asyncio.to_thread(meet_all, [(address, whose)], threading.Event())
    if isinstance(met, AgentflyError):
        raise met
    return met


both = pytest.mark.parametrize("way", [one, many])


@asynccontextmanager
async def serving(serve, host: str) -> AsyncIterator[int]:
    """The port; ends when all have hung up."""
    connections = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.current_task())
        await serve(reader, writer)
        await asyncio.wait({asyncio.ensure_future(writer.wait_closed())})

    server = await asyncio.start_server(connected, host, 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.sleep(0.01)
        while left := {each for each in connections if not each.done()}:
            await asyncio.wait(left)  # type: ignore[type-var]


async def met(way, daemon: Daemon, whose: Owner | None = None):
    async with serving(daemon.serve, "127.0.0.1") as port:
        return await way(f"http://127.0.0.1:{port}", whose or owner())


# 2. and 3. Whose it is, and what needs the token.


@both
async def test_who_holds_a_sandbox_is_asked_with_the_token_over_the_same_connection(way) -> None:
    daemon = Daemon(answer(HEALTH), answer(HOLDING))
    health, held = await met(way, daemon)
    assert (health.boot, health.state) == ("b7", "leased")
    assert held == Holding("leased", 3, "n" * 8192, 9.0)
    first, second = daemon.heard
    assert first.startswith(b"GET /healthz HTTP/1.1\r\n")
    assert b"Authorization" not in first
    assert second.startswith(b"GET /lease HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer token-of-b7\r\n" in second


@both
@pytest.mark.parametrize("state", ["free", "dirty"])
async def test_what_nobody_holds_is_met_without_a_token(way, state: str) -> None:
    daemon = Daemon(answer(FREE | {"state": state}))
    health, held = await met(way, daemon, unasked())
    assert (health.state, held) == (state, Holding(state, 3, "", 0.0))
    assert len(daemon.heard) == 1


@both
async def test_daemon_that_does_not_say_whose_it_is_shows_it_by_taking_the_token(way) -> None:
    untold = {name: value for name, value in FREE.items() if name not in ("member", "ownerKey")}
    nothing = {"state": "free", "incarnation": 3, "note": "", "expiresInSeconds": None}
    daemon = Daemon(answer(untold), answer(nothing))
    _, held = await met(way, daemon)
    assert held == Holding("free", 3, "", 0.0)
    assert b"\r\nAuthorization: Bearer token-of-b7\r\n" in daemon.heard[1]


@both
@pytest.mark.parametrize("state", ["free", "leased"])
@pytest.mark.parametrize("says", [{"member": "box-2"}, {"ownerKey": "theirs"}, {"member": ""}])
async def test_daemon_of_another_member_or_owner_is_refused_and_sees_no_token(way, says, state) -> None:
    daemon = Daemon(answer(HEALTH | says | {"state": state}), answer(HOLDING))
    with pytest.raises(SandboxError, match="not box-1 of this owner") as caught:
        await met(way, daemon, unasked())
    assert caught.value.code == "Unauthorized"
    assert len(daemon.heard) == 1


# 1. What is raised.


@both
async def test_who_does_not_know_the_owner_is_told_apart_from_who_does_not_answer(way) -> None:
    refusal = {"error": {"code": "Unauthorized", "message": "token: not the owner's"}}
    with pytest.raises(SandboxError, match="not the owner's") as caught:
        await met(way, Daemon(answer(HEALTH), answer(refusal, 401)))
    assert caught.value.code == "Unauthorized"


@both
@pytest.mark.parametrize(
    "says",
    [
        (b"",),
        (answer(HEALTH), b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\nhalf",),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n",),
        (b"HTTP/1.1 2x OK\r\nContent-Length: 0\r\n\r\n",),
        (b"SSH-2.0-OpenSSH\r\n\r\n",),
        (b"x" * (1 << 18),),
        (answer(b"no json"),),
        (answer([1]),),
        (answer({"state": "free"}),),
    ],
    ids=[
        *("cut", "cut later", "half", "chunks", "endless", "no number", "stranger", "endless head"),
        *("no json", "a list", "no fields"),
    ],
)
async def test_what_is_no_answer_of_a_daemon_is_unreachable(way, says: tuple[bytes, ...]) -> None:
    with pytest.raises(SandboxUnreachable, match=r"http://127\.0\.0\.1"):
        await met(way, Hasty(*says))


@both
async def test_where_nobody_listens_is_unreachable(way) -> None:
    with pytest.raises(SandboxUnreachable, match=r"GET /healthz failed: \[Errno 111\]"):
        await way("http://127.0.0.1:9", owner())


@both
async def test_silence_ends_at_the_deadline(way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentfly.sandbox.meeting.SHORT_S", 0.05)
    with pytest.raises(SandboxUnreachable, match=r"GET /lease had no answer in 0\.05 s"):
        await met(way, Daemon(answer(HEALTH), b"", waits=True))


@both
async def test_answer_that_comes_byte_by_byte_is_read_to_its_end(way) -> None:
    class Slow(Daemon):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            for byte in answer(FREE):
                writer.write(bytes([byte]))
                await asyncio.sleep(0)
            await reader.read()
            writer.close()

    _, held = await met(way, Slow())
    assert held.state == "free"


# 5. Many.


class Counted(socket.socket):
    """Of the sockets that are open at a time, the most."""

    open, most = 0, 0

    def __init__(self, address: str) -> None:
        super().__init__(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        Counted.open += 1
        Counted.most = max(Counted.most, Counted.open)

    def close(self) -> None:
        Counted.open -= 1
        super().close()


async def saying(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """At 127.9.x.7 the daemon of a member of that name, at .8 somebody else's, at .9 one that is silent."""
    host = writer.get_extra_info("sockname")[0]
    await reader.readuntil(b"\r\n\r\n")
    if not host.endswith(".9"):
        writer.write(answer(FREE | {"member": host, "ownerKey": "ours" if host.endswith(".7") else "theirs"}))
    await reader.read()
    writer.close()


async def said_by(hosts: list[str]) -> list[object]:
    async with serving(saying, "0.0.0.0") as port:
        whom = ((f"http://{host}:{port}", Owner(host, "ours", lambda boot: "")) for host in hosts)
        return await asyncio.to_thread(meet_all, whom, threading.Event())


async def test_many_are_met_few_at_a_time_and_told_in_their_order(monkeypatch) -> None:
    monkeypatch.setattr("agentfly.sandbox.meeting.AT_ONCE", 3)
    monkeypatch.setattr("agentfly.sandbox.meeting._socket", Counted)
    hosts = [f"127.9.{number}.{8 if number % 10 == 3 else 7}" for number in range(30)]
    found = await said_by(hosts)
    assert [type(each) for each in found] == [
        SandboxError if host.endswith(".8") else tuple for host in hosts
    ]
    assert [each[0].member for each in found if isinstance(each, tuple)] == [
        host for host in hosts if host.endswith(".7")
    ]
    assert (Counted.open, Counted.most) == (0, 3)


async def test_the_silent_have_their_own_time_and_hold_up_nobody(monkeypatch) -> None:
    monkeypatch.setattr("agentfly.sandbox.meeting.AT_ONCE", 2)
    monkeypatch.setattr("agentfly.sandbox.meeting.SHORT_S", 2.0)
    found = await said_by(["127.9.0.9", *(f"127.9.{number}.7" for number in range(20))])
    assert [type(each) for each in found] == [SandboxUnreachable] + [tuple] * 20


async def test_who_is_told_to_stop_returns_and_leaves_no_connection() -> None:
    daemon, stopped, before = Daemon(b"", waits=True), threading.Event(), len(os.listdir("/proc/self/fd"))
    async with serving(daemon.serve, "127.0.0.1") as port:
        address = f"http://127.0.0.1:{port}"
        thread = asyncio.create_task(asyncio.to_thread(meet_all, [(address, owner())] * 500, stopped))
        await until(lambda: daemon.heard)
        assert not thread.done()
        stopped.set()
        assert await asyncio.wait_for(thread, 4) == []
    await asyncio.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # the loop's own
