"""The keys of an external API: which is in use, which is set aside, until when.

Guarantees:
1. The first key in order that is not set aside is used.
2. A key that the API limits is set aside until a moment, one that it refuses for as long as its value is the
   same: a new value under the same reference is a new key.
3. A reference that cannot be read keeps the value it had: a file may be read while it is replaced.
4. A value is in no ``repr`` and no message; keys are named by their references.

Not here: when references are read again (``gate``).
"""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ANONYMOUS = ""
"""Reference of the one key of an API that takes none; its value is empty."""
KEY_MAX = 16384  # bytes: JSON web tokens are a few thousand


@dataclass(frozen=True, slots=True)
class Key:
    """A key, as of now."""

    reference: str
    value: str = field(repr=False)


@dataclass(slots=True)
class _Place:
    value: str | None = field(default=None, repr=False)
    refused: bool = False
    limited_until: float = -math.inf


class Keys:
    """The keys under these references, in order; without any there is the anonymous one."""

    def __init__(self, references: Iterable[str]) -> None:
        self._places = {reference: _Place() for reference in references}
        if not self._places:
            self._places[ANONYMOUS] = _Place("")

    @property
    def references(self) -> list[str]:
        """Those of real keys."""
        return [reference for reference in self._places if reference != ANONYMOUS]

    @property
    def values(self) -> list[str]:
        """All that are known."""
        return [place.value for place in self._places.values() if place.value]

    def know(self, values: Mapping[str, str]) -> None:
        """What was read now."""
        for reference, value in values.items():
            if self._places[reference].value != value:
                self._places[reference] = _Place(value)

    def ready_at(self, now: float, skip: Iterable[str] = ()) -> float:
        """When one of them may be used: ``now``, later, or never (``inf``)."""
        times = [place.limited_until for place in self._usable(skip).values()]
        return max(now, min(times, default=math.inf))

    def pick(self, now: float, skip: Iterable[str] = ()) -> Key | None:
        """The key to use, none of ``skip``; None if there is none now."""
        for reference, place in self._usable(skip).items():
            if place.limited_until <= now:
                assert place.value is not None
                return Key(reference, place.value)
        return None

    def refuse(self, key: Key) -> None:
        """The API does not know this key."""
        if self._places[key.reference].value == key.value:
            self._places[key.reference].refused = True

    def limit(self, key: Key, until: float) -> None:
        """The API wants no request with this key before that moment."""
        place = self._places[key.reference]
        if place.value == key.value:
            place.limited_until = max(place.limited_until, until)

    def states(self, now: float) -> dict[str, str]:
        """``ready``, ``limited``, ``refused`` or ``missing``, by reference."""
        return {reference: _state(self._places[reference], now) for reference in self.references}

    def _usable(self, skip: Iterable[str]) -> dict[str, _Place]:
        return {
            reference: place
            for reference, place in self._places.items()
            if place.value is not None and not place.refused and reference not in skip
        }


def _state(place: _Place, now: float) -> str:
    if place.value is None:
        return "missing"
    if place.refused:
        return "refused"
    return "limited" if place.limited_until > now else "ready"


def read_keys(references: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """The values under ``env:NAME`` and ``file:PATH``, and what is wrong with the others."""
    values, faults = {}, []
    for reference in references:
        place, _, name = reference.partition(":")
        try:
            value = key_in(os.environ[name] if place == "env" else _content(Path(name)))
        except KeyError:
            faults.append(f"{reference}: is not set")
        except (OSError, ValueError) as error:
            faults.append(f"{reference}: {getattr(error, 'strerror', None) or _fault(error)}")
        else:
            values[reference] = value
    return values, faults


def key_in(text: str) -> str:
    """The key that a text is, without the white space around it.

    Raises:
        ValueError: it is none; the message says nothing of it.
    """
    value = text.strip()
    if not value:
        raise ValueError("is empty")
    if len(value) > KEY_MAX or not all("!" <= letter <= "~" for letter in value):
        raise ValueError("is not a key: one line of printable characters without spaces")
    return value


def _fault(error: Exception) -> str:
    # That of a codec quotes the bytes.
    return "is not text" if isinstance(error, UnicodeError) else str(error)


def _content(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(KEY_MAX + 2).decode("ascii", errors="strict")
