"""Layer II: rollouts, their strategies, their tokens, and what they leave behind."""

from agentfly.context import Deadlines
from agentfly.rollout.chain import Chain
from agentfly.rollout.errors import (
    DriftExceeded,
    FailureBudgetExceeded,
    InvalidSample,
    TemplateNotAppendOnly,
    TemplateRefused,
)
from agentfly.rollout.jsonl import TrajectoryFileError, TrajectoryWriter, read_trajectories
from agentfly.rollout.ledger import TokenLedger
from agentfly.rollout.many import Sink, rollout
from agentfly.rollout.one import rollout_one
from agentfly.rollout.outcomes import Failed, Masked, Outcome, Scored
from agentfly.rollout.play import Ended, Play, Strategy
from agentfly.rollout.report import RewardStats, RolloutReport
from agentfly.rollout.template import Tokenizer
from agentfly.rollout.trajectory import (
    SCHEMA,
    Drift,
    ResourceUse,
    Row,
    ToolCallRecord,
    Trajectory,
    WeightSpan,
)

__all__ = [
    "SCHEMA",
    "Chain",
    "Deadlines",
    "Drift",
    "DriftExceeded",
    "Ended",
    "Failed",
    "FailureBudgetExceeded",
    "InvalidSample",
    "Masked",
    "Outcome",
    "Play",
    "ResourceUse",
    "RewardStats",
    "RolloutReport",
    "Row",
    "Scored",
    "Sink",
    "Strategy",
    "TemplateNotAppendOnly",
    "TemplateRefused",
    "TokenLedger",
    "Tokenizer",
    "ToolCallRecord",
    "Trajectory",
    "TrajectoryFileError",
    "TrajectoryWriter",
    "WeightSpan",
    "read_trajectories",
    "rollout",
    "rollout_one",
]
