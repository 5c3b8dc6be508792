"""What is wrong with a manifest, in the words of the person who wrote it.

Guarantees:
1. A `ManifestError` prints as `file:line: path: value problem`; remedies follow as hints.
2. Every pattern of the API has a text of its own; a person never reads a regular expression.
3. Every complaint about a value has a remedy with the value to use; a misspelt field or value gets the
   nearest right one.
4. What is written in place of a reference to a key is not printed: it may be the key.
"""

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, get_args, get_origin

from annotated_types import Ge, Lt
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from agentfly.api import shape
from agentfly.api.base import NAME_PATTERN, RULES_BROKEN, ApiModel, Rule
from agentfly.api.common import ENTRYPOINT_PATTERN
from agentfly.api.pods import (
    CIDR_PATTERN,
    LABEL_KEY_PATTERN,
    LABEL_PATTERN,
    OBJECT_PATTERN,
    SECRET_KEY_PATTERN,
    VARIABLE_PATTERN,
)
from agentfly.api.pooltypes import URL_PATTERN
from agentfly.api.trainingrun import INTERFACE_PATTERN, OVERRIDE_PATTERN
from agentfly.api.tree import Where
from agentfly.errors import AgentflyError

NOTHING = object()
"""The value of a complaint about what is absent, or too large to print."""

PATTERNS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    NAME_PATTERN: (
        "is not a name",
        ("begin with a lower case letter, then use those, digits and '-' inside",),
    ),
    ENTRYPOINT_PATTERN: (
        "is not a reference to Python",
        ("write file.py:name or package.module:name, as in agent.py:agent",),
    ),
    INTERFACE_PATTERN: ("is not the name of a network interface", ("write one, as in eth0",)),
    OVERRIDE_PATTERN: ("is not an override", ("write key=value, as in trainer.total_epochs=3",)),
    "^/": ("is not an absolute path", ("begin it with /",)),
    URL_PATTERN: ("is not the address of an HTTP API", ("begin it with https:// or http://",)),
    OBJECT_PATTERN: ("is not a name of Kubernetes", ("use lower case letters, digits, '-' and '.' inside",)),
    LABEL_KEY_PATTERN: ("is not a key of Kubernetes", ("write it as in example.com/team",)),
    LABEL_PATTERN: ("is not the value of a label", ("use letters, digits, and '-', '_' and '.' inside",)),
    SECRET_KEY_PATTERN: ("is not a key of a Secret", ("use letters, digits, '-', '_' and '.'",)),
    CIDR_PATTERN: ("is not a range of addresses", ("write address/length, as in 10.20.0.0/16",)),
    VARIABLE_PATTERN: ("is not the name of an environment variable", ("use letters, digits and _",)),
}
_TYPES = {
    "int_type": "is not a whole number",
    "float_type": "is not a number",
    "bool_type": "is not true or false",
    "string_type": "is not text",
    "string_unicode": "is not text in Unicode",
    "dict_type": "is not a mapping",
    "model_type": "is not a mapping",
    "tuple_type": "is not a list",
}
_BOUNDS = {
    "greater_than_equal": ("is less than {ge}", "use {ge} or more"),
    "greater_than": ("is not more than {gt}", "use more than {gt}, such as {sample}"),
    "less_than_equal": ("is more than {le}", "use {le} or less"),
    "less_than": ("is not less than {lt}", "use less than {lt}, such as {sample}"),
    "string_too_short": ("is empty", "{text}"),
    "string_too_long": ("is longer than {max_length} characters", "use {max_length} characters or less"),
    "too_long": ("has {length} entries, more than {max_length}", "keep {max_length} entries or less"),
    "finite_number": ("is not a finite number", "write a number, such as {sample}"),
}
"""Type of error -> problem and remedy."""
_LONGEST = 60
_KEYS = ("credentials", "hubToken", "valueFrom")
"""Fields below which a key may stand where a reference to it should."""


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
        hidden = self.value is NOTHING or any(f".{name}" in self.path for name in _KEYS)
        what = self.problem if hidden else f"{shown(self.value)} {self.problem}"
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
    """Hint for a word that is none of `words`; none if there are no words."""
    known = list(words)
    near = nearest(word, known)
    if near is not None:
        return (f"did you mean {near}?",)
    return (_one_of(known),) if known else ()


def sample(model: type[ApiModel], where: Where) -> str:
    """A value that the field at a path may have, as YAML: its default, or the smallest, or a word."""
    info, inner = _field(model, where), shape.bare(shape.below(model, where))
    default = info.default if info is not None else None
    if _plain(default):
        return shown(int(default) if isinstance(default, float) and default.is_integer() else default)
    if inner in (int, float):
        limits = info.metadata if info is not None else []
        smallest = [limit.ge for limit in limits if isinstance(limit, Ge)]
        below = [limit.lt for limit in limits if isinstance(limit, Lt)]
        return shown(smallest[0] if smallest else 0.5 if 1 in below else 1)
    if get_origin(inner) is Literal:
        return shown(get_args(inner)[0])
    if get_origin(inner) is tuple:
        return "[a, b]"
    return "true" if inner is bool else "text"


def explain(error: ErrorDetails, model: type[ApiModel]) -> Iterator[Complaint]:
    """The complaints in one error of pydantic about a `model`."""
    where: Where = tuple(error["loc"])
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == RULES_BROKEN:
        block = shape.model_of(shape.below(model, where)) or model
        yield from (_broken(where, value, rule, block) for rule in context["broken"])
    elif kind == "missing":
        hint = f"add {where[-1]}: {_described(model, where)}"
        yield Complaint(where, NOTHING, "is missing", (hint,))
    elif kind == "extra_forbidden":
        owner = shape.model_of(shape.below(model, where[:-1])) or model
        yield Complaint(where, NOTHING, "is not a known field", instead(str(where[-1]), shape.fields(owner)))
    elif kind in _TYPES:
        yield Complaint(where, _quoted(value), _TYPES[kind], (_retyped(kind, value, model, where),))
    elif kind in _BOUNDS:
        yield _bounded(where, value, model, kind, context)
    elif kind in ("literal_error", "enum"):
        allowed = [word.strip("'") for word in context["expected"].replace(" or ", ", ").split(", ")]
        hints = instead(value if isinstance(value, str) else "", allowed)
        yield Complaint(where, value, f"is not one of {', '.join(allowed)}", hints)
    elif kind == "string_pattern_mismatch":
        plain = (f"does not match {context['pattern']}", (_text(model, where),))
        yield Complaint(where, value, *PATTERNS.get(context["pattern"], plain))
    elif kind == "quantity":
        yield Complaint(where, _scalar(value), error["msg"], (context["hint"],))
    elif kind == "duplicate_items":
        yield Complaint(where, NOTHING, error["msg"], (f"write {context['items']} once",))
    elif kind.startswith(("datetime_", "timezone_")):
        hint = "write it as 2026-01-31T12:00:00Z"
        yield Complaint(where, value, "is not a time with its zone", (hint,))
    else:
        hint = f"write what it is for: {_described(model, where)}"
        yield Complaint(where, value, f"is refused: {error['msg']}", (hint,))


def _broken(where: Where, block: Any, rule: Rule, model: type[ApiModel]) -> Complaint:
    hints = (rule.hint,) if rule.hint else ()
    if not rule.field:
        return Complaint(where, NOTHING, rule.problem, hints)
    # A default can break a rule as well as a written value: show the number that was compared.
    value = block.get(rule.field) if isinstance(block, Mapping) else None
    if value is None:
        value = shape.fields(model)[rule.field].default
    return Complaint((*where, rule.field), _scalar(value), rule.problem, hints)


def _bounded(
    where: Where, value: Any, model: type[ApiModel], kind: str, context: Mapping[str, Any]
) -> Complaint:
    words = {
        name: int(limit) if isinstance(limit, float) and limit.is_integer() else limit
        for name, limit in context.items()
    }
    words |= {"sample": sample(model, where), "text": _text(model, where)}
    if kind == "too_long":
        words["length"] = len(value)
    problem, hint = (text.format(**words) for text in _BOUNDS[kind])
    return Complaint(where, _scalar(value), problem, (hint,))


def _scalar(value: Any) -> Any:
    return value if _plain(value) else NOTHING


def _field(model: type[ApiModel], where: Where) -> FieldInfo | None:
    """The field at a path; None for items of lists, values of maps and the document."""
    owner = shape.model_of(shape.below(model, where[:-1])) if where else None
    return shape.fields(owner).get(str(where[-1])) if owner is not None else None


def _described(model: type[ApiModel], where: Where) -> str:
    """What the field at a path is, or the field that a list or map at its end belongs to: one sentence."""
    info = next(
        (info for length in range(len(where), 0, -1) if (info := _field(model, where[:length])) is not None),
        None,
    )
    return (info.description or "" if info is not None else "").partition(". ")[0].rstrip(".")


def _text(model: type[ApiModel], where: Where) -> str:
    """The remedy where text should stand: the default, or what the text is."""
    info = _field(model, where)
    if info is not None and isinstance(info.default, str):
        return f"write text, such as {info.default}"
    return f"write text: {_described(model, where)}"


def _one_of(words: list[str]) -> str:
    return f"use one of {', '.join(words)}" if len(words) > 1 else f"use {words[0]}"


def _quoted(value: Any) -> Any:
    """Text with its quotes: that it is text is the complaint."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else value


def _retyped(kind: str, value: Any, model: type[ApiModel], where: Where) -> str:
    """The remedy for a value of a wrong type."""
    if isinstance(value, str) and _means(kind, value.strip()):
        return f"write {value.strip()} without quotes"
    if kind == "string_type" and _plain(value):
        return f'write "{shown(value)}" in quotes' if not set(_KEYS) & set(where) else "write it in quotes"
    if kind == "tuple_type" and _plain(value):
        return f"write [{shown(value)}]"
    if kind == "model_type":
        return _block(model, where)
    return {
        "int_type": f"write a whole number, such as {sample(model, where)}",
        "float_type": f"write a number, such as {sample(model, where)}",
        "bool_type": "write true or false",
        "string_type": _text(model, where),
        "string_unicode": _text(model, where),
        "dict_type": "write a mapping, such as {name: text}",
        "tuple_type": "begin each entry with '- '",
    }[kind]


def _means(kind: str, text: str) -> bool:
    """Whether a text without its quotes would have the type."""
    digits = text.removeprefix("-")
    return (
        (kind == "bool_type" and text in ("true", "false"))
        or (kind in ("int_type", "float_type") and digits.isdecimal())
        or (kind == "float_type" and digits.replace(".", "", 1).isdecimal())
    )


def _block(model: type[ApiModel], where: Where) -> str:
    """The remedy where a block should stand: the form that its description gives, or its first fields."""
    form = re.search(r"as (\{.*\})", _described(model, where))
    if form is not None:
        return f"write {form[1]}"
    block = shape.model_of(shape.below(model, where)) or model
    known = shape.fields(block)
    names = [name for name, info in known.items() if info.is_required()]
    if names:
        return f"write a mapping with {' and '.join(names)}"
    name = next((name for name in known if _plain(known[name].default)), next(iter(known)))
    return f"write a mapping, such as {{{name}: {sample(block, (name,))}}}"


def _plain(value: Any) -> TypeGuard[str | int | float]:
    return isinstance(value, str | int | float)
