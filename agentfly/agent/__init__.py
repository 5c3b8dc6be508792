"""Layer I: agents, tools, rewards, prompts, parsers."""

from agentfly.agent.agent import Agent, Message
from agentfly.agent.errors import (
    AgentDefinitionError,
    RewardDefinitionError,
    RewardInvalid,
    TaskInvalid,
    ToolDefinitionError,
    ToolResultInvalid,
)
from agentfly.agent.parser import HermesParser, Parsed, Parser, ToolCall
from agentfly.agent.reward import Reward, reward
from agentfly.agent.tool import Tool, ToolResult, tool

__all__ = [
    "Agent",
    "AgentDefinitionError",
    "HermesParser",
    "Message",
    "Parsed",
    "Parser",
    "Reward",
    "RewardDefinitionError",
    "RewardInvalid",
    "TaskInvalid",
    "Tool",
    "ToolCall",
    "ToolDefinitionError",
    "ToolResult",
    "ToolResultInvalid",
    "reward",
    "tool",
]
