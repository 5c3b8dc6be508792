"""Where tokens come from: ids in, ids out, with log-probabilities and the version of the weights.

Beside them ``ChatModel``: an API of text, for judges and for agents that are played and not trained.
"""

from agentfly.models.base import ContextOverflow, ModelUnavailable, Sampled, Sampling, TokenModel
from agentfly.models.chat import ChatAnswer, ChatCall, ChatModel, ModelRefused
from agentfly.models.vllm import VLLMModel

__all__ = [
    "ChatAnswer",
    "ChatCall",
    "ChatModel",
    "ContextOverflow",
    "ModelRefused",
    "ModelUnavailable",
    "Sampled",
    "Sampling",
    "TokenModel",
    "VLLMModel",
]
