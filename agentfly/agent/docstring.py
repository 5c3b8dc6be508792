"""Read the description and the arguments out of a Google-style docstring.

Guarantees:
1. The description is everything before the first section, unwrapped paragraph by paragraph.
2. Each argument's text is unwrapped to one line; ``name (type): text`` and ``name: text`` both work.
3. Any text is accepted: what does not look like an argument is left out.
"""

import inspect
import re
from dataclasses import dataclass
from itertools import pairwise

_SECTIONS = (
    "Args", "Arguments", "Parameters", "Returns", "Return", "Yields", "Raises", "Example", "Examples", "Note",
    "Notes", "Attributes", "Todo", "Warning", "Warnings", "See Also",
)  # fmt: skip
_SECTION = re.compile(rf"^({'|'.join(_SECTIONS)}):\s*$")
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True)
class Docstring:
    """``description`` may have several paragraphs; ``arguments`` maps a parameter's name to one line."""

    description: str
    arguments: dict[str, str]


def parse_docstring(text: str | None) -> Docstring:
    """Split a docstring; an absent one gives an empty description."""
    lines = inspect.cleandoc(text or "").splitlines()
    starts = [at for at, line in enumerate(lines) if _SECTION.match(line)]
    bounds = [*starts, len(lines)]
    description = "\n".join(lines[: bounds[0]])
    arguments: dict[str, str] = {}
    for at, end in pairwise(bounds):
        if lines[at].startswith(("Args", "Arguments", "Parameters")):
            arguments.update(_arguments(lines[at + 1 : end]))
    return Docstring(description=_unwrap(description), arguments=arguments)


def _unwrap(text: str) -> str:
    paragraphs = re.split(r"\n\s*\n", text.strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _arguments(lines: list[str]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    indent = next((len(line) - len(line.lstrip()) for line in lines if line.strip()), 0)
    current: list[str] | None = None
    for line in lines:
        match = _ARGUMENT.match(line.strip()) if len(line) - len(line.lstrip()) == indent else None
        if match:
            current = found.setdefault(match[1], [])
            current.append(match[2])
        elif current is not None and line.strip():
            current.append(line.strip())
    return {name: " ".join(part for part in parts if part) for name, parts in found.items()}
