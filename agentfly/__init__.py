"""Agentic reinforcement learning from a manifest: sandboxes for tools, vLLM for the policy, verl for updates.

The names below are imported on first use, so that a part of the package costs only what it needs itself. To
run rollouts from Python, import ``rollout`` or ``rollout_one`` from ``agentfly.rollout``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentfly.agent import Agent, ToolResult, reward, tool
    from agentfly.context import Context, Deadlines
    from agentfly.errors import AgentflyError
    from agentfly.models import ChatModel
    from agentfly.resources.spec import ContainerSpec, ModelServiceSpec
    from agentfly.rollout import Chain, Step, Trajectory, TrajectoryList, read_trajectories
    from agentfly.sandbox import ExecResult

__all__ = [
    "Agent",
    "AgentflyError",
    "Chain",
    "ChatModel",
    "ContainerSpec",
    "Context",
    "Deadlines",
    "ExecResult",
    "ModelServiceSpec",
    "Step",
    "ToolResult",
    "Trajectory",
    "TrajectoryList",
    "read_trajectories",
    "reward",
    "tool",
]

_HOMES = {
    "agentfly.agent": ("Agent", "ToolResult", "reward", "tool"),
    "agentfly.context": ("Context", "Deadlines"),
    "agentfly.errors": ("AgentflyError",),
    "agentfly.models": ("ChatModel",),
    "agentfly.resources.spec": ("ContainerSpec", "ModelServiceSpec"),
    "agentfly.rollout": ("Chain", "Step", "Trajectory", "TrajectoryList", "read_trajectories"),
    "agentfly.sandbox": ("ExecResult",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
