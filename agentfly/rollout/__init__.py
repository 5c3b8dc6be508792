"""Layer II: rollouts, their strategies, their tokens, and what they leave behind."""

from agentfly.context import Deadlines
from agentfly.rollout.chain import Chain
from agentfly.rollout.errors import (
    DriftExceeded,
    FailureBudgetExceeded,
    InvalidSample,
    TemplateRefused,
)
from agentfly.rollout.jsonl import TrajectoryFileError, TrajectoryWriter, read_trajectories
from agentfly.rollout.ledger import TokenLedger
from agentfly.rollout.many import Sink, TrajectoryList, rollout
from agentfly.rollout.one import rollout_one
from agentfly.rollout.outcomes import Failed, Masked, Outcome, Scored
from agentfly.rollout.play import Ended, Play, Strategy
from agentfly.rollout.prompts import Summarised, with_notes
from agentfly.rollout.report import RewardStats, RolloutReport
from agentfly.rollout.step import PromptBuilder, Step, StepTurn, StepView, window
from agentfly.rollout.template import Tokenizer
from agentfly.rollout.trajectory import (
    SCHEMA,
    Drift,
    ResourceUse,
    Row,
    RowStep,
    ToolCallRecord,
    Trajectory,
    WeightSpan,
)
from agentfly.rollout.vision import ProcessorReader

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
    "ProcessorReader",
    "PromptBuilder",
    "ResourceUse",
    "RewardStats",
    "RolloutReport",
    "Row",
    "RowStep",
    "Scored",
    "Sink",
    "Step",
    "StepTurn",
    "StepView",
    "Strategy",
    "Summarised",
    "TemplateRefused",
    "TokenLedger",
    "Tokenizer",
    "ToolCallRecord",
    "Trajectory",
    "TrajectoryFileError",
    "TrajectoryList",
    "TrajectoryWriter",
    "WeightSpan",
    "read_trajectories",
    "rollout",
    "rollout_one",
    "window",
    "with_notes",
]
