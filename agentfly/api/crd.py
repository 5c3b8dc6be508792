"""CustomResourceDefinitions made from the models.

Guarantees:
1. The schemas are structural: typed at every level, without references, unions, titles or closed objects.
   (The API server prunes unknown fields, and refuses them where field validation is strict.)
2. Spec defaults are complete values, so that rules may read every field that has a default. Status has one
   default, `observedGeneration: -1`: an object that no controller has seen yet does not look current.
3. Optional fields are not nullable: the API server drops a null, and it means absence as in the models.
4. The same models give the same bytes.

Not here: what the fields mean (the models), who writes the files (`agentfly crds`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agentfly.api.base import GROUP, IMMUTABLE, NAME_MAX, NAME_PATTERN, VERSION, ApiModel, Rule
from agentfly.api.resourcepool import ResourcePool
from agentfly.api.rolloutjob import RolloutJob
from agentfly.api.trainingrun import TrainingRun

Schema = dict[str, Any]

HEADER = "# Generated from the models in agentfly/api by `agentfly crds`. Do not edit.\n"
VALIDATIONS = "x-kubernetes-validations"
PRESERVED = "x-kubernetes-preserve-unknown-fields"
_KEPT = (
    "description",
    "type",
    "format",
    "default",
    "enum",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "pattern",
    "minItems",
    "maxItems",
    "maxProperties",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    PRESERVED,
)


@dataclass(frozen=True)
class Column:
    """A printer column; `priority` 1 shows in wide output only."""

    name: str
    type: str
    path: str
    priority: int = 0


@dataclass(frozen=True)
class Scale:
    """The paths by which `kubectl scale` and autoscalers know a kind."""

    wanted: str
    found: str
    selector: str


@dataclass(frozen=True)
class Transition:
    """What may change only in some states of an object: a rule over `self` and `oldSelf`, whole objects."""

    cel: str
    message: str
    path: str


@dataclass(frozen=True)
class Kind:
    """What a CRD says beside its schema."""

    model: type[ApiModel]
    plural: str
    short: str
    columns: tuple[Column, ...]
    scale: Scale | None = None
    transitions: tuple[Transition, ...] = ()

    @property
    def name(self) -> str:
        """The kind, which is also the model's name."""
        return self.model.__name__


_AGE = Column("Age", "date", ".metadata.creationTimestamp")


def _reason(condition: str) -> str:
    return f'.status.conditions[?(@.type=="{condition}")].reason'


KINDS = (
    Kind(
        ResourcePool,
        "resourcepools",
        "rpool",
        (
            Column("Type", "string", ".spec.type"),
            Column("Ready", "integer", ".status.members.ready"),
            Column("Free", "integer", ".status.members.free"),
            Column("Leased", "integer", ".status.members.leased"),
            Column("Starting", "integer", ".status.members.starting"),
            Column("Queued", "integer", ".status.queue.pending"),
            Column("Max", "integer", ".spec.capacity.max"),
            Column("Reason", "string", _reason("Ready")),
            Column("Hit%", "string", ".status.rates.warmHitPercent", priority=1),
            Column("P99", "integer", ".status.rates.acquireP99Milliseconds", priority=1),
            _AGE,
        ),
        Scale(".spec.capacity.min", ".status.members.total", ".status.selector"),
    ),
    Kind(
        RolloutJob,
        "rolloutjobs",
        "rjob",
        (
            Column("Status", "string", ".status.phase"),
            Column("Total", "integer", ".status.tasks.total"),
            Column("Scored", "integer", ".status.tasks.scored"),
            Column("Masked", "integer", ".status.tasks.masked"),
            Column("Failed", "integer", ".status.tasks.failed"),
            Column("Reward", "string", ".status.reward.mean"),
            Column("Workers", "integer", ".status.workers", priority=1),
            Column("Shards", "integer", ".status.shards.done", priority=1),
            Column("Reason", "string", _reason("Finished"), priority=1),
            _AGE,
        ),
        Scale(".spec.workers.count", ".status.workers", ".status.selector"),
    ),
    Kind(
        TrainingRun,
        "trainingruns",
        "trun",
        (
            Column("Status", "string", ".status.phase"),
            Column("Step", "integer", ".status.progress.step"),
            Column("Total", "integer", ".status.progress.totalSteps"),
            Column("Reward", "string", ".status.progress.metrics.reward"),
            Column("Attempt", "integer", ".status.attempt"),
            Column("Checkpoint", "integer", ".status.checkpoint.latestStep", priority=1),
            Column("Engine", "string", ".status.engine.kind", priority=1),
            Column("ETA", "integer", ".status.progress.etaSeconds", priority=1),
            Column("Reason", "string", _reason("Reconciling"), priority=1),
            _AGE,
        ),
        transitions=(
            Transition(
                "self.spec.trainer == oldSelf.spec.trainer || !has(oldSelf.status) "
                "|| !has(oldSelf.status.attempt) || oldSelf.status.attempt == 0 "
                "|| (has(oldSelf.status.conditions) && oldSelf.status.conditions.exists(condition, "
                "condition.type == 'Suspended' && condition.status == 'True'))",
                "spec.trainer is immutable while the run is not suspended; set spec.suspend to true, wait "
                "for the condition Suspended, then change it",
                ".spec.trainer",
            ),
        ),
    ),
)


def validation(rule: Rule) -> Schema:
    """A rule as one entry of `x-kubernetes-validations`."""
    entry = {"rule": rule.cel, "message": rule.message}
    return {**entry, "fieldPath": f".{rule.field}"} if rule.field else entry


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def _flat(node: Schema, defs: Mapping[str, Schema]) -> Schema:
    """The node with references and `X | None` replaced by what they stand for; its own keys win."""
    own = {key: value for key, value in node.items() if key not in ("$ref", "anyOf")}
    if "$ref" in node:
        name = node["$ref"].removeprefix("#/$defs/")
        return {**_flat(defs[name], defs), **own, "model": name}
    if "anyOf" in node:
        (arm,) = [arm for arm in node["anyOf"] if arm != {"type": "null"}]
        return {**_flat(arm, defs), **own}
    return own


def _limits(node: Schema) -> Schema:
    """Keys of JSON Schema 2020 in the form of OpenAPI 3.0."""
    result = {key: _without_none(node[key]) for key in _KEPT if node.get(key) is not None}
    if "const" in node:
        result["enum"] = [node["const"]]
    for exclusive, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if exclusive in node:
            result |= {inclusive: node[exclusive], exclusive: True}
    return result


@dataclass(frozen=True)
class _Builder:
    defs: Mapping[str, Schema]
    rules: Mapping[str, Sequence[Rule]]
    defaults: bool

    def build(self, node: Schema) -> Schema:
        node = _flat(node, self.defs)
        result = _limits(node)
        if not self.defaults:
            result.pop("default", None)
        if "properties" in node:
            result["properties"] = {name: self.build(child) for name, child in node["properties"].items()}
            if node.get("required"):
                result["required"] = node["required"]
        elif isinstance(node.get("additionalProperties"), dict) and PRESERVED not in node:
            result["additionalProperties"] = self.build(node["additionalProperties"])
        if "items" in node:
            result["items"] = self.build(node["items"])
        validations = [*self._rules(node), *self._transitions(node)]
        if validations:
            result[VALIDATIONS] = validations
        return result

    def _rules(self, node: Schema) -> list[Schema]:
        return [validation(rule) for rule in self.rules.get(node.get("model", ""), ())]

    def _transitions(self, node: Schema) -> list[Schema]:
        found: list[Schema] = []
        if IMMUTABLE in node:
            message = f"field is immutable; {node[IMMUTABLE]}"
            found.append({"rule": "self == oldSelf", "message": message})
        for name, child in node.get("properties", {}).items():
            # A transition rule is not run when its field comes or goes: the block above must see that.
            if IMMUTABLE in child and name not in node.get("required", ()) and child.get("default") is None:
                message = f"{name} is immutable; {child[IMMUTABLE]}"
                rule = f"has(self.{name}) == has(oldSelf.{name})"
                found.append({"rule": rule, "message": message, "fieldPath": f".{name}"})
        return found


def _rules_by_model() -> dict[str, Sequence[Rule]]:
    found: dict[str, Sequence[Rule]] = {}
    waiting: list[type[ApiModel]] = [ApiModel]
    while waiting:
        for child in waiting.pop().__subclasses__():
            waiting.append(child)
            if child.__module__.startswith("agentfly.api."):
                found[child.__name__] = child.rules
    return found


def schema(model: type[ApiModel], transitions: Sequence[Transition] = ()) -> Schema:
    """The structural `openAPIV3Schema` of a kind."""
    raw = model.model_json_schema(by_alias=True)
    defs = raw.get("$defs", {})
    rules = _rules_by_model()
    properties = raw["properties"]
    spec = _Builder(defs, rules, defaults=True).build(properties["spec"])
    status = _Builder(defs, rules, defaults=False).build(properties["status"])
    name = {"type": "string", "maxLength": NAME_MAX, "pattern": NAME_PATTERN}
    rules_of_change = [
        {"rule": each.cel, "message": each.message, "fieldPath": each.path} for each in transitions
    ]
    return {
        "description": raw["description"],
        "type": "object",
        **({VALIDATIONS: rules_of_change} if rules_of_change else {}),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}."},
            "kind": {"type": "string", "description": f"{model.__name__}."},
            "metadata": {"type": "object", "properties": {"name": name}},
            "spec": spec,
            "status": {**status, "default": {"observedGeneration": -1}},
        },
    }


def _column(column: Column) -> Schema:
    entry = {"name": column.name, "type": column.type, "jsonPath": column.path}
    return {**entry, "priority": column.priority} if column.priority else entry


def _subresources(kind: Kind) -> Schema:
    made: Schema = {"status": {}}
    if kind.scale is not None:
        made["scale"] = {
            "specReplicasPath": kind.scale.wanted,
            "statusReplicasPath": kind.scale.found,
            "labelSelectorPath": kind.scale.selector,
        }
    return made


def crd(kind: Kind) -> Schema:
    """The CustomResourceDefinition of a kind as data."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema(kind.model, kind.transitions)},
        "subresources": _subresources(kind),
        "additionalPrinterColumns": [_column(column) for column in kind.columns],
    }
    names = {
        "kind": kind.name,
        "listKind": f"{kind.name}List",
        "plural": kind.plural,
        "singular": kind.name.lower(),
        "shortNames": [kind.short],
        "categories": ["all", "rl"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}"},
        "spec": {"group": GROUP, "names": names, "scope": "Namespaced", "versions": [version]},
    }


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def crds_yaml() -> dict[str, str]:
    """File name -> text of every CRD."""
    return {
        f"{GROUP}_{kind.plural}.yaml": HEADER
        + yaml.dump(crd(kind), Dumper=_Dumper, sort_keys=False, width=110)
        for kind in KINDS
    }


def write(directory: Path) -> list[Path]:
    """Write all files below `directory`, which is made if needed; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in crds_yaml().items():
        path = directory / name
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def check(directory: Path) -> list[str]:
    """What differs between `directory` and the models, one line a file; empty when nothing does."""
    wanted = crds_yaml()
    found = {path.name: path.read_text(encoding="utf-8") for path in sorted(directory.glob("*.yaml"))}
    problems = [f"{directory / name}: is missing" for name in wanted if name not in found]
    problems += [f"{directory / name}: is made by no model" for name in found if name not in wanted]
    problems += [
        f"{directory / name}: differs from the models"
        for name in wanted
        if found.get(name, wanted[name]) != wanted[name]
    ]
    return problems
