"""Everything about a manifest that can be wrong and can be found before anything is started.

Guarantees:
1. What the manifest says is checked first, then what it names: the agent is imported, its tasks are looked
   at, the model's folder is looked into.
2. Nothing is started and nothing is written.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from agentfly.agent import Agent
from agentfly.api import Metadata, ResourcePool, RolloutJob, TrainingRun
from agentfly.api.base import NAME_MAX
from agentfly.api.load import Manifests, load_manifests
from agentfly.api.problems import NOTHING, InvalidManifests, ManifestError
from agentfly.errors import AgentflyError
from agentfly.refs import ReferenceFailed, load

Kind = TypeVar("Kind", TrainingRun, RolloutJob)


@dataclass(frozen=True)
class Work(Generic[Kind]):
    """What is to be run: the object, the pools it names, and the folder its paths are relative to."""

    run: Kind
    pools: tuple[ResourcePool, ...]
    base_dir: Path


def training_run(file: Path, sets: Sequence[str], name: str | None) -> Work[TrainingRun]:
    """The one TrainingRun of a file.

    Raises:
        AgentflyError: something is wrong with the manifest or with what it names.
    """
    manifests = load_manifests(file, sets)
    return _checked(file, manifests, manifests.runs, "TrainingRun", name)


def rollout_job(file: Path, sets: Sequence[str], name: str | None) -> Work[RolloutJob]:
    """The one RolloutJob of a file; raises as `training_run` does."""
    manifests = load_manifests(file, sets)
    return _checked(file, manifests, manifests.jobs, "RolloutJob", name)


def _renamed(work: Kind, name: str) -> Kind:
    try:
        metadata = Metadata.model_validate({**work.metadata.to_json(), "name": name})
    except ValidationError:
        raise AgentflyError(
            f"--name: {name} is not a name",
            hints=[f"use at most {NAME_MAX} lower case letters, digits and '-' inside"],
        ) from None
    return work.model_copy(update={"metadata": metadata})


def _checked(
    file: Path, manifests: Manifests, found: tuple[Kind, ...], kind: str, name: str | None
) -> Work[Kind]:
    if len(found) != 1:
        raise InvalidManifests(
            [
                ManifestError(
                    str(file),
                    None,
                    "",
                    NOTHING,
                    f"has {len(found)} objects of kind {kind}; exactly one can be run",
                    (f"keep one {kind} in the file, beside its ResourcePools",),
                )
            ]
        )
    work, base = found[0] if name is None else _renamed(found[0], name), manifests.base
    agent = _load("spec.agent.entrypoint", work.spec.agent.entrypoint, base)
    if not isinstance(agent, Agent):
        raise AgentflyError(
            f"spec.agent.entrypoint: {work.spec.agent.entrypoint} is of type {type(agent).__name__}, "
            "not an agentfly.Agent",
            hints=["point it at the variable that holds Agent(...)"],
        )
    _check_tasks(work, base)
    _check_model(work, base)
    used = tuple(pool for pool in manifests.pools if pool.metadata.name in work.spec.pools)
    return Work(work, used, base)


def _load(field: str, reference: str, base: Path) -> Any:
    """What a field refers to; an error names the field."""
    try:
        return load(reference, base)
    except ReferenceFailed as error:
        place = reference.rpartition(":")[0]
        run = base / place if place.endswith(".py") else f"-c 'import {place}'"
        hints = error.hints or (f"`python {run}` shows the whole traceback",)
        raise AgentflyError(f"{field}: {error.message}", hints=hints) from error


def _check_tasks(work: TrainingRun | RolloutJob, base: Path) -> None:
    entrypoint = work.spec.tasks.entrypoint
    if entrypoint is None:
        return
    make = _load("spec.tasks.entrypoint", entrypoint, base)
    hints = ["define it as def tasks(seed: int) -> Iterator[dict]"]
    if not callable(make):
        raise AgentflyError(
            f"spec.tasks.entrypoint: {entrypoint} is of type {type(make).__name__}, not a function",
            hints=hints,
        )
    try:
        inspect.signature(make).bind(seed=0)
    except TypeError as error:
        raise AgentflyError(
            f"spec.tasks.entrypoint: {entrypoint} cannot be called with seed=0: {error}", hints=hints
        ) from None


def _check_model(work: TrainingRun | RolloutJob, base: Path) -> None:
    if work.spec.model.path is None:
        return
    path = base / work.spec.model.path
    if not (path / "config.json").is_file():
        raise AgentflyError(
            f"spec.model.path: {path} is no model in Hugging Face layout: it has no config.json",
            hints=["name a folder that save_pretrained wrote, with its tokenizer"],
        )
