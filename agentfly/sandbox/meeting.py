"""Meeting daemons that are left alone afterwards: who each is and what it holds.

Guarantees:
1. One connection each, nothing left open. What is raised is what the client of every daemon raises.
2. A daemon that says it is another member's, or knows another key, is refused: nobody gets to use it.
3. The owner's token is made and sent only where an answer needs it: somebody holds the sandbox, and its note
   is for the owner alone; or the daemon does not say whose it is, and taking the token is what shows it. A
   daemon that said so falsely is found out by its first lease, which it cannot take without the token.
4. An answer is read as far as it says it is long, and no further than ``ANSWER_MAX``.
5. ``meet_all`` asks ``AT_ONCE`` at a time, gives each its own time, and ends soon after it is told to.

A broker that starts meets every sandbox of its namespace: with thousands of them, signatures, second requests
and what an event loop or an HTTP library does for each connection would be most of its start.
"""

import asyncio
import itertools
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from agentfly.errors import AgentflyError
from agentfly.sandbox.connection import SHORT_S, refused, unreachable
from agentfly.sandbox.errors import SandboxError, SandboxUnreachable
from agentfly.sandbox.types import Endpoint, Health, Holding

ANSWER_MAX = 1 << 17
AT_ONCE = 128
_PIECE = 1 << 16
_LOOK_S = 0.2  # between two looks at the clock where nobody answers
_END = b"\r\n\r\n"
T = TypeVar("T")

Met = tuple[Health, Holding]
Conversation = Generator[bytes, bytes, T]
"""What is to be sent next, if anything, for what came. An ``OSError`` of the connection is thrown in."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a daemon should be.

    Attributes:
        member: what the owner calls the sandbox.
        key: the public half of the owner's key, in base64.
        token: what opens the sandbox, by the ``boot`` of its daemon.
    """

    member: str
    key: str
    token: Callable[[str], str]


async def meet(address: str, owner: Owner) -> Met:
    """A daemon's account of itself, and what it keeps of its lease.

    Args:
        address: ``http://host:port``.

    Raises:
        SandboxUnreachable, SandboxError (``Unauthorized``: it is not the owner's).
    """
    loop, talk = asyncio.get_running_loop(), _conversation(Endpoint(address), owner)
    says = next(talk)
    try:
        async with asyncio.timeout(SHORT_S):
            with _socket(address) as connection:
                await loop.sock_connect(connection, _place(address))
                while True:
                    await loop.sock_sendall(connection, says)
                    says = talk.send(await loop.sock_recv(connection, _PIECE))
    except StopIteration as over:
        met: Met = over.value
        return met
    except OSError as error:  # a deadline is one, too
        talk.throw(error)
        raise


def meet_all(whom: Iterable[tuple[str, Owner]], stopped: threading.Event) -> list[Met | AgentflyError]:
    """Meet the daemons at these addresses in the calling thread: what came of each, in their order.

    Once ``stopped`` is set it returns, with what came until then.
    """
    left, outcomes = enumerate(whom), dict[int, Met | AgentflyError]()
    talks: dict[_Talk, int] = {}  # those that go on
    with selectors.DefaultSelector() as selector:
        while not stopped.is_set():
            for number, (address, owner) in itertools.islice(left, AT_ONCE - len(talks)):
                talks[_Talk(selector, address, owner)] = number
            if not talks:
                break
            for key, _ in selector.select(_LOOK_S):
                key.data.go_on()
            late = time.monotonic() - SHORT_S
            for talk, number in list(talks.items()):
                if talk.outcome is None and talk.began < late:
                    talk.fail(TimeoutError())
                if talk.outcome is not None:
                    outcomes[number] = talk.outcome
                    del talks[talk]
        for talk in talks:
            talk.fail(ConnectionAbortedError("nobody waits for it any more"))
    return [outcomes[number] for number in sorted(outcomes)]


class _Talk:
    """A conversation with its connection. ``outcome`` is what came of it, once it is over."""

    def __init__(self, selector: selectors.BaseSelector, address: str, owner: Owner) -> None:
        self.outcome: Met | AgentflyError | None = None
        self.began = time.monotonic()
        self._selector = selector
        self._conversation = _conversation(Endpoint(address), owner)
        self._says = next(self._conversation)
        self._connection = _socket(address)
        self._connection.connect_ex(_place(address))  # whether that fails is told by what is sent first
        self._selector.register(self._connection, selectors.EVENT_WRITE, self)

    def go_on(self) -> None:
        """The connection takes what is to be sent, or has something."""
        try:
            if self._says:
                self._connection.send(self._says)  # all of it: nothing else is on its way
                self._says, waits_for = b"", selectors.EVENT_READ
            else:
                self._says = self._conversation.send(self._connection.recv(_PIECE))
                waits_for = selectors.EVENT_WRITE if self._says else selectors.EVENT_READ
            self._selector.modify(self._connection, waits_for, self)
        except BlockingIOError:
            pass
        except StopIteration as over:
            self._end(over.value)
        except AgentflyError as error:
            self._end(error)
        except OSError as error:
            self.fail(error)

    def fail(self, error: OSError) -> None:
        """There is no answer any more."""
        try:
            self._conversation.throw(error)
        except AgentflyError as failure:
            self._end(failure)

    def _end(self, outcome: Met | AgentflyError) -> None:
        self.outcome = outcome
        self._selector.unregister(self._connection)
        self._connection.close()


def _socket(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in _place(address)[0] else socket.AF_INET
    return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)


def _place(address: str) -> tuple[str, int]:
    parts = urlsplit(address)
    return parts.hostname or "", parts.port or 80


def _conversation(endpoint: Endpoint, owner: Owner) -> Conversation[Met]:
    health = yield from _asked(endpoint, "/healthz", "", Health.parse)
    if health.owner_key and (health.owner_key, health.member) != (owner.key, owner.member):
        why = f"sandbox: the daemon is not {owner.member} of this owner (Unauthorized)"
        raise SandboxError(why, code="Unauthorized", address=endpoint.address)
    if health.owner_key and health.state != "leased":
        return health, Holding(health.state, health.incarnation, note="", expires_in_s=0.0)
    return health, (yield from _asked(endpoint, "/lease", owner.token(health.boot), Holding.parse))


def _asked(
    endpoint: Endpoint, path: str, token: str, parse: Callable[[dict[str, Any]], T]
) -> Conversation[T]:
    """One request, and the answer to it."""
    stranger = SandboxUnreachable(f"sandbox {endpoint.address}: GET {path} was not answered by a daemon")
    allowed = f"Authorization: Bearer {token}\r\n" if token else ""
    request = f"GET {path} HTTP/1.1\r\nHost: {urlsplit(endpoint.base_url).netloc}\r\n{allowed}\r\n"
    try:
        received = yield from _more(request.encode())
        while (end := received.find(_END)) < 0:
            if len(received) > ANSWER_MAX:
                raise stranger
            received += yield from _more()
        first, *lines = received[:end].decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        status, length = first.partition(" ")[2].partition(" ")[0], headers.get("content-length", "")
        if not (status.isdigit() and length.isdigit() and int(length) <= ANSWER_MAX):
            raise stranger
        begins = end + len(_END)
        while len(received) < begins + int(length):
            received += yield from _more()
    except OSError as error:
        raise unreachable(endpoint, f"GET {path}", SHORT_S, error) from error
    content = received[begins : begins + int(length)]
    if status != "200":
        raise refused(endpoint, int(status), content)
    try:
        return parse(json.loads(content))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise stranger from error


def _more(says: bytes = b"") -> Conversation[bytes]:
    received = yield says
    if not received:
        raise ConnectionError("the connection was closed")
    return received
