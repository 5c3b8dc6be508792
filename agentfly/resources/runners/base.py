"""The contract between the engine and whatever really starts members.

Guarantees that a runner gives (``tests/unit/resources/runner_contract.py`` holds every runner to them):
1. ``start`` returns a member that answers, or raises and leaves nothing behind; also when it is cancelled.
2. ``reset`` returns a member that was verified to be pristine, or None, or raises: then it is never used
   again.
3. ``stop`` ends the member and everything in it. It may be called twice, on a dead member, and at any time.
4. ``lease`` is the grant and every heartbeat after it. A container whose lease is not renewed ends it by
   itself. A model service does not: its lease ends at the engine, and later requests are still served.
5. Every method ends in bounded time.
6. Members of a runner that is a ``Finder`` outlive it: ``find`` gives a later one all that it can still use,
   each with the note of its last ``lease``. So do starts that are cut short after ``leave``.

Guarantees that the engine gives: for one member, ``reset`` and ``stop`` begin only after ``lease`` and
``probe`` ended, and ``stop`` only after ``start`` and ``reset`` ended (it cancels them first).
"""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from agentfly.resources.errors import ResourceError
from agentfly.resources.spec import ResourceSpec


@dataclass
class Member:
    """One started resource.

    ``incarnation`` grows with every reset; ``address`` is ``unix:///path`` or ``http://ip:port``;
    ``admin_token`` opens what holders may not do; ``handle`` belongs to the runner alone. ``keep_unclean``:
    if its reset finds that it is not pristine, leave it as it is for a look, and raise ``Unclean``.
    ``reset_method`` is how a reset will go, "" where nobody chose; ``reset_reason`` why not in a better way.
    """

    id: str
    spec: ResourceSpec
    incarnation: int
    address: str
    admin_token: str = ""
    handle: object = None
    keep_unclean: bool = False
    reset_method: str = ""
    reset_reason: str = ""


class Unclean(ResourceError):
    """A reset found what must not be there, and the member was left as it is."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """What a probe found. ``alive`` is False only if the member is gone or can no longer be used.

    ``memory_mb`` is what the member holds now, in MiB; None where nobody counts it.
    """

    alive: bool
    memory_mb: float | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A member that an earlier process started and that lives.

    ``free`` says that it was verified and that nobody had it since; ``dirty`` is whatever is neither that nor
    leased; ``unknown`` one that starts, or is silent for now: somebody may hold it, and ``resume`` waits for
    it. ``note`` is that of the last lease, "" if nobody knows it. ``ttl_left_s`` is how many seconds a leased
    one stays so without a heartbeat.
    """

    pool: str
    member: Member
    state: Literal["free", "leased", "dirty", "unknown"]
    note: str = ""
    ttl_left_s: float = 0.0


class Runner(Protocol):
    """Starts, checks, resets and stops members of the specs whose ``runner`` is its ``name``."""

    name: str

    def check(self) -> str | None:
        """None if this runner works on this machine, else the reason why not."""
        ...

    async def start(self, spec: ResourceSpec, member_id: str) -> Member:
        """A member that answers, at incarnation 1 or above.

        Raises:
            StartFailed: with the reason; nothing of the attempt is left.
        """
        ...

    async def probe(self, member: Member) -> Vitals:
        """How the member is; a slow one is still alive."""
        ...

    async def lease(
        self, member: Member, owner: str, attempt: int, token: str, ttl_s: float, note: str = ""
    ) -> None:
        """Lease the member to the owner for ``ttl_s`` seconds, or renew that lease.

        Args:
            note: what ``find`` shall tell of the lease; the same at each renewal. A runner whose members do
                not outlive it has no use for it.

        Raises:
            LeaseLost: the member answered that it has no such lease to give or to renew.
            Infra: the member said nothing about the lease; whether it still lives is not known.
        """
        ...

    async def reset(self, member: Member) -> Member | None:
        """The member, pristine, verified and without a lease; None if it could not be made so.

        Raises:
            Unclean: it is not pristine, and was to be kept then.
        """
        ...

    async def stop(self, member: Member) -> None:
        """End the member. Does not raise for one that is dead already."""
        ...


@runtime_checkable
class Finder(Protocol):
    """A runner whose members outlive the process that started them."""

    async def find(self) -> list[Found]:
        """The members that earlier processes started and that can be used, as they are now.

        Raises:
            Infra: it cannot be known which there are.
        """
        ...

    async def resume(self, found: Found, patience_s: float) -> Found:
        """Wait until a member that was unknown says how it is.

        Args:
            patience_s: how long one that has started may be silent.

        Raises:
            StartFailed: it is of no use, with the reason. It is still to be stopped.
        """
        ...

    def leave(self) -> None:
        """From now on what is cut short is left as it is, for whoever finds it."""
        ...
