"""Manifests: from a file with YAML documents to checked objects.

Guarantees:
1. All errors of a file are reported together, each with file, line, path, value and remedies.
2. A value that came from a `--set` flag is reported under the flag, never under a line of the file.
3. What the API server refuses is refused here; beyond that, pools that a run names must stand in the file,
   and files and directories that it names must exist.
4. Nothing that a manifest names is executed or imported.

Paths in manifests and in flags are relative to the manifest's directory.
"""

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentfly.api import tree
from agentfly.api.base import API_VERSION, ApiModel
from agentfly.api.problems import (
    NOTHING,
    Complaint,
    InvalidManifests,
    ManifestError,
    explain,
    instead,
    nearest,
    path_text,
)
from agentfly.api.resourcepool import ResourcePool
from agentfly.api.rolloutjob import RolloutJob
from agentfly.api.sets import Assignment, assign, parse
from agentfly.api.trainingrun import TrainingRun
from agentfly.api.tree import Where

MODELS: Mapping[str, type[ApiModel]] = {
    "ResourcePool": ResourcePool,
    "RolloutJob": RolloutJob,
    "TrainingRun": TrainingRun,
}

NO_MODEL = "no-model"
"""Stands for the path of a model that a RolloutJob leaves out, because an API is its policy."""


@dataclass(frozen=True)
class Manifests:
    """The objects of a file, in its order; `base` is the directory that relative paths start from."""

    base: Path
    pools: tuple[ResourcePool, ...]
    runs: tuple[TrainingRun, ...]
    jobs: tuple[RolloutJob, ...]


@dataclass
class _Draft:
    """One object on its way: the document, what flags changed in it, and the model once it is valid."""

    document: tree.Document
    kind: str
    model: type[ApiModel]
    flags: dict[Where, str] = field(default_factory=dict)
    wrong: set[Where] = field(default_factory=set)
    obj: ApiModel | None = None

    @property
    def key(self) -> tuple[str, Any, Any]:
        """Kind, namespace and name, as written."""
        return self.kind, self.at("metadata", "namespace"), self.at("metadata", "name")

    def at(self, *where: str | int) -> Any:
        """What is written at a path, or None."""
        value: Any = self.document.value
        for part in where:
            inside = isinstance(value, dict) if isinstance(part, str) else isinstance(value, list)
            value = None if not inside else value.get(part) if isinstance(part, str) else value[part]
        return value

    def text(self, *where: str | int) -> str | None:
        """The same if it is text that validation did not complain about."""
        value = self.at(*where)
        return value if isinstance(value, str) and where not in self.wrong else None

    def set(self, assignment: Assignment) -> None:
        assign(self.document.value, assignment.where, assignment.value)
        self.flags[assignment.where] = assignment.flag

    def error(self, file: str, complaint: Complaint) -> ManifestError:
        """The complaint with its place: the flag that set the field or a block above it, else a line."""
        above = [complaint.where[:length] for length in range(len(complaint.where), 0, -1)]
        flag = next((self.flags[where] for where in above if where in self.flags), None)
        lines = self.document.lines
        line = next((lines[where] for where in above if where in lines), self.document.line)
        return ManifestError(
            flag or file,
            None if flag else line,
            path_text(complaint.where),
            complaint.value,
            complaint.problem,
            complaint.hints,
        )


def load_manifests(
    path: Path | str, sets: Sequence[str] = (), kind: str | None = None, *, models: bool = True
) -> Manifests:
    """Read, change by `--set` flags and check the manifests in a file.

    Args:
        path: the file. Its name is shown in errors as given.
        sets: `path=value` each, as after `--set`: `model.path=/models/q` for the run or job of the file
            (`spec.` in front is allowed), `pool/shell.capacity.max=4` for a pool. The value is YAML; null
            removes the field.
        kind: which object `path=value` is for, TrainingRun or RolloutJob; None: the one that there is.
        models: False where nobody loads one: no folder is looked for, and a RolloutJob needs no model.

    Raises:
        InvalidManifests: with all errors.
    """
    file, path = str(path), Path(path)
    base = path.resolve().parent
    reading = tree.read_file(path)
    errors = [ManifestError(file, flaw.line, path_text(flaw.where), NOTHING, flaw.problem, flaw.hints)
              for flaw in reading.flaws]  # fmt: skip
    drafts: list[_Draft] = []
    for document in reading.documents:
        draft = _recognise(document, file, errors)
        if draft is not None:
            drafts.append(draft)
    for text in sets:
        errors += _apply(text, drafts, kind)
    for draft in drafts:
        if not models and draft.kind == "RolloutJob" and isinstance(spec := draft.at("spec"), dict):
            spec.setdefault("model", {"path": NO_MODEL})
        errors += [draft.error(file, complaint) for complaint in _validate(draft)]
    for index, draft in enumerate(drafts):
        earlier = drafts[:index]
        complaints = [*_repeated(draft, earlier), *_dangling(draft, drafts, base, models)]
        errors += [draft.error(file, complaint) for complaint in complaints]
    if errors:
        raise InvalidManifests(sorted(errors, key=lambda error: (error.line is None, error.line or 0)))
    return Manifests(
        base=base,
        pools=tuple(draft.obj for draft in drafts if isinstance(draft.obj, ResourcePool)),
        runs=tuple(draft.obj for draft in drafts if isinstance(draft.obj, TrainingRun)),
        jobs=tuple(draft.obj for draft in drafts if isinstance(draft.obj, RolloutJob)),
    )


def _recognise(document: tree.Document, file: str, errors: list[ManifestError]) -> _Draft | None:
    """The draft of a document with a known apiVersion and kind; other documents are complained about."""
    wanted = (("apiVersion", [API_VERSION]), ("kind", list(MODELS)))
    before = len(errors)
    for name, known in wanted:
        value = document.value.get(name)
        line = document.lines.get((name,), document.line)
        if value is None:
            hint = f"add {name}: {known[0]}" if len(known) == 1 else f"add {name}: one of {', '.join(known)}"
            errors.append(ManifestError(file, line, name, NOTHING, "is missing", (hint,)))
        elif value not in known:
            hints = instead(value if isinstance(value, str) else "", known)
            errors.append(ManifestError(file, line, name, value, "is not known here", hints))
    if len(errors) > before:
        return None
    kind = document.value["kind"]
    return _Draft(document, kind, MODELS[kind])


def _apply(text: str, drafts: Sequence[_Draft], kind: str | None) -> list[ManifestError]:
    """Carry one flag out; what is wrong with the flag itself is returned."""
    flag = f"--set {text}"
    try:
        target, path, value = parse(text)
    except tree.Wrong as wrong:
        return [ManifestError(flag, None, "", NOTHING, wrong.flaw.problem, wrong.flaw.hints)]
    if target is None:
        kinds = ("TrainingRun", "RolloutJob") if kind is None else (kind,)
        found = [draft for draft in drafts if draft.kind in kinds]
        what = " or ".join(kinds)
    else:
        found = [draft for draft in drafts if draft.kind == "ResourcePool" and draft.key[2] == target]
        what = f"ResourcePool {target}"
    if len(found) != 1:
        names = [str(draft.key[2]) for draft in drafts if draft.kind == "ResourcePool"]
        hints = instead(target, names) if target is not None and not found else ()
        hint = f"keep one {what} in the file" if found else f"add a {what} to the file"
        problem = f"the file has {len(found) or 'no'} {what}"
        return [ManifestError(flag, None, "", NOTHING, problem, hints or (hint,))]
    draft = found[0]
    assignment = Assignment(flag, path, value)
    complaint = assignment.complaint(draft.model)
    if complaint is not None:
        where = path_text(complaint.where)
        return [ManifestError(flag, None, where, NOTHING, complaint.problem, complaint.hints)]
    draft.set(assignment)
    return []


def _validate(draft: _Draft) -> Iterator[Complaint]:
    try:
        draft.obj = draft.model.model_validate(draft.document.value, by_alias=True, by_name=False)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            for complaint in explain(each, draft.model):
                draft.wrong.add(complaint.where)
                yield complaint


def _repeated(draft: _Draft, earlier: Sequence[_Draft]) -> Iterator[Complaint]:
    name = draft.key[2]
    for other in earlier:
        if other.key == draft.key and isinstance(name, str):
            line = other.document.lines.get(("metadata", "name"), other.document.line)
            problem = f"is the name of another {draft.kind}, on line {line}"
            yield Complaint(("metadata", "name"), name, problem, ("give it another name",))
            return


def _dangling(draft: _Draft, drafts: Sequence[_Draft], base: Path, models: bool) -> Iterator[Complaint]:
    """What a run or job names and what is not there. Fields that are wrong already are passed over."""
    if draft.kind == "ResourcePool":
        return
    pools = [str(other.key[2]) for other in drafts if other.key[:2] == ("ResourcePool", draft.key[1])]
    names = draft.at("spec", "pools")
    for index in range(len(names) if isinstance(names, list) else 0):
        name = draft.text("spec", "pools", index)
        if name is not None and name not in pools:
            near = nearest(name, pools)
            hint = f"did you mean {near}?" if near else f"add a ResourcePool named {name} to the file"
            yield Complaint(("spec", "pools", index), name, "is no ResourcePool of this file", (hint,))
    yield from _reference(draft, ("spec", "agent", "entrypoint"), base)
    yield from _reference(draft, ("spec", "tasks", "entrypoint"), base)
    yield from _file(("spec", "tasks", "path"), draft.text("spec", "tasks", "path"), base)
    if not models:
        return
    model = draft.text("spec", "model", "path")
    if model is None:
        script = ("spec", "model", "build", "script")
        yield from _file(script, draft.text(*script), base)
    elif not os.path.isdir(base / model):
        problem = f"is not a directory (looked at {base / model})"
        hints = ("give a directory in Hugging Face layout, or remove path and set build",)
        yield Complaint(("spec", "model", "path"), model, problem, hints)


def _reference(draft: _Draft, where: Where, base: Path) -> Iterator[Complaint]:
    entrypoint = draft.text(*where)
    if entrypoint is None:
        return
    module = entrypoint.rpartition(":")[0]
    if module.endswith(".py"):
        yield from _file(where, module, base)
    elif not _importable(module.partition(".")[0]):
        hint = "install it, or write file.py:name for a file beside the manifest"
        yield Complaint(where, module, "is no module that Python finds", (hint,))


def _importable(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module such as __main__ that was not found by the import system
        return False


def _file(where: Where, name: str | None, base: Path) -> Iterator[Complaint]:
    # os.path, because pathlib raises for a name that is too long.
    if name is None or os.path.isfile(base / name):
        return
    try:
        beside = os.listdir((base / name).parent)
    except OSError:
        beside = []
    near = nearest(Path(name).name, beside)
    hint = f"did you mean {Path(name).with_name(near)}?" if near else f"name a file, by its path from {base}"
    yield Complaint(where, name, f"is not a file (looked at {base / name})", (hint,))
