"""The one thing a rollout needs from a model, whoever serves it.

Guarantees:
1. Ids go in and ids come out: no text in between, so what is trained on is what was sampled.
2. Every sampled id has its log-probability under the distribution it was drawn from (temperature and top-p
   applied) and the version of the weights that made it.
3. What the model did is a ``Sampled``; that it could not be asked is ``ModelUnavailable``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from agentfly.errors import AgentflyError


class ModelUnavailable(AgentflyError):
    """The model could not be asked: unreachable, overloaded, restarted, or silent past the deadline."""


class ContextOverflow(AgentflyError):
    """The prompt and the tokens asked for do not fit into what the server was started with."""


@dataclass(frozen=True)
class Sampling:
    """How to draw tokens; ``max_tokens`` counts sampled ones only."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class Sampled:
    """One answer. ``ids`` and ``logprobs`` have the same length; a stop token is part of it."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length", "abort"]
    weight_version: str | None  # of the newest weights that made one of the ids; None: the server has no name
    prompt_tokens: int | None = None  # as the server counted, images at full length; None: it did not


class TokenModel(Protocol):
    """Draws the continuation of a prompt."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        deadline: float,
        images: Sequence[str] = (),
    ) -> Sampled:
        """Draw one continuation within ``deadline`` seconds.

        ``images`` are data URLs; the prompt has one placeholder for each, in order.

        Raises:
            ModelUnavailable: the model could not be asked, or did not answer in time.
            ContextOverflow: the request does not fit.
        """
        ...
