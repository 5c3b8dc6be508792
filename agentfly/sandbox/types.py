"""The values that travel between a caller and the daemon of its sandbox.

Guarantees:
1. Every value is immutable and made of plain types.
2. ``ExecResult.text`` never hides that output was dropped, nor that the command ran out of time or memory.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

State = Literal["free", "leased", "dirty"]
Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a daemon listens: ``unix:///path/to/socket`` or ``http://host:port``."""

    address: str

    @property
    def socket_path(self) -> str | None:
        """The path of the unix socket, or None for TCP."""
        return self.address.removeprefix("unix://") if self.address.startswith("unix://") else None

    @property
    def base_url(self) -> str:
        """What a request path is appended to; over a unix socket the host name is a formality."""
        return "http://sandbox" if self.socket_path is not None else self.address.rstrip("/")


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How one command ended.

    Attributes:
        exit_code: 127 = not found, 126 = could not be started, 128 + signal when a signal ended it.
        signal: the signal's number, or None.
        oom: the kernel killed a process of this sandbox for memory while the command ran.
        wall_s: seconds from start to end.
        cpu_s: seconds of processor time of the command and of the children it waited for.
    """

    exit_code: int
    signal: int | None
    stdout: str
    stderr: str
    stdout_truncated: bool
    stderr_truncated: bool
    timed_out: bool
    oom: bool
    wall_s: float
    cpu_s: float

    @property
    def text(self) -> str:
        """Standard output, then standard error, with a mark where either was cut.

        The last line of a command that ran out of time or memory is ``[killed: timed out]`` or
        ``[killed: out of memory]``.
        """
        parts = (
            _marked(self.stdout, "stdout", self.stdout_truncated),
            _marked(self.stderr, "stderr", self.stderr_truncated),
            self._killed,
        )
        return "\n".join(part.rstrip("\n") for part in parts if part)

    @property
    def _killed(self) -> str:
        if self.timed_out:
            return "[killed: timed out]"
        # ``oom`` alone may be a child that the command outlived; 137 is what a shell makes of such a child
        # when it ends with it.
        if self.oom and (self.signal is not None or self.exit_code == 128 + signal.SIGKILL):
            return "[killed: out of memory]"
        return ""

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        """Read the daemon's answer to ``/exec``."""
        return cls(
            exit_code=body["exitCode"],
            signal=body["signal"],
            stdout=body["stdout"],
            stderr=body["stderr"],
            stdout_truncated=body["stdoutTruncated"],
            stderr_truncated=body["stderrTruncated"],
            timed_out=body["timedOut"],
            oom=body["oom"],
            wall_s=body["wallSeconds"],
            cpu_s=body["cpuSeconds"],
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the output of a command that is running; the pieces of one stream make up its text."""

    stream: Stream
    text: str


@dataclass(frozen=True, slots=True)
class Health:
    """The daemon's account of itself. Times in seconds; ``expires_in_s`` is None without a lease."""

    state: State
    incarnation: int
    leases: int
    owner: str | None
    expires_in_s: float | None
    idle_s: float
    version: str
    reset_method: str | None = None
    """How it resets, as it found out at its start; None from a daemon that does not say."""
    reset_refused: Mapping[str, str] = field(default_factory=dict)
    """Methods of reset that do not work there, and why; never one that needs a declaration."""
    boot: str = ""
    """Drawn by the daemon at its start: another one is another daemon. "" from one that does not say."""
    member: str = ""
    """What its owner calls the sandbox; "" likewise."""
    owner_key: str = ""
    """The public half of its owner's key, in base64. "" from one that does not say, or was given a token."""

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        """Read the daemon's answer to ``/healthz``."""
        return cls(
            state=body["state"],
            incarnation=body["incarnation"],
            leases=body["leases"],
            owner=body["owner"],
            expires_in_s=body["expiresInSeconds"],
            idle_s=body["idleSeconds"],
            version=body["version"],
            reset_method=body.get("reset", {}).get("method"),
            reset_refused=body.get("reset", {}).get("refused") or {},
            boot=body.get("boot", ""),
            member=body.get("member", ""),
            owner_key=body.get("ownerKey", ""),
        )


@dataclass(frozen=True, slots=True)
class Holding:
    """What the daemon keeps of its lease, for its owner alone. ``note`` is what the lease was given with.

    ``expires_in_s`` is how long it stays leased without a heartbeat, 0 where nobody holds it.
    """

    state: State
    incarnation: int
    note: str
    expires_in_s: float

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        """Read the daemon's answer to ``GET /lease``."""
        return cls(
            state=body["state"],
            incarnation=body["incarnation"],
            note=body.get("note") or "",
            expires_in_s=body.get("expiresInSeconds") or 0.0,
        )


@dataclass(frozen=True, slots=True)
class ResetReport:
    """Whether the sandbox is verified clean; if not, the first thing that differs.

    Attributes:
        method: ``overlay``, ``paths``, ``git``, ``command``, ``scratch`` or ``recreate``; None if the daemon
            does not say.
        wall_s: seconds that the daemon took.
        incarnation: of the clean sandbox; None if the daemon does not say.
    """

    clean: bool
    reason: str | None = None
    method: str | None = None
    wall_s: float | None = None
    incarnation: int | None = None


def printable(text: str) -> str:
    """A message with names that a tenant chose, fit for a log and a terminal: one line, nothing that acts."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _marked(text: str, stream: str, truncated: bool) -> str:
    if not truncated:
        return text
    gap = "\n" if text and not text.endswith("\n") else ""
    return f"{text}{gap}[{stream}: the rest was dropped]"
