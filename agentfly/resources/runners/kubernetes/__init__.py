"""Members as pods of a Kubernetes cluster."""

from agentfly.resources.runners.kubernetes.identity import MEMBER_LABELS
from agentfly.resources.runners.kubernetes.lives import PodCluster
from agentfly.resources.runners.kubernetes.model import ModelServicePodRunner
from agentfly.resources.runners.kubernetes.runner import KubernetesRunner
from agentfly.resources.runners.kubernetes.signer import Signer

__all__ = ["KubernetesRunner", "MEMBER_LABELS", "ModelServicePodRunner", "PodCluster", "Signer"]
