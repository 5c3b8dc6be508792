"""An OpenAI-compatible API: messages in, text and calls out, no token ids.

For judges, and for playing an agent without training. What it says cannot be trained on, since nobody knows
from which tokens it is.

Guarantees:
1. A call ends within its deadline, whatever the server does; cancelling it closes its connection.
2. A server that cannot be reached, answers 5xx, 408 or 429, or sends something that is no answer raises
   ModelUnavailable; what else it refuses is ModelRefused, with its own words and what to do about it. An API
   that does not know its path or model (404) will not know it later.
3. The key is sent to this server alone: no redirect is followed, and no error shows it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from agentfly.errors import AgentflyError
from agentfly.models.base import ModelUnavailable, Sampling
from agentfly.models.connection import Connection, may_answer_later

_CONNECT_TIMEOUT_S = 10.0
_QUOTED = 500  # characters of the server's refusal in ours


class ModelRefused(AgentflyError):
    """The server does not take the request as it is."""


@dataclass(frozen=True)
class ChatCall:
    """A call as the API gives it; ``arguments`` is the text that the model wrote, JSON or not."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ChatAnswer:
    """One answer. The counts of tokens are the server's own, 0 if it does not count."""

    text: str
    calls: tuple[ChatCall, ...] = ()
    finish_reason: Literal["stop", "length"] = "stop"
    prompt_tokens: int = 0
    sampled_tokens: int = 0


class ChatModel(Connection):
    """One model of one API. Use as an async context manager, or call ``close``.

    Args:
        base_url: of the API, with its ``/v1``: that of a lease of an ``ExternalAPI`` pool, or another one.
        model: its name there.
        api_key: the key; for a lease ``lease.info.token``.
    """

    def __init__(self, base_url: str, model: str, *, api_key: str | None = None) -> None:
        super().__init__(base_url, connect_timeout_s=_CONNECT_TIMEOUT_S)
        self.model = model
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key is not None else {}

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        sampling: Sampling | None = None,
        deadline: float = 60.0,
    ) -> ChatAnswer:
        """The answer to a conversation.

        Args:
            tools: as chat templates take them; the model may call them.
            sampling: how to draw; None: as the server does by default. Stop ids are not for an API of text.
            deadline: in seconds.

        Raises:
            ModelUnavailable: the model could not be asked, or did not answer in time.
            ModelRefused: the server does not take the request.
        """
        body, url = request_body(self.model, messages, tools, sampling), f"{self.base_url}/chat/completions"
        try:
            async with (
                asyncio.timeout(deadline),
                self._open().post(url, json=body, headers=self._headers, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    raise refusal(self.base_url, response.status, await response.text())
                return parse_answer(self.base_url, await response.json(content_type=None))
        except TimeoutError:
            raise ModelUnavailable(f"model {self.base_url}: no answer within {deadline:.1f} s") from None
        except ValueError as error:  # of the body's text: a proxy, or an answer that was cut off
            raise ModelUnavailable(f"model {self.base_url}: an answer that is no JSON: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ModelUnavailable(f"model {self.base_url}: {error or type(error).__name__}") from error


def request_body(
    model: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    sampling: Sampling | None,
) -> dict[str, Any]:
    """The JSON of one request."""
    body: dict[str, Any] = {"model": model, "messages": [dict(message) for message in messages]}
    if tools:
        body["tools"] = [dict(tool) for tool in tools]
    if sampling is not None:
        body |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        body["max_tokens"] = sampling.max_tokens
        if sampling.seed is not None:
            body["seed"] = sampling.seed
    return body


def parse_answer(base_url: str, answer: Any) -> ChatAnswer:
    """Read the JSON of one answer.

    Raises:
        ModelUnavailable: it is no complete answer.
    """
    try:
        choice = answer["choices"][0]
        message, usage = choice["message"], answer.get("usage") or {}
        calls = tuple(
            ChatCall(str(call["function"]["name"]), str(call["function"]["arguments"] or ""))
            for call in message.get("tool_calls") or ()
        )
        return ChatAnswer(
            text=str(message.get("content") or ""),
            calls=calls,
            finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            sampled_tokens=int(usage.get("completion_tokens") or 0),
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        what = f"an answer without {error}: {str(answer)[:200]}"
        raise ModelUnavailable(f"model {base_url}: {what}") from error


def refusal(base_url: str, status: int, text: str) -> AgentflyError:
    """The exception for an answer that is not 200."""
    detail = f"model {base_url}: HTTP {status}: {text.strip()[:_QUOTED]}"
    if status == 404:
        path = [] if base_url.endswith("/v1") else [f"end the address with /v1, as most do: {base_url}/v1"]
        return ModelRefused(detail, hints=[*path, "name a model that this API has"])
    if may_answer_later(status):
        return ModelUnavailable(detail)
    if status in (401, 403):
        return ModelRefused(detail, hints=["give the key that this API knows"])
    if "tool" in text and "auto" in text:
        return ModelRefused(
            detail,
            hints=[
                "start vLLM with --enable-auto-tool-choice --tool-call-parser NAME",
                'or give the agent parser="react", which needs nothing of the server',
            ],
        )
    return ModelRefused(detail)
