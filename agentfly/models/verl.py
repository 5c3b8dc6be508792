"""verl's client of its own servers as a ``TokenModel``: vLLM inside the trainer's processes.

Guarantees:
1. All turns of one attempt of a rollout go to one server, which has their prefix in its cache; verl's
   balancer chooses it.
2. A call ends within its deadline. verl has no way to take a request back: what was cut goes on in its
   server until it has ``max_tokens``.
3. A server that died, refuses or gives something that is no answer raises ModelUnavailable; a prompt that
   fills the context raises ContextOverflow.
4. The version of the weights is the step that verl gave them with, as text.

verl does not say whether an answer stopped or was cut. Here one of ``max_tokens`` tokens was cut unless the
last of them is one to stop at.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from agentfly.models.base import ContextOverflow, ModelUnavailable, Sampled, Sampling
from agentfly.models.images import pil_images

NAME = "verl's servers"
_OVERFLOW_MARK = "leaves no room to generate"


class ServerClient(Protocol):
    """What is needed of ``verl.workers.rollout.llm_server.LLMServerClient``."""

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        **media: Any,
    ) -> Any:
        """A ``TokenOutput``; ``media`` may have ``image_data``, as images of PIL."""
        ...


class VerlModel:
    """All servers of the trainer, behind verl's balancer."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        deadline: float,
        images: Sequence[str] = (),
    ) -> Sampled:
        """See ``TokenModel.generate``; the id is as `StickyModels` has it."""
        rollout, attempt, *_ = request_id.rsplit(".", 4)
        seen = {"image_data": await asyncio.to_thread(pil_images, images)} if images else {}
        try:
            async with asyncio.timeout(deadline):
                answer = await self._client.generate(
                    f"{rollout}.{attempt}",
                    prompt_ids=list(prompt_ids),
                    sampling_params=sampling_params(sampling),
                    **seen,
                )
        except TimeoutError:
            what = f"no answer within {deadline:.1f} s to a prompt of {len(prompt_ids)} tokens"
            raise ModelUnavailable(f"model {NAME}: {what}") from None
        except Exception as error:  # Ray's errors are made of whatever was raised in the server
            raise _refusal(error, len(prompt_ids)) from error
        return read_answer(answer, sampling)


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """What verl hands to vLLM, which it completes itself; ``logprobs`` is of the sampled token."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": True,
        "detokenize": False,
    }
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    return params


def read_answer(answer: Any, sampling: Sampling) -> Sampled:
    """A ``TokenOutput`` in our words.

    Raises:
        ModelUnavailable: it is no complete answer.
    """
    ids, logprobs = list(answer.token_ids), list(answer.log_probs or [])
    if len(ids) != len(logprobs):
        raise ModelUnavailable(
            f"model {NAME}: an answer with {len(ids)} tokens and {len(logprobs)} log-probabilities"
        )
    step = answer.extra_fields.get("global_steps")
    version = None if step is None else str(step)
    if answer.stop_reason != "completed":
        return Sampled(ids, logprobs, "abort", version)
    cut = len(ids) >= sampling.max_tokens and ids[-1] not in sampling.stop_token_ids
    return Sampled(ids, logprobs, "length" if cut else "stop", version)


def _refusal(error: Exception, prompt_tokens: int) -> Exception:
    text = (str(error).strip() or type(error).__name__).splitlines()[-1]  # Ray puts the cause last
    if _OVERFLOW_MARK in str(error):
        return ContextOverflow(
            f"model {NAME}: a prompt of {prompt_tokens} tokens does not fit: {text[:300]}",
            hints=["set rollout.maxContextTokens to what the model can take"],
        )
    return ModelUnavailable(f"model {NAME}: {text[:500]}")
