"""What can go wrong with a resource, one type for each thing a caller does differently.

Guarantees:
1. Every error of layer IV is a ``ResourceError``.
2. What code needs to act is a field (``retry_after``, ``incarnation``, ``reason``), never a part of the text.

Not here: a command that ends with a non-zero exit code. That is a result.
"""

from collections.abc import Sequence

from agentfly.errors import AgentflyError


class ResourceError(AgentflyError):
    """Something about a pool, a lease or a member is wrong."""


class Timeout(ResourceError):
    """No member was free before the deadline; the pool itself works."""


class Saturated(ResourceError):
    """The pool has as many waiters as it admits. ``retry_after`` is an estimate in seconds."""

    def __init__(self, message: str, *, retry_after: float, hints: Sequence[str] = ()) -> None:
        super().__init__(message, hints=hints)
        self.retry_after = retry_after


class LeaseLost(ResourceError):
    """The lease is over without its holder's doing; what was in the member is gone.

    ``incarnation`` is that of the member it was a lease of, 0 where it had none yet.
    """

    def __init__(self, message: str, *, incarnation: int = 0, hints: Sequence[str] = ()) -> None:
        super().__init__(message, hints=hints)
        self.incarnation = incarnation


class StartFailed(ResourceError):
    """A member could not be started. ``reason`` is what the runner said, without the object's name."""

    def __init__(self, message: str, *, reason: str = "", hints: Sequence[str] = ()) -> None:
        super().__init__(message, hints=hints)
        self.reason = reason or message


class Infra(ResourceError):
    """A member or a service between could not be reached or did not answer as it must."""


class SpecMismatch(ResourceError):
    """The same owner asked for another spec under a key that it already uses."""


class PoolNotFound(ResourceError):
    """No pool has this name."""


class CallRaised(ResourceError):
    """The object of an in-process member raised ``type_name``: its answer, not a failure of ours."""

    def __init__(self, message: str, *, type_name: str, hints: Sequence[str] = ()) -> None:
        super().__init__(message, hints=hints)
        self.type_name = type_name
