"""What is wrong with a manifest, in the words of the person who wrote it.

Guarantees:
1. A `ManifestError` prints as `file:line: path: value problem`; remedies follow as hints.
2. Every pattern of the API has a text of its own; a person never reads a regular expression.
3. A misspelt field or value gets the nearest right one as hint.
"""

import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import ErrorDetails

from agentfly.api import shape
from agentfly.api.base import NAME_PATTERN, RULES_BROKEN, ApiModel, Rule
from agentfly.api.common import ENTRYPOINT_PATTERN
from agentfly.api.trainingrun import OVERRIDE_PATTERN
from agentfly.api.tree import Where
from agentfly.errors import AgentflyError

NOTHING = object()
"""The value of a complaint about what is absent, or too large to print."""

PATTERNS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    NAME_PATTERN: ("is not a name", ("use lower case letters, digits and '-' inside",)),
    ENTRYPOINT_PATTERN: (
        "is not a reference to Python",
        ("write file.py:name or package.module:name, as in agent.py:agent",),
    ),
    OVERRIDE_PATTERN: ("is not an override", ("write key=value, as in trainer.total_epochs=3",)),
    "^/": ("is not an absolute path", ("begin it with /",)),
}
_TYPES = {
    "int_type": "is not a whole number",
    "float_type": "is not a number",
    "bool_type": "is not true or false",
    "string_type": "is not text",
    "dict_type": "is not a mapping",
    "model_type": "is not a mapping",
    "tuple_type": "is not a list",
}
_BOUNDS = {
    "greater_than_equal": "is less than {ge:g}",
    "greater_than": "is not more than {gt:g}",
    "less_than_equal": "is more than {le:g}",
    "less_than": "is not less than {lt:g}",
    "string_too_short": "is empty",
    "string_too_long": "is longer than {max_length} characters",
    "too_long": "has more than {max_length} entries",
    "finite_number": "is not a finite number",
}
_LONGEST = 60


@dataclass(frozen=True)
class ManifestError:
    """One thing wrong.

    Args:
        file: the manifest as the caller named it, or the flag (`--set steps=0`) that brought the value.
        line: from 1; None when it concerns a flag or the file as a whole.
        path: field as in `spec.pools[0]`; empty for the document.
        value: what was written, or `NOTHING`.
        problem: predicate of value, or of path when there is no value.
        hints: remedies.
    """

    file: str
    line: int | None
    path: str
    value: Any
    problem: str
    hints: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        what = self.problem if self.value is NOTHING else f"{shown(self.value)} {self.problem}"
        return ": ".join(part for part in (place, self.path, what) if part)

    def render(self) -> str:
        """The text and its hints, one a line."""
        return "\n".join([str(self), *(f"  hint: {hint}" for hint in self.hints)])


class InvalidManifests(AgentflyError):
    """All that is wrong, in the order of the file."""

    def __init__(self, errors: Iterable[ManifestError]) -> None:
        self.errors = tuple(errors)
        super().__init__(
            "\n".join(str(error) for error in self.errors),
            hints=[hint for error in self.errors for hint in error.hints],
        )

    def render(self) -> str:
        """Each error followed by its hints."""
        return "\n".join(error.render() for error in self.errors)


@dataclass(frozen=True)
class Complaint:
    """One thing wrong with a value, before it is known where the value was written."""

    where: Where
    value: Any
    problem: str
    hints: tuple[str, ...] = ()


def shown(value: Any) -> str:
    """A value as it would stand in YAML, shortened."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, str) and value and value == value.strip():
        text = value
    elif isinstance(value, float) and not math.isfinite(value):
        text = f".{value}".replace(".-", "-.")
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def path_text(where: Where) -> str:
    """`("spec", "pools", 0)` as `spec.pools[0]`."""
    text = ""
    for part in where:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The right spelling of a word, if one is near."""
    plain = {known.casefold().replace("_", "").replace("-", ""): known for known in words}
    found = difflib.get_close_matches(
        word.casefold().replace("_", "").replace("-", ""), plain, n=1, cutoff=0.7
    )
    return plain[found[0]] if found else None


def instead(word: str, words: Iterable[str]) -> tuple[str, ...]:
    """Hint for a word that is none of `words`."""
    known = list(words)
    near = nearest(word, known)
    if near is not None:
        return (f"did you mean {near}?",)
    return (f"use one of {', '.join(known)}",) if known else ()


def explain(error: ErrorDetails, model: type[ApiModel]) -> Iterator[Complaint]:
    """The complaints in one error of pydantic about a `model`."""
    where: Where = tuple(error["loc"])
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == RULES_BROKEN:
        block = shape.model_of(shape.below(model, where)) or model
        yield from (_broken(where, value, rule, block) for rule in context["broken"])
    elif kind == "missing":
        info = shape.fields(shape.model_of(shape.below(model, where[:-1])) or model)[str(where[-1])]
        yield Complaint(where, NOTHING, "is missing", (f"add {where[-1]}: {_sentence(info.description)}",))
    elif kind == "extra_forbidden":
        owner = shape.model_of(shape.below(model, where[:-1])) or model
        yield Complaint(where, NOTHING, "is not a known field", instead(str(where[-1]), shape.fields(owner)))
    elif kind in _TYPES:
        yield Complaint(where, _quoted(value), _TYPES[kind], _retyped(kind, value))
    elif kind in _BOUNDS:
        yield Complaint(where, _scalar(value), _BOUNDS[kind].format(**context))
    elif kind in ("literal_error", "enum"):
        allowed = [word.strip("'") for word in context["expected"].replace(" or ", ", ").split(", ")]
        yield Complaint(where, value, f"is not one of {', '.join(allowed)}", _close(value, allowed))
    elif kind == "string_pattern_mismatch":
        problem, hints = PATTERNS.get(context["pattern"], (f"does not match {context['pattern']}", ()))
        yield Complaint(where, value, problem, hints)
    elif kind in ("quantity", "duplicate_items"):
        hint = context.get("hint")
        yield Complaint(where, _scalar(value), error["msg"], (hint,) if hint else ())
    else:
        yield Complaint(where, value, f"is refused: {error['msg']}")


def _broken(where: Where, block: Any, rule: Rule, model: type[ApiModel]) -> Complaint:
    hints = (rule.hint,) if rule.hint else ()
    if not rule.field:
        return Complaint(where, NOTHING, rule.problem, hints)
    # A default can break a rule as well as a written value: show the number that was compared.
    value = block.get(rule.field) if isinstance(block, Mapping) else None
    if value is None:
        value = shape.fields(model)[rule.field].default
    return Complaint((*where, rule.field), _scalar(value), rule.problem, hints)


def _scalar(value: Any) -> Any:
    return value if isinstance(value, str | int | float) else NOTHING


def _sentence(description: str | None) -> str:
    """The first sentence, without its full stop."""
    return (description or "").partition(". ")[0].rstrip(".")


def _close(value: Any, allowed: list[str]) -> tuple[str, ...]:
    near = nearest(value, allowed) if isinstance(value, str) else None
    return (f"did you mean {near}?",) if near else ()


def _quoted(value: Any) -> Any:
    """Text with its quotes: that it is text is the complaint."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else value


def _retyped(kind: str, value: Any) -> tuple[str, ...]:
    if kind == "string_type" and isinstance(value, bool | int | float):
        return (f'write "{shown(value)}" in quotes',)
    if kind in ("int_type", "float_type", "bool_type") and isinstance(value, str):
        number = value.strip().removeprefix("-").replace(".", "", 1).isdigit()
        if number or value.strip() in ("true", "false"):
            return (f"write {value.strip()} without quotes",)
    if kind == "tuple_type" and not isinstance(value, Mapping):
        return (f"write [{shown(value)}]",)
    return ()
