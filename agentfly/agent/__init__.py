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
from agentfly.agent.memory import Notes
from agentfly.agent.parsers import (
    BlockParser,
    HermesParser,
    Parsed,
    Parser,
    ReActParser,
    TextFormat,
    ToolCall,
    XMLParser,
)
from agentfly.agent.result import ToolResult
from agentfly.agent.reward import Reward, reward
from agentfly.agent.tool import Tool, tool

__all__ = [
    "Agent",
    "AgentDefinitionError",
    "BlockParser",
    "HermesParser",
    "Message",
    "Notes",
    "Parsed",
    "Parser",
    "ReActParser",
    "Reward",
    "RewardDefinitionError",
    "RewardInvalid",
    "TaskInvalid",
    "TextFormat",
    "Tool",
    "ToolCall",
    "ToolDefinitionError",
    "ToolResult",
    "ToolResultInvalid",
    "XMLParser",
    "reward",
    "tool",
]
