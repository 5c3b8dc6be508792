"""What every vLLM server is started with and asked, wherever it runs.

Guarantees:
1. A server samples from the distribution that the trainer recomputes: after the temperature, under no rule of
   the model's own.
2. Every request has a deadline.

Not here: starting and ending one (``model_service``, ``kubernetes.model``).
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from agentfly.resources.spec import ModelServiceSpec

SWITCHES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
"""Of every server's environment: it has the endpoints that change weights, and tells nobody that it runs."""
CPU_SWITCHES = {"TORCHDYNAMO_DISABLE": "1"}
"""Requests with log-probabilities compile C++ on first use; without a compiler the engine dies of it."""
CLEAR_S = 30.0
"""An abort takes effect after the step that runs: seconds for a large prompt."""
_POLL_S = 0.2
_REQUEST_S = 10.0
_FIRST_REQUEST_S = 60.0  # the first forward pass of a large model on a CPU
_MIN_KV_CACHE = 64 << 20
_MAX_KV_CACHE = 4 << 30


class Refused(Exception):
    """A server answered ``path`` with ``status``."""

    def __init__(self, path: str, status: int) -> None:
        super().__init__(f"{path} answered {status}")
        self.status = status


def serve_arguments(
    spec: ModelServiceSpec, *, host: str, port: int, config: Mapping[str, Any] | None
) -> list[str]:
    """What follows the program's name; ``config`` is the model's config.json, if it is here."""
    words = ["serve", spec.model, "--served-model-name", spec.served_model_name]
    words += ["--host", host, "--port", str(port)]
    words += ["--max-model-len", str(spec.max_model_len), "--max-num-seqs", str(spec.max_num_seqs)]
    words += ["--dtype", spec.dtype, "--enable-scale-out", "--disable-uvicorn-access-log"]
    words += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    if spec.gpus:
        words += ["--tensor-parallel-size", str(spec.tensor_parallel)]
        words += ["--pipeline-parallel-size", str(spec.pipeline_parallel)]
    else:
        words.append("--enforce-eager")
        if config is not None:
            words += ["--kv-cache-memory-bytes", str(kv_cache_bytes(config, spec))]
    return [*words, *spec.args]


def kv_cache_bytes(config: Mapping[str, Any], spec: ModelServiceSpec) -> int:
    """Bytes of key-value cache for ``max_num_seqs`` sequences of full length, between 64 MiB and 4 GiB."""
    config = {**config, **(config.get("text_config") or {})}  # of a model that sees
    heads = int(config.get("num_attention_heads") or 1)
    head_size = int(config.get("head_dim") or int(config.get("hidden_size") or 0) // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    layers = int(config.get("num_hidden_layers") or 1)
    per_token = 2 * layers * kv_heads * head_size * 4  # keys and values, at most 4 bytes each
    return min(max(per_token * spec.max_model_len * spec.max_num_seqs, _MIN_KV_CACHE), _MAX_KV_CACHE)


async def healthy(address: str) -> bool:
    """Whether the server says that it works.

    Raises:
        aiohttp.ClientError, TimeoutError: it says nothing.
    """
    return (await _call("GET", f"{address}/health"))[0] == 200


async def first_request(address: str) -> None:
    """Have it compute a token.

    Raises:
        Refused, aiohttp.ClientError, TimeoutError.
    """
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 1, "logprobs": 0}, "stream": False}
    path = "inference/v1/generate"
    status, _ = await _call("POST", f"{address}/{path}", body, _FIRST_REQUEST_S)
    if status != 200:
        raise Refused(path, status)


async def clear(address: str) -> None:
    """Abort all requests and drop the prefixes, until nothing holds a part of the cache.

    Raises:
        Refused, aiohttp.ClientError, ValueError: it cannot. TimeoutError: not in ``CLEAR_S`` seconds.
    """
    async with asyncio.timeout(CLEAR_S):
        while not await _cleared(address):  # noqa: ASYNC110 -- the server tells nobody when it is idle
            await asyncio.sleep(_POLL_S)


async def _cleared(address: str) -> bool:
    for path in ("abort_requests", "reset_prefix_cache"):
        status, answer = await _call("POST", f"{address}/{path}", {})
        if status != 200:
            raise Refused(path, status)
    # While requests run, vLLM answers 200 and this field is false; versions without it answer with nothing.
    return bool(json.loads(answer or "{}").get("success", True))


async def _call(method: str, url: str, body: object = None, timeout: float = _REQUEST_S) -> tuple[int, bytes]:
    """The status and the body of the answer."""
    async with (
        asyncio.timeout(timeout),
        aiohttp.ClientSession() as session,
        session.request(method, url, json=body) as response,
    ):
        return response.status, await response.read()
