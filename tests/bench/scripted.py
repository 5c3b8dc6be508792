"""A policy that answers what a recorded one answered, in the time that it took.

Guarantees:
1. The answer to a turn depends on its rollout and its number alone: the same for whoever plays it.
2. The tokenizer has the recorded policy's vocabulary and chat format; it needs no package and no model.

Not here: how the recording was made (``record``).
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from agentfly.models import Sampled, Sampling

FILE = Path(__file__).parent / "recording.json"
GENERATION = "<|im_start|>assistant\n"

Latencies = Literal["recorded", "long"]


class Turn(BaseModel):
    """One answer. ``seconds`` is how long it took; ``long_seconds`` how long one of ``long_tokens`` took."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ids: list[int]
    finish: Literal["stop", "length"]
    seconds: float
    long_tokens: int
    long_seconds: float


class Recording(BaseModel):
    """Rollouts of ``rows``, ``group_size`` of each; ``turns`` is keyed by ``<row>-<place in group>``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    about: str
    date: str
    eos_token_id: int
    group_size: int
    pieces: list[str]
    rows: list[dict[str, Any]]
    turns: dict[str, list[Turn]]


def load(path: Path = FILE) -> Recording:
    """The recording that stands beside this module."""
    return Recording.model_validate_json(path.read_text())


def place_of(request_id: str) -> tuple[str, int]:
    """Key of the rollout, and number of the turn from 0, that a request of ``Chain`` belongs to.

    A request id is ``<name>-<row>-<hash>-<place>.<attempt>.<nonce>.<turn>.<tokens before>``.
    """
    rollout_id, _, _, turn, _ = request_id.split(".")
    _, row, _, place = rollout_id.rsplit("-", 3)
    return f"{row}-{place}", int(turn) - 1


class ScriptedModel:
    """A ``TokenModel`` that sleeps for the recorded latency and gives the recorded answer.

    ``order`` has the keys of the recorded rollouts that the rows are played as, one rollout for each row.
    """

    def __init__(self, recording: Recording, latencies: Latencies, order: Sequence[str]) -> None:
        self._recording = recording
        self._order = order
        self._long = latencies == "long"

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        deadline: float,
        images: Any = (),
    ) -> Sampled:
        """See ``TokenModel.generate``."""
        place, number = place_of(request_id)
        row, _, _ = place.partition("-")
        turn = self._recording.turns[self._order[int(row)]][number]
        async with asyncio.timeout(deadline):
            await asyncio.sleep(turn.long_seconds if self._long else turn.seconds)
        return Sampled(list(turn.ids), [0.0] * len(turn.ids), turn.finish, None)


class RecordedTokenizer:
    """Longest-match over the recorded vocabulary, with the quickstart's chat format."""

    def __init__(self, recording: Recording) -> None:
        self.eos_token_id: int | None = recording.eos_token_id
        self._pieces = recording.pieces
        # Bytes that are no text of their own decode to the same mark; the first one stands for all.
        self._ids = {piece: at for at, piece in reversed(list(enumerate(recording.pieces))) if piece}
        self._longest = max(map(len, self._ids))

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
    ) -> Any:
        """The quickstart's format; it shows no tools, and neither does this."""
        text = "".join(map(_message, conversation)) + (GENERATION if add_generation_prompt else "")
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """See ``Tokenizer.encode``. A character that no piece has becomes the end-of-text id."""
        ids: list[int] = []
        at = 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            ids.append(self._ids[text[at:end]] if end is not None else 0)
            at = end if end is not None else at + 1
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """See ``Tokenizer.decode``."""
        return "".join(self._pieces[token] for token in token_ids)


def _message(message: dict[str, Any]) -> str:
    if message["role"] == "tool":
        body = f"<tool_response>\n{message['content']}\n</tool_response>"
        return f"<|im_start|>user\n{body}<|im_end|>\n"
    return f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
