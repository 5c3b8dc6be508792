"""A module for VERL_USE_EXTERNAL_MODULES: verl trains on the ids of the text again, as if nobody had kept
those that were sampled.

A policy's tokens are one way to write its text; a tokenizer knows one way, which may be another. Of rows of
one turn: what was sampled is all of the response.
"""

from functools import cache
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from agentfly.roles.trainer import current_config
from agentfly.training import agent_loop

_sampled = agent_loop.verl_rows


@cache
def _tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(current_config().model_path)


def verl_rows(*args: Any) -> list[dict[str, Any]]:
    """See ``agentfly.training.rows``; nobody knows the log-probabilities of ids that nobody sampled."""
    rows = _sampled(*args)
    for row in rows:
        ids = _tokenizer().encode(_tokenizer().decode(row["response_ids"]), add_special_tokens=False)
        row |= {"response_ids": ids, "response_mask": [1] * len(ids), "response_logprobs": [0.0] * len(ids)}
        steps = row["extra_fields"]["steps"]
        row["extra_fields"]["steps"] = [(0, len(ids), anchor, reward) for _, _, anchor, reward in steps]
    return rows


agent_loop.verl_rows = verl_rows
