"""What can go wrong in a rollout, and which of it is the infrastructure's fault.

Guarantees:
1. ``is_infrastructure`` is true for exactly the errors after which another attempt may go better.
2. ``is_loss`` is true for those of them that say that something held before is gone.
"""

from agentfly.errors import AgentflyError
from agentfly.models import ModelUnavailable
from agentfly.resources.errors import Infra, LeaseLost, ResourceError, Saturated, StartFailed, Timeout
from agentfly.sandbox.errors import SandboxLeaseLost, SandboxUnreachable

_LOSS = (LeaseLost, Infra, SandboxLeaseLost, SandboxUnreachable)
_INFRASTRUCTURE = (*_LOSS, StartFailed, Timeout, Saturated, ModelUnavailable)
_NOT_THE_POLICYS = (ResourceError, SandboxLeaseLost, SandboxUnreachable, ModelUnavailable)


class InvalidSample(AgentflyError):
    """The model's answer cannot be trained on: no tokens, or a log-probability that is no number."""


class TemplateRefused(AgentflyError):
    """The chat template raised on a conversation."""


class ImagesNotReadable(AgentflyError):
    """A prompt or a tool shows images to a policy that reads text alone."""


class ImageInvalid(AgentflyError):
    """What a prompt or a tool gave as an image is none."""


class ImageTokensDiffer(AgentflyError):
    """The server has another number of tokens for an image than the rows would have."""


class FailureBudgetExceeded(AgentflyError):
    """Too many rollouts failed; the message counts the reasons."""


class DriftExceeded(AgentflyError):
    """More of the tokens drifted than the job allows; the message has both shares."""


def is_infrastructure(error: BaseException) -> bool:
    """Whether the error says nothing about the policy, so that a fresh attempt is worth it."""
    return isinstance(error, _INFRASTRUCTURE)


def is_loss(error: BaseException) -> bool:
    """Whether the error says that a member that was held is gone."""
    return isinstance(error, _LOSS)


def is_for_the_policy(error: BaseException) -> bool:
    """Whether a tool's exception is an observation, and not a matter of resources or model."""
    return not isinstance(error, _NOT_THE_POLICYS)
