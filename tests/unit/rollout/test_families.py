"""The ledger under the real chat templates of model families.

1. The policy reads what the template writes: every prompt is, but for white space, the template's rendering.
2. Every sampled token is in one row, once, in the context in which it was sampled, or counted as realigned.
3. What each template does to the rows of a rollout with tools is known, and so is what a user's message does.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.models import Sampled
from agentfly.rollout import Drift, TokenLedger
from agentfly.rollout.template import ChatTemplate
from tests.unit.rollout import toys
from tests.unit.rollout.families import FAMILIES, Family
from tests.unit.rollout.toys import ToyTokenizer, sampled

OPENING = [
    {"role": "system", "content": "You work in a sandbox."},
    {"role": "user", "content": "find the port"},
]
TOOLS = [toys.shell.schema]


@dataclass(frozen=True)
class Said:
    """A turn: what the policy wrote, and what it was answered with."""

    text: str
    end: str
    seen: list[dict[str, Any]]


class Rollout:
    """A rollout under one family's template; keeps what the model read and wrote at each turn."""

    def __init__(
        self,
        family: Family,
        merges: list[bytes] | None = None,
        opening: Sequence[dict[str, Any]] = OPENING,
    ) -> None:
        self.family = family
        self.tokenizer = family.tokenizer(toys.MERGES if merges is None else merges)
        ends = [self.tokenizer.special(end) for end in dict.fromkeys(family.ends)]
        self.ledger = TokenLedger(self.tokenizer, opening, TOOLS, ends, family.parser)
        self.template = ChatTemplate(self.tokenizer, TOOLS, opening, family.parser)
        self.calls: list[tuple[list[int], Sampled]] = []

    def turn(self, said: Said, ids: list[int] | None = None) -> None:
        if ids is None:
            ids = self.tokenizer.encode(said.text, add_special_tokens=False)
        answer = sampled([*ids, self.tokenizer.special(said.end)])
        self.calls.append((self.ledger.prompt_ids, answer))
        self.ledger.append(answer, len(self.calls))
        assert self.ledger.end_turn() == said.text
        if said.seen:
            self.ledger.observe(said.seen)

    def check(self) -> None:
        """1. and 2., whatever was said."""
        delivered = 0
        seen: list[int] = []
        for row in self.ledger.rows():
            assert row.response_mask[-1] == 1
            for step in row.steps:
                prompt, answer = self.calls[step.turn - 1]
                ids = row.response_ids[step.start : step.end]
                assert [*row.prompt_ids, *row.response_ids[: step.start]] == prompt
                assert ids == answer.ids[: len(ids)]
                assert row.logprobs[step.start : step.end] == answer.logprobs[: len(ids)]
                assert row.response_mask[step.start : step.end] == [1] * len(ids)
                delivered += len(ids)
                seen.append(step.turn)
        drift = self.ledger.drift()
        assert seen == sorted(set(seen))
        assert delivered + drift.realigned == self.ledger.sampled_tokens
        assert 0 <= drift.drifted <= drift.tokens

    def reads_as_written(self) -> bool:
        ours = self.tokenizer.decode(self.ledger.prompt_ids)
        theirs = self.template.text(self.ledger.messages, generation=True)
        return "".join(ours.split()) == "".join(theirs.split())


def called(family: Family, thought: str, seen: str, **arguments: Any) -> Said:
    text = family.think(thought) + family.call("shell", arguments)
    return Said(text, family.ends[0], [{"role": "tool", "name": "shell", "content": seen}])


def answered(family: Family, thought: str, text: str, seen: list[dict[str, Any]]) -> Said:
    return Said(family.think(thought) + family.final(text), family.ends[1], seen)


def played(name: str, *, then: str | None = None, opening: Sequence[dict[str, Any]] = OPENING) -> Rollout:
    """Two calls and an answer; ``then`` is what the user says to that."""
    family = FAMILIES[name]
    rollout = Rollout(family, opening=opening)
    for turn in range(2):
        rollout.turn(called(family, f"I look at file {turn}", f"the port is {turn}", command=f"cat {turn}"))
        assert rollout.reads_as_written()
    user = [] if then is None else [{"role": "user", "content": then}]
    rollout.turn(answered(family, "I know it", "the port is 1, and that is all there is to say", user))
    if then is not None:
        assert rollout.reads_as_written()
        rollout.turn(answered(family, "I am done", "you are welcome", []))
    rollout.check()
    return rollout


# 3. what becomes of the rows: (rows, forks) after calls and an answer, and after another message of the user


@pytest.mark.parametrize(
    ("name", "tools", "user"),
    [
        ("Qwen2.5", (1, 0), (1, 0)),
        ("Qwen3", (1, 0), (2, 1)),  # thoughts stay until the user says something
        ("Qwen3 without thinking", (3, 2), (4, 3)),  # the prompt's empty thought is nowhere in the history
        ("Qwen3.5", (1, 0), (2, 1)),
        ("Llama 3.1", (1, 0), (1, 0)),
        ("Llama 3.2", (1, 0), (1, 0)),
        ("DeepSeek-R1 distill", (2, 1), (2, 1)),
        ("Mistral Nemo", (2, 1), (3, 2)),  # the system's text and the tools go where the user spoke last
        ("Gemma 3", (1, 0), (1, 0)),
        ("GPT-OSS", (1, 0), (2, 1)),
    ],
)
def test_rows_of_a_rollout(name: str, tools: tuple[int, int], user: tuple[int, int]) -> None:
    found = []
    for then in (None, "thank you"):
        ledger = played(name, then=then).ledger
        found.append((len(ledger.rows()), ledger.drift().forks))
    assert found == [tools, user]


def test_call_that_the_template_writes_with_an_id_is_realigned() -> None:
    rollout = played("Mistral Nemo", opening=OPENING[1:])
    drift = rollout.ledger.drift()
    assert (drift.forks, drift.realigned > 0) == (0, True)
    (row,) = rollout.ledger.rows()
    assert rollout.tokenizer.decode(row.response_ids).count('"id": "call0000') == 2


@pytest.mark.parametrize("name", ["Qwen2.5", "Llama 3.1", "Llama 3.2"])
def test_template_that_keeps_answers_has_no_drift(name: str) -> None:
    drift = played(name, then="thank you").ledger.drift()
    assert drift == Drift(tokens=drift.tokens)


def test_mistral_and_gptoss_are_told_of_the_calls() -> None:
    for name in ("Mistral Nemo", "GPT-OSS"):
        rollout = played(name)
        assert rollout.template.tail(called(rollout.family, "", "x").seen) is None


def test_gemma_reads_observations_as_a_users() -> None:
    rollout = played("Gemma 3")
    text = rollout.tokenizer.decode(rollout.ledger.prompt_ids)
    assert "<start_of_turn>user\nthe port is 0<end_of_turn>" in text


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_malformed_call_is_answered_in_every_family(name: str) -> None:
    family = FAMILIES[name]
    rollout = Rollout(family)
    told = [{"role": "tool", "name": "error", "content": "malformed tool call: not valid JSON"}]
    rollout.turn(answered(family, "I try", "I call shell", told))
    assert rollout.reads_as_written()
    assert "malformed tool call" in rollout.tokenizer.decode(rollout.ledger.prompt_ids)
    rollout.turn(answered(family, "I give up", "done", []))
    rollout.check()


# 1. and 2. over random tokenizers, answers and observations

# Text that means something to a template or a parser is what the cases above are about.
plain = st.text(max_size=20).filter(
    lambda text: not any(mark in text for mark in "<>[]{}|") and json.loads(json.dumps(text)) == text
)
words = plain.map(lambda text: text.encode("utf-8", "replace").decode())


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(sorted(FAMILIES)),
    merged=st.lists(
        st.tuples(*[st.sampled_from([b"a", b"e", b"t", b"\n", b":", b'"', b"}", b"\xc3"])] * 2), max_size=8
    ),
    turns=st.lists(st.tuples(words, words, words, st.booleans(), st.booleans()), min_size=1, max_size=4),
)
def test_any_rollout(name: str, merged: list[tuple[bytes, bytes]], turns: list[Any]) -> None:
    family = FAMILIES[name]
    rollout = Rollout(family, [*toys.MERGES, *map(b" ".join, merged)])
    for thought, argument, seen, calls, odd in turns:
        if calls:
            said = called(family, thought, seen, command=argument)
        else:
            said = answered(family, thought, argument, [{"role": "user", "content": seen}])
        rollout.turn(said, spelled(rollout.tokenizer, said.text) if odd else None)
        assert rollout.reads_as_written()
    rollout.check()


def spelled(tokenizer: ToyTokenizer, text: str) -> list[int]:
    """The text as a policy may write it and a tokenizer would not: in letters, but for special tokens."""
    whole = tokenizer.encode(text, add_special_tokens=False)
    specials, ids = set(map(tokenizer.special, tokenizer.specials)), list[int]()
    for token in whole:
        piece = tokenizer.decode([token])
        letters = [one for part in piece for one in tokenizer.encode(part, add_special_tokens=False)]
        ids.extend([token] if token in specials else letters)
    return ids if tokenizer.decode(ids) == text else whole
