"""The three kinds of group agentfly.dev/v1alpha1: the one source of CRDs, command line, operator and docs.

`crd` makes CustomResourceDefinitions of the models, `load` reads manifests, `reasons` names what status says.
"""

from agentfly.api.base import API_VERSION, GROUP, VERSION, Condition, Metadata, decimal
from agentfly.api.common import (
    AgentRef,
    Inference,
    ModelBuild,
    ModelRef,
    PoolUse,
    Rollout,
    Strategy,
    TasksRef,
    Timeouts,
)
from agentfly.api.poolstatus import ResourcePoolStatus
from agentfly.api.resourcepool import ResourcePool, ResourcePoolSpec
from agentfly.api.rolloutjob import RolloutJob, RolloutJobSpec, RolloutJobStatus
from agentfly.api.trainingrun import TrainingRun, TrainingRunSpec, TrainingRunStatus

__all__ = [
    "API_VERSION",
    "GROUP",
    "VERSION",
    "AgentRef",
    "Condition",
    "Inference",
    "Metadata",
    "ModelBuild",
    "ModelRef",
    "PoolUse",
    "ResourcePool",
    "ResourcePoolSpec",
    "ResourcePoolStatus",
    "Rollout",
    "RolloutJob",
    "RolloutJobSpec",
    "RolloutJobStatus",
    "Strategy",
    "TasksRef",
    "Timeouts",
    "TrainingRun",
    "TrainingRunSpec",
    "TrainingRunStatus",
    "decimal",
]
