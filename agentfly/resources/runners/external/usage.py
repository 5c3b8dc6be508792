"""What a request to a model costs in tokens, before and after; and keys that must not come back in an answer.

Guarantees:
1. Before: a JSON object has a token for every 4 bytes, anything else none. Its answer has as many as it
   allows (``max_tokens`` and its kin, times ``n``), or ``OUTPUT_GUESS`` where a prompt allows any number.
2. After: what the answer says under ``usage``, the last word where it says so several times (a stream); the
   estimate for each of the two numbers that it does not say, nothing for an answer that is no success.
3. A masked stream never contains the secret, in whatever pieces it arrives; nothing else is changed or kept
   back. Secrets shorter than ``SECRET_MIN`` are placeholders, and are left alone.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from agentfly.resources.runners.external.limits import Tokens

BYTES_PER_TOKEN = 4
OUTPUT_GUESS = 512  # tokens of an answer whose length nobody bounded
TOKENS_MAX = 1_000_000  # beyond any context: one absurd number must not starve the other holders
PROMPTS = ("messages", "prompt", "input")
"""Fields, one of which a request to a model has: completions, chat, embeddings, responses."""
TAIL = 65536  # bytes at the end of an answer in which its usage is looked for
SECRET_MIN = 8  # servers without keys are called with "EMPTY" or "none"
MASKED = b"***"

_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_USAGE = re.compile(r'"usage"\s*:\s*(?=\{)')
_INPUT = ("prompt_tokens", "input_tokens")
_OUTPUT = ("completion_tokens", "output_tokens")


def estimate(body: Mapping[str, Any] | None, size: int) -> Tokens:
    """Tokens of a request of ``size`` bytes, before it is sent; ``body`` is its JSON, if it is an object."""
    if body is None:
        return Tokens()
    prompt = min(math.ceil(size / BYTES_PER_TOKEN), TOKENS_MAX)
    allowed = next((n for name in _LIMITS if (n := _count(body.get(name))) is not None), None)
    if allowed is None:
        allowed = OUTPUT_GUESS if "messages" in body or "prompt" in body else 0  # embeddings have none
    return Tokens(prompt, min(allowed * (_count(body.get("n")) or 1), TOKENS_MAX))


def used(status: int, tail: bytes, estimated: Tokens) -> Tokens:
    """Tokens of a request, from the end of its answer."""
    if estimated == Tokens():
        return Tokens()  # what it reports is the usage of something else
    text, decoder = tail.decode(errors="replace"), json.JSONDecoder()
    said: dict[str, int] = {}
    for match in _USAGE.finditer(text):
        try:
            usage, _ = decoder.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            continue
        said |= {name: n for name in _INPUT + _OUTPUT if (n := _count(usage.get(name))) is not None}
    guess = Tokens() if status >= 300 else estimated
    return Tokens(
        next((said[name] for name in _INPUT if name in said), guess.input),
        next((said[name] for name in _OUTPUT if name in said), guess.output if not said else 0),
    )


def _count(value: Any) -> int | None:
    valid = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return min(value, TOKENS_MAX) if valid else None


class Mask:
    """Replaces secrets in a stream of bytes."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = sorted((s.encode() for s in secrets if len(s) >= SECRET_MIN), key=len, reverse=True)
        self._longest = max(map(len, self._secrets), default=0)
        self._kept = b""

    def feed(self, chunk: bytes) -> bytes:
        """What may be passed on; the beginning of a secret at the end of it is kept for the next call."""
        data = self._kept + chunk
        for secret in self._secrets:
            data = data.replace(secret, MASKED)
        for length in range(min(self._longest - 1, len(data)), 0, -1):
            if any(secret.startswith(data[-length:]) for secret in self._secrets):
                self._kept = data[-length:]
                return data[:-length]
        self._kept = b""
        return data

    def end(self) -> bytes:
        """What was kept: only a part of a secret, or none of it."""
        kept, self._kept = self._kept, b""
        return kept

    def text(self, text: str) -> str:
        """A whole text, masked."""
        for secret in self._secrets:
            text = text.replace(secret.decode(), MASKED.decode())
        return text
