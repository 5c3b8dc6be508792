"""YAML documents as plain values that remember the line of everything.

Guarantees:
1. Every key and list item has the line it was written on, also below anchors and merge keys.
2. Scalars mean what they mean to kubectl: 1e-6 is a number, dates and 12:30 are text, yes and off booleans.
3. What is not one mapping of unique keys per document is a flaw with its line and a remedy; other documents
   are read.
4. No input makes it recurse or grow without bound.
"""

import difflib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Where = tuple[str | int, ...]

MAX_NODES = 100_000
"""Nodes of one document after aliases are followed: far above any manifest, far below what fills memory."""
MAX_DEPTH = 64

_MERGE = "tag:yaml.org,2002:merge"
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Flaw:
    """Something wrong with the text itself. `line` counts from 1; None: the file as a whole."""

    line: int | None
    where: Where
    problem: str
    hints: tuple[str, ...]


@dataclass(frozen=True)
class Document:
    """One document: its value, and path -> line for everything in it."""

    line: int
    value: dict[str, Any]
    lines: dict[Where, int]


@dataclass
class Reading:
    """What a text gave."""

    documents: list[Document] = field(default_factory=list)
    flaws: list[Flaw] = field(default_factory=list)


class _Loader(yaml.SafeLoader):
    """Composes nodes; scalars are typed by the rules of this module instead of YAML 1.1."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML declares it so


for _tag, _pattern in (
    (_MERGE, r"<<"),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|"),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF"),
    ("tag:yaml.org,2002:int", r"[-+]?(0|[1-9][0-9]{0,30})"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    ),
):
    _Loader.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), None)


class Wrong(ValueError):
    """A text that cannot be used, with its flaw."""

    def __init__(self, flaw: Flaw) -> None:
        super().__init__(flaw.problem)
        self.flaw = flaw


def _too_large(line: int, where: Where) -> Flaw:
    hint = f"keep a document below {MAX_DEPTH} levels and {MAX_NODES} values"
    return Flaw(line, where, "is nested too deep or too large", (hint,))


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


class _Builder:
    """Turns the nodes of one document into a value."""

    def __init__(self) -> None:
        self.lines: dict[Where, int] = {}
        self.flaws: list[Flaw] = []
        self._nodes = 0

    def build(self, node: yaml.Node, where: Where) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES or len(where) > MAX_DEPTH:
            raise Wrong(_too_large(_line(node), where[:1]))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, where)
        if isinstance(node, yaml.SequenceNode):
            items = []
            for index, item in enumerate(node.value):
                self.lines[*where, index] = _line(item)
                items.append(self.build(item, (*where, index)))
            return items
        return self._scalar(node, where)

    def _mapping(self, node: yaml.MappingNode, where: Where) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for key, value in node.value:
            if key.tag == _MERGE:
                for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    merged = {**self._merge(source, where), **merged}
                continue
            name = self._key(key, where)
            if name in own:
                problem = f"is given twice; first on line {self.lines[*where, name]}"
                self.flaws.append(Flaw(_line(key), (*where, name), problem, ("remove one of the two",)))
                continue
            self.lines[*where, name] = _line(key)
            own[name] = self.build(value, (*where, name))
        return {**merged, **own}

    def _merge(self, source: yaml.Node, where: Where) -> dict[str, Any]:
        if not isinstance(source, yaml.MappingNode):
            hint = "give it the alias of a mapping, as in <<: *base"
            raise Wrong(Flaw(_line(source), where, "<< needs a mapping", (hint,)))
        inner = _Builder()
        inner._nodes = self._nodes
        value: dict[str, Any] = inner.build(source, where)
        self._nodes = inner._nodes
        self.flaws += inner.flaws
        self.lines = {**inner.lines, **self.lines}
        return value

    @staticmethod
    def _key(key: yaml.Node, where: Where) -> str:
        if not isinstance(key, yaml.ScalarNode):
            hints = ("put quotes around text that begins with { or [",)
            raise Wrong(Flaw(_line(key), where, "has a key that is a list or a mapping", hints))
        return str(key.value)

    @staticmethod
    def _scalar(node: yaml.Node, where: Where) -> Any:
        text = str(node.value)
        match node.tag.removeprefix("tag:yaml.org,2002:"):
            case "null":
                return None
            case "bool":
                return _BOOLEANS[text.lower()]
            case "int":
                return int(text)
            case "float":
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
            case "str":
                return text
            case tag:
                written = tag if tag.startswith("!") else f"!!{tag}"
                problem = f"has the tag {written}, which is not supported"
                raise Wrong(Flaw(_line(node), where, problem, (f"remove {written}",)))


_REMEDIES = (
    ("unknown escape character", "write \\\\ for each backslash between double quotes"),
    ("scanning an alias", "put quotes around text that begins with *"),
    ("scanning an anchor", "put quotes around text that begins with &"),
    ("flow mapping", "put , between its entries and } at its end"),
    ("flow sequence", "put , between its entries and ] at its end"),
    ("flow node", "end each { with } and each [ with ]"),
    ("<document start>", "begin the next document with ---"),
    ("quoted scalar", "end the text with the quote it begins with"),
    ("undefined alias", "put quotes around text that begins with *"),
    ("cannot start any token", "put quotes around the text that begins with this character"),
    ("could not find expected ':'", "put ': ' between the name of the field and its value"),
    ("", "indent it like the line above, or two spaces further for what belongs to that line"),
)
"""Part of what the parser says -> remedy; the first that fits."""


def _opening(node: yaml.Node, text: str) -> int:
    """The line of the `---` that begins an empty document: the node itself stands behind it."""
    lines = text.splitlines()[: node.start_mark.line]
    return next((n for n in range(len(lines), 0, -1) if lines[n - 1].startswith("---")), 1)


def _document(node: yaml.Node, number: int, text: str, reading: Reading) -> None:
    if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null"):
        hints = ("remove the --- that begins it",)
        reading.flaws.append(Flaw(_opening(node, text), (), f"document {number} is empty", hints))
        return
    if not isinstance(node, yaml.MappingNode):
        what = "a list" if isinstance(node, yaml.SequenceNode) else "text"
        hints = ("begin it with apiVersion: agentfly.dev/v1alpha1",)
        reading.flaws.append(Flaw(_line(node), (), f"document {number} is {what}, not an object", hints))
        return
    builder = _Builder()
    try:
        value = builder.build(node, ())
    except Wrong as wrong:
        reading.flaws += [*builder.flaws, wrong.flaw]
        return
    reading.flaws += builder.flaws
    reading.documents.append(Document(_line(node), value, builder.lines))


def _syntax(error: yaml.YAMLError, text: str) -> Flaw:
    lines = text.splitlines()
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        if mark.line >= len(lines) and error.context_mark is not None:
            mark = error.context_mark  # what is unfinished says more than where the file ends
        line = min(int(mark.line) + 1, max(len(lines), 1))
        written = lines[line - 1] if lines else ""
        if "\t" in written[: len(written) - len(written.lstrip())]:
            return Flaw(line, (), "is indented with a tab", ("use spaces",))
        reason = ": ".join(part for part in (error.context, error.problem) if part)
        return Flaw(line, (), f"not YAML: {reason}", (_mended(reason, written),))
    position = getattr(error, "position", 0)
    line = text.count("\n", 0, position) + 1
    problem = f"not YAML: character {ord(text[position]):#x} is not allowed"
    return Flaw(line, (), problem, ("remove the character",))


def _mended(reason: str, written: str) -> str:
    """The remedy for what the parser of YAML says about a line."""
    if "mapping values are not allowed" in reason and written.count(": ") > 1:
        return "put quotes around text that has ': ' inside"
    return next(remedy for part, remedy in _REMEDIES if part in reason)


def _nodes(text: str) -> Iterator[yaml.Node]:
    loader = _Loader(text)
    try:
        while (node := loader.get_node() if loader.check_node() else None) is not None:
            yield node
    finally:
        loader.dispose()


def read(text: str) -> Reading:
    """All documents of a text, with what is wrong with it as text. Never raises."""
    reading = Reading()
    try:
        for number, node in enumerate(_nodes(text), start=1):
            _document(node, number, text, reading)
    except yaml.YAMLError as error:
        reading.flaws.append(_syntax(error, text))
    except RecursionError:
        reading.flaws.append(_too_large(1, ()))
    if not reading.documents and not reading.flaws:
        hints = ("begin an object with apiVersion: agentfly.dev/v1alpha1",)
        reading.flaws.append(Flaw(None, (), "has no objects", hints))
    return reading


def read_file(path: Path) -> Reading:
    """The same for a file, which must be UTF-8."""
    try:
        data = path.read_bytes()
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        return Reading(flaws=[Flaw(None, (), problem, (_readable(path, error),))])
    try:
        return read(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = f"byte {data[error.start]:#04x} is not UTF-8"
        return Reading(flaws=[Flaw(line, (), problem, ("save the file as UTF-8",))])


def _readable(path: Path, error: OSError) -> str:
    """The remedy for a file that cannot be read."""
    if isinstance(error, PermissionError):
        return f"make it readable: chmod u+r {path}"
    if isinstance(error, IsADirectoryError):
        manifests = _beside(path)
        return f"name a file in it, such as {path / (manifests[0] if manifests else 'run.yaml')}"
    beside = {Path(name).stem: name for name in _beside(path.parent)}
    near = difflib.get_close_matches(path.stem, beside, n=1, cutoff=0.6)
    if near:
        return f"did you mean {path.with_name(beside[near[0]])}?"
    if not path.parent.is_dir():
        return f"name a file in a folder that exists; {path.parent.absolute()} does not"
    return f"name a file that is in {path.parent.absolute()}"


def _beside(folder: Path) -> list[str]:
    """The YAML files of a folder, by name."""
    try:
        return sorted(name for name in os.listdir(folder) if name.endswith((".yaml", ".yml")))
    except OSError:
        return []


def read_value(text: str) -> Any:
    """One YAML value, as on a command line. Raises Wrong when it is not one."""
    try:
        nodes = list(_nodes(text))
        return _Builder().build(nodes[0], ()) if nodes else None
    except yaml.YAMLError as error:
        raise Wrong(_syntax(error, text)) from None
    except RecursionError:
        raise Wrong(_too_large(1, ())) from None
