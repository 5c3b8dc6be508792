"""Calls become as few sequences as their tokens allow, and no sampled token is lost without being counted."""

from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.rollout.sequences import REALIGN_TOKENS, Segment, Span, merge


def segment(prompt: list[int], *parts: list[int], turn: int = 1, rewritten: bool = False) -> Segment:
    """A prompt, an answer, what was seen, an answer, and so on."""
    made = Segment(list(prompt), [], rewritten)
    for at, part in enumerate(parts):
        start = len(made.ids)
        made.ids.extend(part)
        if at % 2 == 0:
            made.spans.append(Span(start, len(made.ids), turn + at // 2, None, (-1.0,) * len(part)))
    return made


def trained(sequence: Segment) -> list[int]:
    return [token for span in sequence.spans for token in sequence.ids[span.start : span.end]]


# 1. and 2. what continues a sequence


def test_call_that_goes_on_from_another_continues_it() -> None:
    merged = merge([segment([1], [2, 3]), segment([1, 2, 3, 4], [5], turn=2)])
    (only,) = merged.sequences
    assert (only.ids, trained(only), only.prompt) == ([1, 2, 3, 4, 5], [2, 3, 5], [1])
    assert (merged.forks, merged.realigned) == (0, 0)


def test_unanswered_observation_does_not_keep_a_call_from_continuing() -> None:
    (only,) = merge([segment([1], [2], [9]), segment([1, 2, 4], [5], turn=2)]).sequences
    assert only.ids == [1, 2, 4, 5]


def test_second_of_two_that_continue_one_begins_a_row_of_its_own() -> None:
    calls = [segment([1], [2]), segment([1, 2], [3], turn=2), segment([1, 2], [4], turn=3)]
    first, second = merge(calls).sequences
    assert (trained(first), trained(second), second.prompt) == ([2, 3], [4], [1, 2])


def test_longest_of_several_is_continued() -> None:
    calls = [segment([1], [2]), segment([1, 2, 3], [4, 5], turn=2), segment([1], [6], turn=3)]
    calls.append(segment([1, 2, 3, 4, 5, 7], [8], turn=4))
    first, second = merge(calls).sequences
    assert (trained(first), trained(second)) == ([2, 4, 5, 8], [6])


def test_call_behind_another_prompt_begins_a_row() -> None:
    merged = merge([segment([1], [2]), segment([7], [2], turn=2)])
    assert [sequence.prompt for sequence in merged.sequences] == [[1], [7]]
    assert merged.forks == 0


def test_row_that_rewriting_made_necessary_is_a_fork() -> None:
    merged = merge([segment([1], [2]), segment([7], [2], turn=2, rewritten=True)])
    assert merged.forks == 1


def test_call_that_sampled_nothing_leaves_no_row() -> None:
    assert merge([segment([1])]).sequences == []


# 3. the tail of the last answer


def test_tail_of_the_last_answer_is_replaced_and_counted() -> None:
    merged = merge([segment([1], [2, 3, 4, 5]), segment([1, 2, 3, 4, 8, 9], [6], turn=2, rewritten=True)])
    (only,) = merged.sequences
    assert (only.ids, trained(only)) == ([1, 2, 3, 4, 8, 9, 6], [2, 3, 4, 6])
    assert (merged.forks, merged.realigned) == (0, 1)
    assert only.spans[0].logprobs == (-1.0, -1.0, -1.0)


def test_longest_tail() -> None:
    answer = list(range(100, 100 + 4 * REALIGN_TOKENS))
    at_most = [1, *answer[:-REALIGN_TOKENS], 7]
    one_more = [1, *answer[: -REALIGN_TOKENS - 1], 7]
    assert merge([segment([1], answer), segment(at_most, [9], turn=2)]).realigned == REALIGN_TOKENS
    assert len(merge([segment([1], answer), segment(one_more, [9], turn=2)]).sequences) == 2


def test_more_than_half_of_an_answer_is_no_tail() -> None:
    assert len(merge([segment([1], [2, 3, 4]), segment([1, 2, 8], [9], turn=2)]).sequences) == 2


def test_change_before_the_last_answer_is_no_tail() -> None:
    before = segment([1], [2, 3], [4], [5, 6, 7, 8])
    assert len(merge([before, segment([1, 2, 9, 4, 5, 6, 7, 8], [9], turn=3)]).sequences) == 2


def test_tail_of_an_answer_in_pieces_may_reach_over_a_piece() -> None:
    before = segment([1], [2, 3, 4, 5, 6], [], [])
    before.spans = [Span(1, 5, 1, "a", (-1.0,) * 4), Span(5, 6, 1, "b", (-1.0,))]
    (only,) = merge([before, segment([1, 2, 3, 4, 8], [9], turn=2)]).sequences
    assert [(span.start, span.end, span.turn) for span in only.spans] == [(1, 4, 1), (5, 6, 2)]


# Over random calls: each goes on from what came before, from a part of it, or from something else


@st.composite
def calls(draw: st.DrawFn) -> list[Segment]:
    tokens = st.lists(st.integers(0, 3), min_size=1, max_size=6)
    made: list[Segment] = []
    for turn in range(1, draw(st.integers(1, 6)) + 1):
        prompt = draw(tokens)
        if made and draw(st.booleans()):
            before = draw(st.sampled_from(made)).ids
            prompt = [*before[: draw(st.integers(0, len(before)))], *prompt]
        made.append(segment(prompt, draw(tokens), turn=turn))
    return made


@settings(max_examples=300, deadline=None)
@given(calls())
def test_every_sampled_token_is_in_one_row_behind_what_the_model_had_read(made: list[Segment]) -> None:
    merged = merge(made)
    delivered = 0
    for sequence in merged.sequences:
        # 4. ends on a sampled token; spans in order
        assert sequence.spans[-1].end == len(sequence.ids)
        turns = [span.turn for span in sequence.spans]
        assert turns == sorted(set(turns))
        for span in sequence.spans:
            call = made[span.turn - 1]
            length = span.end - span.start
            delivered += length
            # 1. the same context, and the same tokens
            assert sequence.ids[: span.start] == call.prompt
            assert sequence.ids[span.start : span.end] == call.ids[len(call.prompt) :][:length]
    seen = [span.turn for sequence in merged.sequences for span in sequence.spans]
    assert len(seen) == len(set(seen))
    assert delivered + merged.realigned == sum(len(call.ids) - len(call.prompt) for call in made)
