"""Ids and the text that they share with another rendering."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.rollout.agreement import Piece, agreement
from tests.unit.rollout import toys
from tests.unit.rollout.toys import ToyTokenizer

TOKENIZER = ToyTokenizer(toys.chatml)


class Counting:
    """A decoder that counts what it decodes."""

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, ids: list[int]) -> str:
        self.tokens += len(ids)
        return TOKENIZER.decode(ids)


def made(*texts: str) -> tuple[list[Piece], list[int]]:
    pieces, ids = list[Piece](), list[int]()
    for text in texts:
        ids += TOKENIZER.encode(text, add_special_tokens=False)
        pieces.append(Piece(len(ids), text))
    return pieces, ids


def agreed(theirs: str, *texts: str) -> str:
    pieces, ids = made(*texts)
    found = agreement(pieces, ids, theirs, TOKENIZER.decode)
    text = "".join(piece.text for piece in found)
    # 1. the ids have the text, and the other rendering begins with it
    assert TOKENIZER.decode(ids[: found[-1].end] if found else []) == text
    assert theirs.startswith(text)
    return text


@pytest.mark.parametrize(
    ("theirs", "texts", "text"),
    [
        ("one two three", ("one ", "two"), "one two"),
        ("one ten", ("one ", "two"), "one t"),
        ("two", ("one",), ""),
        ("", ("one",), ""),
        ("on", ("one",), "on"),
        ("done", ("done it",), "done"),
        ("dot", ("done it",), ""),  # "done" is one token
        ("caf\u00e9", ("caf\u00e8",), "caf"),  # 3. they share the first byte of two
    ],
)
def test_agreement_ends_where_the_text_differs(theirs: str, texts: tuple[str, ...], text: str) -> None:
    assert agreed(theirs, *texts) == text


def test_pieces_that_agree_are_not_decoded() -> None:
    pieces, ids = made("a" * 5000, "b" * 5000)
    decode = Counting()
    assert agreement(pieces, ids, "a" * 5000 + "b" * 5000 + "c", decode) == pieces
    assert decode.tokens == 0


@pytest.mark.parametrize("at", [0, 1, 2500, 4999])
def test_piece_that_differs_is_decoded_about_once(at: int) -> None:
    pieces, ids = made("x" * 100, "a" * 5000)
    decode = Counting()
    found = agreement(pieces, ids, "x" * 100 + "a" * at + "b", decode)
    assert (found[-1].end if found else 0) == 100 + at
    assert decode.tokens <= 4 * 5000


text = st.text(alphabet="abt\u00e9\u8a9e\U0001f600 \n", max_size=30)


@settings(max_examples=200, deadline=None)
@given(text, text, text, text)
def test_any_two_texts(first: str, second: str, third: str, other: str) -> None:
    agreed(first + second + other, first, second, third)
    agreed(first + other, first + second, third)
    found = agreed(first + second + other, first, second)
    assert found == first + second
