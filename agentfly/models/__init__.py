"""Where tokens come from: ids in, ids out, with log-probabilities and the version of the weights."""

from agentfly.models.base import ContextOverflow, ModelUnavailable, Sampled, Sampling, TokenModel
from agentfly.models.vllm import VLLMModel

__all__ = ["ContextOverflow", "ModelUnavailable", "Sampled", "Sampling", "TokenModel", "VLLMModel"]
