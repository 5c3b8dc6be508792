"""Everything about a manifest that can be wrong and can be found before anything is started.

Guarantees:
1. What the manifest says is checked first, also by the models of what its roles will read: a manifest that
   is let through gives a trainer or worker nothing that it refuses.
2. Then what it names: the agent is imported, its tasks are looked at (every row of a file, the first rows of
   a function), the model's folder is looked into.
3. Paths of ResourcePools are relative to the manifest, and absolute in what is handed on.
4. Nothing is started and nothing is written.
"""

import inspect
import json
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from agentfly.agent import Agent
from agentfly.api import Metadata, ResourcePool, RolloutJob, TrainingRun, shape
from agentfly.api.base import NAME_MAX, ApiModel
from agentfly.api.load import Manifests, load_manifests
from agentfly.api.pooltypes import Credential, InProcess
from agentfly.api.problems import NOTHING, InvalidManifests, ManifestError, shown
from agentfly.broker.pools import pool_spec
from agentfly.errors import AgentflyError
from agentfly.refs import ReferenceFailed, load
from agentfly.resources.errors import ResourceError
from agentfly.resources.images.reference import is_on_disk, locate
from agentfly.roles.plan import (
    Places,
    inference_pool,
    policy_name,
    rollout_role,
    serves_itself,
    trainer_config,
)
from agentfly.rollout.strategies import strategy_of
from agentfly.rollout.vision import PROCESSOR_FILES
from agentfly.tasks import read_tasks

Kind = TypeVar("Kind", TrainingRun, RolloutJob)

FIRST_ROWS = 8
"""Rows of a function that are looked at: it may be slow, and endless."""
RENAMED = {
    "tasks_entrypoint": "tasks.entrypoint",
    "tasks_path": "tasks.path",
    "call_timeout_s": "rollout.timeouts.callSeconds",
    "turn_timeout_s": "rollout.timeouts.turnSeconds",
    "rollout_timeout_s": "rollout.timeouts.rolloutSeconds",
    "gpus": "trainer.gpusPerNode",
    "servers": "inference.mode",
    "checkpoint_every_steps": "checkpoint.everySteps",
    "checkpoint_keep_last": "checkpoint.keepLast",
    "stall_timeout_s": "runPolicy.stallTimeoutSeconds",
}
"""Field of a role's config -> field of spec, where their names differ."""


@dataclass(frozen=True)
class Work(Generic[Kind]):
    """What is to be run: the object, the pools it names, and the folder its paths are relative to.

    ``unnamed`` are the names of the pools of the file that it does not name.
    """

    run: Kind
    pools: tuple[ResourcePool, ...]
    base_dir: Path
    unnamed: tuple[str, ...] = ()


def training_run(file: Path, sets: Sequence[str], name: str | None) -> Work[TrainingRun]:
    """The one TrainingRun of a file.

    Raises:
        AgentflyError: something is wrong with the manifest or with what it names.
    """
    manifests = load_manifests(file, sets, "TrainingRun")
    return _checked(file, manifests, manifests.runs, "TrainingRun", name)


def rollout_job(
    file: Path, sets: Sequence[str], name: str | None, *, here: bool = True, served: bool = True
) -> Work[RolloutJob]:
    """The one RolloutJob of a file; raises as `training_run` does.

    Args:
        here: its pools and the policy's servers are to run on this machine. Else it is not asked for them.
        served: its model is to be the policy. Else an API is, and neither model nor GPUs are looked at.
    """
    manifests = load_manifests(file, sets, "RolloutJob", models=served)
    return _checked(file, manifests, manifests.jobs, "RolloutJob", name, here=here, served=served)


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
    file: Path,
    manifests: Manifests,
    found: tuple[Kind, ...],
    kind: str,
    name: str | None,
    *,
    here: bool = True,
    served: bool = True,
) -> Work[Kind]:
    if len(found) != 1:
        problem = f"has {len(found)} objects of kind {kind}; exactly one can be run"
        hint = f"keep one {kind} in the file, beside its ResourcePools"
        other, command = ("RolloutJob", "rollout") if kind == "TrainingRun" else ("TrainingRun", "run")
        if not found and (manifests.jobs or manifests.runs):
            problem = f"has no {kind}, but a {other}"
            hint = f"play it with `agentfly {command} -f {file}`, or add a {kind}"
        raise InvalidManifests([ManifestError(str(file), None, "", NOTHING, problem, (hint,))])
    work, base = found[0] if name is None else _renamed(found[0], name), manifests.base
    _check_one_machine(work)
    policy = check_roles(work, base)
    if here:
        used = _used(work, manifests.pools, policy, base)
    else:
        used = tuple(pool for pool in manifests.pools if pool.metadata.name in work.spec.pools)
    if here and served:
        _check_gpus(work)
    agent = _load("spec.agent.entrypoint", work.spec.agent.entrypoint, base)
    if not isinstance(agent, Agent):
        raise AgentflyError(
            f"spec.agent.entrypoint: {work.spec.agent.entrypoint} is of type {type(agent).__name__}, "
            "not an agentfly.Agent",
            hints=["point it at the variable that holds Agent(...)"],
        )
    strategy_of(work.spec.rollout, base)
    _check_tasks(work, agent, base)
    if served:
        _check_model(work, base)
    names = (pool.metadata.name for pool in manifests.pools)
    return Work(work, used, base, tuple(name for name in names if name not in work.spec.pools))


def _check_one_machine(work: TrainingRun | RolloutJob) -> None:
    """Refuse what only a cluster can do; blocks that one machine does not read say so themselves."""
    if work.spec.suspend:
        raise AgentflyError(
            "spec.suspend: true keeps a run of a cluster from starting; on one machine the command starts it",
            hints=["remove spec.suspend; Ctrl-C suspends a run here, and the same command goes on"],
        )
    if isinstance(work, TrainingRun) and work.spec.trainer.nodes > 1:
        raise AgentflyError(
            f"spec.trainer.nodes: {work.spec.trainer.nodes} is more than this machine, which is one",
            hints=["set spec.trainer.nodes to 1, or give the run to a cluster: kubectl apply -f FILE"],
        )


def check_roles(work: TrainingRun | RolloutJob, base: Path) -> str:
    """Make what the roles will read, so that it is refused now; returns the name of the policy's pool."""
    places = Places(base / "runs" / work.metadata.name, base)
    try:
        if isinstance(work, TrainingRun):
            trainer_config(work, places, attempt=1)
        else:
            rollout_role(work, places, ())
        if not serves_itself(work):
            inference_pool(work, places)
        return policy_name(work.metadata.name)
    except ValidationError as error:
        raise _refused(error, type(work.spec)) from error


def _refused(error: ValidationError, spec: type[ApiModel]) -> AgentflyError:
    """The first complaint of a role's config, said of the field of spec that it comes from."""
    first = error.errors(include_url=False)[0]
    where, value = ".".join(str(part) for part in first["loc"]), f"{shown(first['input'])} is refused: "
    text = first["msg"].removeprefix("Value error, ")
    if not where:  # a check between fields says itself which of them is wrong
        names, _, text = text.partition(": ")
        where, value = names.partition(", ")[0], ""
    path = f"spec.{RENAMED.get(where) or _path(where, spec) or where}"
    return AgentflyError(f"{path}: {value}{text}", hints=[f"change {path}; it goes to a role as {where}"])


def _path(name: str, model: type[ApiModel]) -> str | None:
    """Where a model has a field of this Python name, at any depth."""
    for alias, info in shape.fields(model).items():
        block = shape.model_of(info.annotation)
        if model.model_fields.get(name) is info:
            return alias
        inner = _path(name, block) if block is not None else None
        if inner is not None:
            return f"{alias}.{inner}"
    return None


def gpu_count() -> int:
    """GPUs of this machine."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _check_gpus(work: TrainingRun | RolloutJob) -> None:
    inference = work.spec.inference
    terms, needed = "spec.inference.replicas * gpus", inference.replicas * inference.gpus
    if isinstance(work, TrainingRun):
        own = work.spec.trainer.gpus_per_node
        terms, needed = f"{terms} + spec.trainer.gpusPerNode", needed + own
        if serves_itself(work):
            terms, needed = "spec.trainer.gpusPerNode", own
    here = gpu_count()
    if needed > here:
        raise AgentflyError(
            f"{terms}: {needed} is more than the {here} GPUs of this machine",
            hints=[f"bring it down to {here}" if here else "set gpus and gpusPerNode to 0 to use the CPU"],
        )


def _used(
    work: TrainingRun | RolloutJob, pools: Sequence[ResourcePool], policy: str, base: Path
) -> tuple[ResourcePool, ...]:
    """The pools that a run names, with absolute paths."""
    used = [pool for pool in pools if pool.metadata.name in work.spec.pools]
    for pool in used:
        if (name := pool.metadata.name) == policy:
            raise AgentflyError(
                f"ResourcePool {name}: has the name of the pool of the policy's own servers",
                hints=[f"give the pool another name, or the {work.kind}: --name NAME"],
            )
    return _placed_pools(used, base)


def pools_of(file: Path | str) -> tuple[ResourcePool, ...]:
    """The pools of a manifest, with absolute paths; each of them can work on this machine.

    Raises:
        AgentflyError: it has none, or what is wrong with them.
    """
    manifests = load_manifests(file, models=False)  # only its pools are started
    if not manifests.pools:
        raise AgentflyError(f"{file}: has no ResourcePool", hints=["name a file that has one"])
    return _placed_pools(manifests.pools, manifests.base)


def _placed_pools(pools: Sequence[ResourcePool], base: Path) -> tuple[ResourcePool, ...]:
    names = [pool.metadata.name for pool in pools]
    for name in names:
        if names.count(name) > 1:
            raise AgentflyError(
                f"ResourcePool {name}: is there {names.count(name)} times; this machine has no namespaces",
                hints=[f"give each ResourcePool {name} another name, and name one of them in spec.pools"],
            )
    placed = tuple(_placed(pool, base) for pool in pools)
    for pool in placed:
        pool_spec(pool)  # refuses what one machine does not have
    return placed


def _placed(pool: ResourcePool, base: Path) -> ResourcePool:
    """The pool with absolute paths, which must exist."""
    container, service = pool.spec.container, pool.spec.model_service
    where = f"ResourcePool {pool.metadata.name}: spec"
    arm: dict[str, ApiModel] = {}
    if container is not None and (container.runtime == "Bubblewrap" or is_on_disk(container.image)):
        try:
            image = locate(container.image, base)
        except ResourceError as error:
            problem = error.message.removeprefix("image: ")
            raise AgentflyError(f"{where}.container.image: {problem}", hints=error.hints) from error
        arm["container"] = container.model_copy(update={"image": str(image)})
    if service is not None and os.path.isdir(base / service.model):
        arm["model_service"] = service.model_copy(update={"model": str(base / service.model)})
    elif service is not None and service.model.startswith(("/", "./", "../")):
        problem = f"{service.model} is not a directory (looked at {base / service.model})"
        hints = ["give a directory in Hugging Face layout, or a name on the hub"]
        raise AgentflyError(f"{where}.modelService.model: {problem}", hints=hints)
    if pool.spec.external_api is not None:
        keys = tuple(
            _found_key(key, base, f"{where}.externalAPI.credentials[{number}]")
            for number, key in enumerate(pool.spec.external_api.credentials)
        )
        arm["external_api"] = pool.spec.external_api.model_copy(update={"credentials": keys})
    if pool.spec.in_process is not None:
        made = pool.spec.in_process
        factory = _load(f"{where}.inProcess.entrypoint", made.entrypoint, base)
        if not callable(factory):
            problem = f"{made.entrypoint}: is of type {type(factory).__name__}, not a function or a class"
            raise AgentflyError(f"{where}.inProcess.entrypoint: {problem}", hints=["name what makes one"])
        _check_kwargs(f"{where}.inProcess.kwargs", made, factory)
        place, _, name = made.entrypoint.rpartition(":")
        if place.endswith(".py"):
            arm["in_process"] = made.model_copy(update={"entrypoint": f"{base / place}:{name}"})
    return pool.model_copy(update={"spec": pool.spec.model_copy(update=arm)}) if arm else pool


def _check_kwargs(field: str, made: InProcess, factory: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except ValueError:  # as of some that are written in C
        return
    try:
        signature.bind(**made.kwargs)
    except TypeError as error:
        hints = [f"it is defined as {made.entrypoint.rpartition(':')[2]}{signature}"]
        raise AgentflyError(f"{field}: {made.entrypoint}: {error}", hints=hints) from None


def _found_key(key: Credential, base: Path, where: str) -> Credential:
    """A credential that is there, its file with an absolute path. The value is not looked at."""
    if key.env is not None and not os.environ.get(key.env):
        hints = [f"export {key.env}=... before the run"]
        raise AgentflyError(f"{where}.env: {key.env} is not set in this environment", hints=hints)
    if key.file is None:
        return key
    if not os.access(base / key.file, os.R_OK):
        hints = ["write the key into it, readable to you alone"]
        raise AgentflyError(f"{where}.file: {base / key.file} cannot be read", hints=hints)
    return key.model_copy(update={"file": str(base / key.file)})


def _load(field: str, reference: str, base: Path) -> Any:
    """What a field refers to; an error names the field."""
    try:
        return load(reference, base)
    except ReferenceFailed as error:
        place = reference.rpartition(":")[0]
        run = base / place if place.endswith(".py") else f"-c 'import {place}'"
        hints = error.hints or (f"`python {run}` shows the whole traceback",)
        raise AgentflyError(f"{field}: {error.message}", hints=hints) from error


def _check_tasks(work: TrainingRun | RolloutJob, agent: Agent, base: Path) -> None:
    tasks, seed = work.spec.tasks, work.spec.seed
    wheres: Iterator[str]
    if tasks.entrypoint is not None:
        _check_task_function(tasks.entrypoint, base)
        field, source, most = "spec.tasks.entrypoint", tasks.entrypoint, FIRST_ROWS
        wheres, path = (f"{source}: row {number}" for number in range(1, most + 1)), None
        remedy = "yield one dict with the fields of a task, such as {'question': '...'}"
    else:
        assert tasks.path is not None  # a rule of the model: one of the two is set
        field, source, most, path = "spec.tasks.path", tasks.path, None, Path(tasks.path)
        wheres = _lines(source, base)
        remedy = 'write one JSON object a line, such as {"question": "..."}'
    empty = True
    try:
        rows = islice(read_tasks(tasks.entrypoint, path, base, seed), most)
        for row, where in zip(rows, wheres, strict=False):
            agent.check(row, where)
            empty = False
    except AgentflyError as error:
        text = error.message.removeprefix("tasks: ")
        raise AgentflyError(f"{field}: {text}", hints=error.hints or [remedy]) from error
    except (Exception, SystemExit) as error:
        raise AgentflyError(f"{field}: {source} {_raised(error)}", hints=[remedy]) from error
    if empty:
        raise AgentflyError(f"{field}: {source} has no tasks", hints=[remedy])


def _lines(path: str, base: Path) -> Iterator[str]:
    """The place of every row of a file, beside `read_tasks`, which passes over empty lines too."""
    with (base / path).open() as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{path}:{number}"


def _raised(error: BaseException) -> str:
    """What the code or file of somebody else raised, with its innermost line outside agentfly."""
    ours = str(Path(__file__).parents[1]) + os.sep
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((ours, "<frozen"))]
    place = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    text = "".join(str(error).splitlines()[:1])
    return f"raised {type(error).__name__}{place}: {text}"


def _check_task_function(entrypoint: str, base: Path) -> None:
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
    try:
        sees = "vision_config" in json.loads((path / "config.json").read_text())
    except (ValueError, TypeError) as error:
        raise AgentflyError(
            f"spec.model.path: {path / 'config.json'}: {error}", hints=["save the model again"]
        ) from None
    if sees and not any((path / name).exists() for name in PROCESSOR_FILES):
        raise AgentflyError(
            f"spec.model.path: {path} is a model that sees images, without {' or '.join(PROCESSOR_FILES)}",
            hints=["save its processor there too: AutoProcessor.from_pretrained(...).save_pretrained(DIR)"],
        )
