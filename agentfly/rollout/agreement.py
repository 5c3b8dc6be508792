"""How many ids of a prompt stand for text with which another rendering begins too.

Guarantees:
1. The ids found have exactly the text found, and the other rendering begins with it.
2. Pieces whose whole text agrees are not decoded; of the first one that does not, few times as many ids are
   decoded as it has.
3. A character of which a piece has a part only is left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# A character has at most four bytes, so at most three ids before a cut can be parts of it.
_PARTS = 4


@dataclass(frozen=True)
class Piece:
    """Ids up to ``end`` (exclusive), from where the piece before ends, and the text that they stand for."""

    end: int
    text: str


def agreement(
    pieces: Sequence[Piece], ids: Sequence[int], theirs: str, decode: Callable[[list[int]], str]
) -> list[Piece]:
    """The pieces, or the first part of one, with whose text ``theirs`` begins."""
    found: list[Piece] = []
    start = at = 0
    for piece in pieces:
        if not theirs.startswith(piece.text, at):
            end, text = _part(ids, start, piece.end, theirs[at : at + len(piece.text)], decode)
            return [*found, Piece(end, text)] if end > start else found
        found.append(piece)
        start, at = piece.end, at + len(piece.text)
    return found


def _part(
    ids: Sequence[int], start: int, end: int, theirs: str, decode: Callable[[list[int]], str]
) -> tuple[int, str]:
    """Where the ids from ``start`` on stop agreeing, and the text up to there."""
    at = 0
    while start < end:
        middle = (start + end + 1) // 2
        for cut in range(middle, max(start, middle - _PARTS), -1):
            text = decode(list(ids[start:cut]))
            if theirs.startswith(text, at):
                start, at = cut, at + len(text)
                break
        else:
            end = middle - 1
    return start, theirs[:at]
