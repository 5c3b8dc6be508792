"""What can be wrong with an agent's definition, or with a task for it."""

from agentfly.errors import AgentflyError


class ToolDefinitionError(AgentflyError):
    """A function cannot be a tool as it is written."""


class RewardDefinitionError(AgentflyError):
    """A function cannot be a reward, or a setup, as it is written."""


class AgentDefinitionError(AgentflyError):
    """The parts of an agent do not fit together."""


class ToolResultInvalid(AgentflyError):
    """A tool returned a ``ToolResult`` with something wrong in it."""


class TaskInvalid(AgentflyError):
    """A task's row lacks a field that the agent needs, or its prompt is not a list of messages."""


class RewardInvalid(AgentflyError):
    """A reward function returned something that is not a reward."""
