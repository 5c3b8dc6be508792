"""What can go wrong between a caller and the daemon of its sandbox.

Guarantees:
1. A type exists only where a caller acts differently: retry elsewhere, give up the lease, mend the request.
2. A command that fails is none of these: its exit code is a result.
"""

from agentfly.errors import AgentflyError


class SandboxError(AgentflyError):
    """The daemon refused the request; the same request will be refused again.

    A tool's user is told, and that is the policy: the message does not name the sandbox's place on the host.

    Attributes:
        code: the daemon's word for it, for example ``BadRequest``, ``NotFound``, ``Busy``, ``TooLarge``.
        address: where the daemon listens.
    """

    def __init__(self, message: str, *, code: str, address: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.address = address


class SandboxUnreachable(AgentflyError):
    """No answer: the sandbox is dead, or did not answer in time. Nothing is known about the command."""


class SandboxLeaseLost(AgentflyError):
    """The token holds no lease (any more): the sandbox was reset, or the heartbeat came too late."""
