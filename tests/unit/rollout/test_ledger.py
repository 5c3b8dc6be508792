"""The ledger: what was sampled stays as it was sampled, whatever the template and the tokenizer do."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.models import Sampled
from agentfly.rollout import InvalidSample, Row, TokenLedger
from tests.unit.rollout import toys
from tests.unit.rollout.toys import APPEND_ONLY, ToyTokenizer, chatml, sampled

USER = [{"role": "user", "content": "find the port"}]
SEEN = [{"role": "tool", "name": "shell", "content": "the port is 53"}]


def opened(render: toys.Render = chatml, **options: Any) -> tuple[ToyTokenizer, TokenLedger]:
    tokenizer = ToyTokenizer(render, **options)
    return tokenizer, TokenLedger(tokenizer, USER)


def say(tokenizer: ToyTokenizer, text: str, end: str = "<|im_end|>") -> Sampled:
    return sampled(
        [*tokenizer.encode(text, add_special_tokens=False), *([tokenizer.special(end)] if end else [])]
    )


def take(ledger: TokenLedger, answer: Sampled, turn: int = 1) -> None:
    ledger.append(answer, turn)


def only_row(ledger: TokenLedger) -> Row | None:
    rows = ledger.rows()
    assert len(rows) <= 1
    return rows[0] if rows else None


# 1. the next prompt is the previous one, the sampled ids, and the ids of the new messages


def test_first_prompt_is_the_rendered_chat() -> None:
    tokenizer, ledger = opened()
    assert (
        tokenizer.decode(ledger.prompt_ids)
        == "<|im_start|>user\nfind the port<|im_end|>\n<|im_start|>assistant\n"
    )


def test_next_prompt_reads_as_the_template_writes_it() -> None:
    tokenizer, ledger = opened()
    take(ledger, say(tokenizer, "look"))
    assert ledger.end_turn() == "look"
    ledger.observe(SEEN)
    assert tokenizer.decode(ledger.prompt_ids) == (
        "<|im_start|>user\nfind the port<|im_end|>\n<|im_start|>assistant\nlook<|im_end|>\n"
        "<|im_start|>tool\nthe port is 53<|im_end|>\n<|im_start|>assistant\n"
    )


def test_odd_tokenisation_of_the_policy_is_kept() -> None:
    tokenizer, ledger = opened()
    odd = [
        *(tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "the"),
        tokenizer.special("<|im_end|>"),
    ]
    assert tokenizer.encode("the", add_special_tokens=False) != odd[:-1]
    before = ledger.prompt_ids
    take(ledger, sampled(odd))
    ledger.end_turn()
    ledger.observe(SEEN)
    assert ledger.prompt_ids[: len(before) + len(odd)] == before + odd


def test_ids_of_messages_before_and_after_are_those_of_the_template() -> None:
    tokenizer, ledger = opened()
    take(ledger, say(tokenizer, "look"))
    ledger.end_turn()
    ledger.observe(SEEN)
    assert ledger.prompt_ids == tokenizer.apply_chat_template(
        ledger.messages, tools=None, add_generation_prompt=True, tokenize=True, return_dict=False
    )


def test_tools_are_rendered_into_the_first_prompt() -> None:
    tokenizer = ToyTokenizer(chatml)
    ledger = TokenLedger(tokenizer, USER, [toys.shell.schema])
    assert tokenizer.decode(ledger.prompt_ids).startswith("<|im_start|>system\ntools: ['shell']")
    take(ledger, say(tokenizer, "look"))
    ledger.end_turn()
    ledger.observe(SEEN)
    assert tokenizer.decode(ledger.prompt_ids).count("tools:") == 1


def test_messages_hold_the_whole_conversation() -> None:
    tokenizer, ledger = opened()
    take(ledger, say(tokenizer, "look"))
    ledger.end_turn()
    ledger.observe(SEEN)
    assert ledger.messages == [*USER, {"role": "assistant", "content": "look"}, *SEEN]


# 2. masks and log-probabilities


def test_mask_and_logprobs_stand_on_the_sampled_ids() -> None:
    tokenizer, ledger = opened()
    take(ledger, say(tokenizer, "ok"))
    ledger.end_turn()
    ledger.observe(SEEN)
    between = len(ledger.prompt_ids)
    take(ledger, say(tokenizer, "done"), turn=2)
    ledger.end_turn()
    row = only_row(ledger)
    assert row is not None
    assert between == len(row.prompt_ids) + len(row.response_ids) - 2
    assert row.response_mask == [1, 1, *[0] * (len(row.response_ids) - 4), 1, 1]
    assert row.logprobs == [-1.0, -2.0, *[0.0] * (len(row.response_ids) - 4), -1.0, -2.0]


def test_versions_of_the_weights_cover_the_sampled_ids() -> None:
    tokenizer, ledger = opened()
    take(ledger, sampled(say(tokenizer, "ok", end="").ids, finish="abort", version="3"))
    take(ledger, sampled(say(tokenizer, "done").ids, version="4"))
    assert ledger.end_turn() == "okdone"
    row = only_row(ledger)
    assert row is not None
    assert [(span.version, span.start, span.end) for span in row.weight_versions] == [
        ("3", 0, 1),
        ("4", 1, 3),
    ]


def test_sample_without_finite_logprobs_is_refused() -> None:
    _, ledger = opened()
    with pytest.raises(InvalidSample, match="not a finite number"):
        take(ledger, Sampled([9], [float("-inf")], "stop", None))
    with pytest.raises(InvalidSample, match="1 ids have 0 log-probabilities"):
        take(ledger, Sampled([9], [], "stop", None))


def test_turn_without_tokens_is_refused() -> None:
    _, ledger = opened()
    take(ledger, Sampled([], [], "stop", None))
    with pytest.raises(InvalidSample, match="no tokens"):
        ledger.end_turn()


# 3. rows end on a sampled token


def test_unanswered_observation_is_not_in_the_row() -> None:
    tokenizer, ledger = opened()
    said = say(tokenizer, "look")
    take(ledger, said)
    ledger.end_turn()
    ledger.observe(SEEN)
    row = only_row(ledger)
    assert row is not None
    assert row.response_ids == said.ids


def test_nothing_sampled_is_no_row_and_no_drift() -> None:
    _, ledger = opened()
    assert only_row(ledger) is None
    assert ledger.drift().tokens == 0


# 4. a turn may end with the template's end token, another one, or be cut


@pytest.mark.parametrize("end", ["<|im_end|>", "", "<|endoftext|>"])
def test_turn_is_closed_once_however_it_ended(end: str) -> None:
    tokenizer, ledger = opened(eos="<|endoftext|>")
    take(ledger, say(tokenizer, "look", end=end))
    assert ledger.end_turn() == "look"
    ledger.observe(SEEN)
    text = tokenizer.decode(ledger.prompt_ids)
    kept = "<|endoftext|>" if end == "<|endoftext|>" else ""
    assert f"assistant\nlook{kept}<|im_end|>\n<|im_start|>tool" in text


def test_completed_end_of_a_cut_turn_is_not_trained() -> None:
    tokenizer, ledger = opened()
    take(ledger, say(tokenizer, "ok", end=""))
    ledger.end_turn()
    ledger.observe(SEEN)
    take(ledger, say(tokenizer, "ok"), turn=2)
    row = only_row(ledger)
    assert row is not None
    assert row.response_mask[:2] == [1, 0]
    assert row.response_ids[1] == tokenizer.special("<|im_end|>")


def test_template_end_token_is_a_stop_token() -> None:
    tokenizer, ledger = opened(eos="<|endoftext|>")
    assert ledger.stop_token_ids == (tokenizer.special("<|im_end|>"),)
    assert TokenLedger(ToyTokenizer(toys.plain), USER, stop_token_ids=(5,)).stop_token_ids == (5,)


def test_end_token_behind_a_space_is_not_doubled() -> None:
    tokenizer, ledger = opened(toys.spaced, eos="</s>")
    take(ledger, say(tokenizer, "look ", end="</s>"))
    ledger.end_turn()
    ledger.observe(SEEN)
    assert "look </s><s>tool: the port is 53 </s><s>assistant: " in tokenizer.decode(ledger.prompt_ids)


def test_mark_at_the_start_of_a_text_stays_out_of_the_middle() -> None:
    tokenizer, ledger = opened(toys.plain, start="~")
    take(ledger, say(ToyTokenizer(toys.plain), "look", end=""))
    ledger.end_turn()
    ledger.observe(SEEN)
    assert tokenizer.decode(ledger.prompt_ids).count("~") == 1


# 5. a template that rewrites gives a new prompt; the row is realigned or forks


def answer_and_observe(
    render: toys.Render, text: str, seen: list[dict[str, Any]] = SEEN
) -> tuple[ToyTokenizer, TokenLedger]:
    tokenizer, ledger = opened(render)
    take(ledger, say(tokenizer, text))
    ledger.end_turn()
    ledger.observe(seen)
    return tokenizer, ledger


def test_removed_thinking_forks_the_row() -> None:
    tokenizer, ledger = answer_and_observe(toys.forgetful, "<think>let me see now, it is long</think>look")
    prompt = ledger.prompt_ids
    assert tokenizer.decode(prompt) == toys.forgetful(ledger.messages, None, True)
    take(ledger, say(tokenizer, "done"), turn=2)
    ledger.end_turn()
    first, second = ledger.rows()
    assert tokenizer.decode(first.response_ids) == "<think>let me see now, it is long</think>look<|im_end|>"
    assert (second.prompt_ids, tokenizer.decode(second.response_ids)) == (prompt, "done<|im_end|>")
    assert [step.turn for row in (first, second) for step in row.steps] == [1, 2]
    assert (ledger.drift().forks, ledger.drift().realigned) == (1, 0)


def test_prompt_after_a_fork_keeps_the_ids_up_to_where_its_text_differs() -> None:
    tokenizer = ToyTokenizer(toys.forgetful)
    ledger = TokenLedger(tokenizer, USER)
    odd = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "the"]
    take(ledger, sampled([*odd, tokenizer.special("<|im_end|>")]))
    ledger.end_turn()
    ledger.observe(SEEN)
    take(ledger, say(tokenizer, "<think>hm, what is it that I see</think>ok"), turn=2)
    ledger.end_turn()
    ledger.observe(SEEN)
    first = ledger.rows()[0]
    kept = [*first.prompt_ids, *odd]
    assert ledger.prompt_ids[: len(kept)] == kept


def test_thinking_template_goes_on_without_thoughts() -> None:
    tokenizer, ledger = answer_and_observe(toys.forgetful, "look")
    take(ledger, say(tokenizer, "done"), turn=2)
    assert (len(ledger.rows()), ledger.drift().forks) == (1, 0)


def test_message_that_moves_forks_the_row() -> None:
    tokenizer, ledger = answer_and_observe(toys.moving, "look")
    take(ledger, say(tokenizer, "done"), turn=2)
    ledger.end_turn()
    assert len(ledger.rows()) == 2
    assert tokenizer.decode(ledger.rows()[1].prompt_ids) == toys.moving(ledger.messages[:-1], None, True)


def normalising(messages: Any, tools: Any, generation: bool) -> str:
    """Ends every answer in its own way."""
    said = [
        {**m, "content": m["content"].replace("!", ".")} if m["role"] == "assistant" else m for m in messages
    ]
    return chatml(said, tools, generation)


def test_changed_tail_is_realigned() -> None:
    tokenizer, ledger = answer_and_observe(normalising, "look for the port in the file!")
    take(ledger, say(tokenizer, "done"), turn=2)
    ledger.end_turn()
    row = only_row(ledger)
    assert row is not None
    answer = tokenizer.encode("look for the port in the file", add_special_tokens=False)
    assert row.response_ids[: len(answer)] == answer
    assert row.response_mask[: len(answer) + 2] == [*[1] * len(answer), 0, 0]
    assert tokenizer.decode(row.response_ids[len(answer) :]).startswith(".<|im_end|>")
    assert [(step.turn, step.start, step.end) for step in row.steps] == [
        (1, 0, len(answer)),
        (2, len(row.response_ids) - 2, len(row.response_ids)),
    ]
    drift = ledger.drift()
    assert (drift.forks, drift.realigned, drift.drifted) == (0, 2, 2)


def test_changed_text_before_the_tail_forks_the_row() -> None:
    text = "no! look for the port in the file, then say what it is"
    tokenizer, ledger = answer_and_observe(normalising, text)
    take(ledger, say(tokenizer, "done"), turn=2)
    assert len(ledger.rows()) == 2


def test_trimmed_white_space_is_drift_and_no_fork() -> None:
    _, ledger = answer_and_observe(toys.trimming, "  look  ")
    drift = ledger.drift()
    assert drift.drifted > 0
    assert drift.forks == 0


def test_template_that_counts_what_came_before_goes_on_in_its_row() -> None:
    """As DeepSeek: what stands before an observation depends on those before it."""

    def counting(messages: Any, tools: Any, generation: bool) -> str:
        number = itertools.count()
        said = [
            {**m, "content": f"{next(number)}: {m['content']}"} if m["role"] == "tool" else m
            for m in messages
        ]
        return chatml(said, tools, generation)

    tokenizer, ledger = answer_and_observe(counting, "look")
    take(ledger, say(tokenizer, "again"), turn=2)
    ledger.end_turn()
    ledger.observe(SEEN)
    take(ledger, say(tokenizer, "done"), turn=3)
    row = only_row(ledger)
    assert row is not None
    assert "1: the port is 53" in tokenizer.decode(row.response_ids)
    assert ledger.drift().forks == 0


# 5. other messages are asked for


def test_other_messages_begin_a_row() -> None:
    tokenizer, ledger = opened()
    take(ledger, say(tokenizer, "look"))
    ledger.end_turn()
    ledger.restart([{"role": "user", "content": "another thing"}])
    assert tokenizer.decode(ledger.prompt_ids).startswith("<|im_start|>user\nanother thing<|im_end|>")
    take(ledger, say(tokenizer, "done"), turn=2)
    ledger.end_turn()
    assert [tokenizer.decode(row.response_ids) for row in ledger.rows()] == [
        "look<|im_end|>",
        "done<|im_end|>",
    ]
    assert ledger.drift().forks == 0
    assert ledger.messages == [
        {"role": "user", "content": "another thing"},
        {"role": "assistant", "content": "done"},
    ]


def test_messages_that_go_on_from_a_row_continue_it_with_its_ids() -> None:
    tokenizer, ledger = opened()
    odd = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "the"]
    take(ledger, sampled([*odd, tokenizer.special("<|im_end|>")]))
    ledger.end_turn()
    ledger.restart([*ledger.messages, *SEEN])
    take(ledger, say(tokenizer, "done"), turn=2)
    row = only_row(ledger)
    assert row is not None
    assert row.response_ids[:3] == odd


def test_restart_before_the_first_answer_leaves_no_row() -> None:
    tokenizer, ledger = opened()
    ledger.restart([{"role": "user", "content": "another thing"}])
    assert ledger.rows() == []
    take(ledger, say(tokenizer, "done"))
    assert len(ledger.rows()) == 1


# 6. drift


def test_own_tokenisation_has_no_drift() -> None:
    _, ledger = answer_and_observe(chatml, "look for the port")
    row = only_row(ledger)
    assert row is not None
    drift = ledger.drift()
    assert (drift.tokens, drift.drifted) == (len(row.prompt_ids) + len(row.response_ids), 0)


def test_split_word_is_counted_as_drift() -> None:
    tokenizer, ledger = opened()
    letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "the"]
    take(ledger, sampled([*letters, tokenizer.special("<|im_end|>")]))
    ledger.end_turn()
    assert ledger.drift().drifted == 3


# All of it, over random tokenizers, templates, conversations and tokenisations

pieces = st.binary(min_size=1, max_size=2).filter(lambda piece: b" " not in piece and b"_" not in piece)
merges = st.lists(st.tuples(pieces, pieces).map(b" ".join), max_size=12)
# A policy samples any tokens, also ones that make no valid text; ends are the ledger's business.
words = st.text(max_size=30).filter(lambda text: not any(special in text for special in toys.SPECIALS))


@st.composite
def conversations(draw: st.DrawFn) -> tuple[ToyTokenizer, list[tuple[Sampled, list[dict[str, Any]]]]]:
    name = draw(st.sampled_from(sorted(APPEND_ONLY)))
    end = "</s>" if name == "spaced" else "<|im_end|>"
    tokenizer = ToyTokenizer(APPEND_ONLY[name], merges=[*toys.MERGES, *_closed(draw(merges))], eos=end)
    ordinary = [token for token in tokenizer.vocabulary if token >= len(toys.SPECIALS)]
    turns = []
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            ids = tokenizer.encode(draw(words), add_special_tokens=False)
        else:
            ids = draw(st.lists(st.sampled_from(ordinary), max_size=12))
        if not ids or draw(st.booleans()):
            ids = [*ids, tokenizer.special(end)]
        seen = [
            {"role": "tool", "name": "t", "content": text}
            for text in draw(st.lists(words, min_size=1, max_size=3))
        ]
        turns.append((sampled(ids), seen))
    return tokenizer, turns


def _closed(drawn: list[bytes]) -> list[bytes]:
    """Only merges of single bytes: every piece of a merge must be a token itself."""
    return [merge for merge in drawn if all(len(piece) == 1 for piece in merge.split(b" "))]


@settings(max_examples=60, deadline=None)
@given(conversations())
def test_any_conversation_keeps_its_ids(conversation: tuple[ToyTokenizer, list[Any]]) -> None:
    tokenizer, turns = conversation
    ledger = TokenLedger(tokenizer, USER)
    sampled_at: list[tuple[int, Sampled]] = []
    for turn, (answer, seen) in enumerate(turns, start=1):
        before = ledger.prompt_ids
        take(ledger, answer, turn)
        ledger.end_turn()
        sampled_at.append((len(before), answer))
        ledger.observe(seen)
        # 1. the next prompt starts with the previous row, sampled ids included
        assert ledger.prompt_ids[: len(before) + len(answer.ids)] == before + answer.ids
        # what follows is what the template writes after the turn, once
        tail = tokenizer.decode(ledger.prompt_ids[len(before) + len(answer.ids) :])
        assert seen[-1]["content"] in tail
    row = only_row(ledger)
    assert row is not None
    ids, offset = [*row.prompt_ids, *row.response_ids], len(row.prompt_ids)
    # 2. masks are exact, logprobs aligned
    expected = [0] * len(row.response_ids)
    for at, answer in sampled_at:
        assert ids[at : at + len(answer.ids)] == answer.ids
        expected[at - offset : at - offset + len(answer.ids)] = [1] * len(answer.ids)
        assert row.logprobs[at - offset : at - offset + len(answer.ids)] == answer.logprobs
    assert row.response_mask == expected
    # 3. rows end on a sampled token
    assert row.response_mask[-1] == 1
    # 6. drift is a part of the tokens
    drift = ledger.drift()
    assert 0 <= drift.drifted <= drift.tokens == len(ids)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(words.filter(str.strip), words), min_size=1, max_size=4),
    st.sampled_from(["chatml", "grouping"]),
)
def test_faithful_tokenisation_equals_the_template(turns: list[tuple[str, str]], name: str) -> None:
    tokenizer = ToyTokenizer(APPEND_ONLY[name])
    ledger = TokenLedger(tokenizer, USER)
    for turn, (text, seen) in enumerate(turns, start=1):
        # What stands before a turn may merge with its first byte, so encode as the template would.
        prompt = tokenizer.decode(ledger.prompt_ids)
        whole = tokenizer.encode(prompt + text, add_special_tokens=False)
        if whole[: len(ledger.prompt_ids)] != ledger.prompt_ids:
            return
        take(ledger, sampled([*whole[len(ledger.prompt_ids) :], tokenizer.special("<|im_end|>")]), turn)
        ledger.end_turn()
        ledger.observe([{"role": "tool", "content": seen}])
    assert ledger.prompt_ids == tokenizer.apply_chat_template(
        ledger.messages, tools=None, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ledger.drift().drifted == 0
