"""`--set path=value`: one field of one object, changed on the command line.

Guarantees:
1. The path is checked against the model before anything is changed; what is wrong with it gets a remedy.
2. Blocks that the manifest left out are made on the way. null removes the field.
"""

import re
from dataclasses import dataclass
from typing import Any

from agentfly.api import shape, tree
from agentfly.api.base import ApiModel
from agentfly.api.problems import NOTHING, Complaint, instead, path_text, sample
from agentfly.api.tree import Flaw, Where, Wrong

_FORM = ("write path=value, as in steps=30",)
_POOL = re.compile(r"pool/(?P<name>[^.]+)\.(?P<path>.+)")


@dataclass(frozen=True)
class Assignment:
    """A value for the field at `where`; `flag` is the text that people see in errors."""

    flag: str
    where: Where
    value: Any

    def complaint(self, model: type[ApiModel]) -> Complaint | None:
        """What is wrong with the path for an object of this kind."""
        for length in range(1, len(self.where) + 1):
            if shape.below(model, self.where[:length]) is not None:
                continue
            above = shape.below(model, self.where[: length - 1])
            owner = shape.model_of(above)
            if owner is None:
                where = self.where[: length - 1]
                hint = f"set {path_text(where)} itself, to a value such as {sample(model, where)}"
                return Complaint(where, NOTHING, "has no fields that can be set", (hint,))
            known = shape.fields(owner)
            return Complaint(
                self.where[:length],
                NOTHING,
                "is not a known field",
                instead(str(self.where[length - 1]), known),
            )
        return None


def parse(text: str) -> tuple[str | None, Where, Any]:
    """`path=value` as (name of a pool or None for the run or job, path from the root, value).

    Raises Wrong for what has another form.
    """
    path, equals, written = text.partition("=")
    if not equals or not path:
        raise Wrong(Flaw(None, (), "is not path=value", _FORM))
    found = _POOL.fullmatch(path)
    pool, path = (found["name"], found["path"]) if found else (None, path)
    parts = path.removeprefix("spec.").split(".")
    if "/" in path or not all(parts):
        raise Wrong(Flaw(None, (), f"{path} is not a path of fields joined by dots", _FORM))
    return pool, ("spec", *parts), tree.read_value(written)


def assign(root: dict[str, Any], where: Where, value: Any) -> None:
    """Set the field at `where`, in place; blocks on the way are made, and replace what is no block."""
    node = root
    for part in where[:-1]:
        below = node.get(str(part))
        if not isinstance(below, dict):
            below = node[str(part)] = {}
        node = below
    if value is None:
        node.pop(str(where[-1]), None)
    else:
        node[str(where[-1])] = value
