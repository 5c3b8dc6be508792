"""A vLLM server as a ``TokenModel``, over ``POST /inference/v1/generate``.

The server needs ``--enable-scale-out`` and, for log-probabilities that training can use with a temperature
other than 1, ``--logprobs-mode processed_logprobs``.

Guarantees:
1. One connection pool for each model, kept alive between calls; calls are not limited on this side.
2. A call ends within its deadline, whatever the server does.
3. Cancelling a call closes its connection, and the server aborts the request.
4. A server that refuses, resets, answers 5xx or sends something that is no answer raises ModelUnavailable;
   a prompt that is too long raises ContextOverflow; another 4xx is a mistake of the caller: ValueError.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Literal

import aiohttp

from agentfly.models.base import ContextOverflow, ModelUnavailable, Sampled, Sampling
from agentfly.models.connection import Connection, may_answer_later

_CONNECT_TIMEOUT_S = 5.0
_JSON = {"Content-Type": "application/json"}
_OVERFLOW_MARKS = ("maximum context length", "max_model_len", "maximum model length", "longer than")


class VLLMModel(Connection):
    """One server. Use as an async context manager, or call ``close``."""

    def __init__(self, base_url: str) -> None:
        super().__init__(base_url, connect_timeout_s=_CONNECT_TIMEOUT_S)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        deadline: float,
        images: Sequence[str] = (),
    ) -> Sampled:
        """See ``TokenModel.generate``."""
        body = request_body(prompt_ids, sampling, request_id, images)
        # Megabytes of images take long enough to be written down for others to miss their deadlines.
        text = await asyncio.to_thread(json.dumps, body) if images else json.dumps(body)
        try:
            async with (
                asyncio.timeout(deadline),
                self._open().post(
                    f"{self.base_url}/inference/v1/generate", data=text, headers=_JSON
                ) as response,
            ):
                if response.status != 200:
                    raise refusal(self.base_url, response.status, await response.text(), len(prompt_ids))
                return parse_answer(await self._json(response))
        except TimeoutError:
            what = f"no answer within {deadline:.1f} s to a prompt of {len(prompt_ids)} tokens"
            raise ModelUnavailable(f"model {self.base_url}: {what}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ModelUnavailable(f"model {self.base_url}: {error or type(error).__name__}") from error

    async def _json(self, response: aiohttp.ClientResponse) -> Any:
        try:
            return await response.json()
        except ValueError as error:  # of the body's text: a proxy, or an answer that was cut off
            raise ModelUnavailable(f"model {self.base_url}: an answer that is no JSON: {error}") from error


def request_body(
    prompt_ids: Sequence[int], sampling: Sampling, request_id: str, images: Sequence[str] = ()
) -> dict[str, Any]:
    """The JSON of one request."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": 0,  # of the sampled token only
        "detokenize": False,
    }
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    body: dict[str, Any] = {
        "request_id": request_id,
        "token_ids": list(prompt_ids),
        "sampling_params": params,
        "stream": False,
    }
    if images:
        body["content_parts"] = [{"type": "image_url", "url": url} for url in images]
    return body


def parse_answer(answer: Any) -> Sampled:
    """Read the JSON of one answer.

    Raises:
        ModelUnavailable: it is no complete answer.
    """
    try:
        choice = answer["choices"][0]
        ids = [int(token) for token in choice["token_ids"]]
        logprobs = [float(entry["logprob"]) for entry in (choice["logprobs"] or {"content": []})["content"]]
        versions = [entry["version"] for entry in choice.get("weight_versions") or []]
        counted = (answer.get("usage") or {}).get("prompt_tokens")
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ModelUnavailable(f"model: an answer without {error}: {str(answer)[:200]}") from error
    if len(ids) != len(logprobs):
        raise ModelUnavailable(
            f"model: an answer with {len(ids)} tokens and {len(logprobs)} log-probabilities"
        )
    finish = _finish(choice.get("finish_reason"))
    return Sampled(ids, logprobs, finish, versions[-1] if versions else None, counted)


def refusal(base_url: str, status: int, text: str, prompt_tokens: int) -> Exception:
    """The exception for an answer that is not 200."""
    detail = f"model {base_url}: HTTP {status}: {text.strip()[:500]}"
    if may_answer_later(status):
        return ModelUnavailable(detail)
    if any(mark in text for mark in _OVERFLOW_MARKS):
        return ContextOverflow(
            f"model {base_url}: a prompt of {prompt_tokens} tokens does not fit: {text.strip()[:300]}",
            hints=["set rollout.maxContextTokens to what the model can take"],
        )
    return ValueError(detail)


def _finish(reason: str | None) -> Literal["stop", "length", "abort"]:
    if reason == "stop":
        return "stop"
    return "length" if reason == "length" else "abort"
