"""Manifests that are right, and an API server's view of an object: defaults filled in, CEL rules run."""

import copy
import functools
import ipaddress
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import celpy
from celpy import celtypes
from pydantic import ValidationError

from agentfly.api import crd
from agentfly.api.base import RULES_BROKEN
from agentfly.api.quantity import parse

Json = dict[str, Any]

OBJECTS: dict[str, Json] = {
    "ResourcePool": {
        "apiVersion": "agentfly.dev/v1alpha1",
        "kind": "ResourcePool",
        "metadata": {"name": "shell"},
        "spec": {"type": "Container", "container": {}, "capacity": {"max": 4}},
    },
    "TrainingRun": {
        "apiVersion": "agentfly.dev/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {"name": "first"},
        "spec": {
            "agent": {"entrypoint": "agent.py:agent"},
            "tasks": {"entrypoint": "agent.py:tasks"},
            "pools": ["shell"],
            "model": {"build": {"script": "model.py"}},
        },
    },
    "RolloutJob": {
        "apiVersion": "agentfly.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "look"},
        "spec": {
            "agent": {"entrypoint": "agent.py:agent"},
            "tasks": {"path": "tasks.jsonl"},
            "model": {"path": "model"},
        },
    },
}

KINDS = {kind.name: kind for kind in crd.KINDS}
SCHEMAS = {kind.name: crd.schema(kind.model, kind.transitions) for kind in crd.KINDS}


def made(kind: str, changes: Json) -> Json:
    """The right object of a kind with fields of spec changed: dotted path -> value, None removes."""
    obj = copy.deepcopy(OBJECTS[kind])
    for path, value in changes.items():
        *above, last = path.split(".")
        node = obj["spec"]
        for part in above:
            node = node.setdefault(part, {})
        if value is None:
            node.pop(last, None)
        else:
            node[last] = copy.deepcopy(value)
    return obj


def complete(node: Json, value: Any) -> Any:
    """`value` with the defaults that an API server would add, and numbers as CEL gets them."""
    if node.get("type") == "number" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, dict):
        return value
    filled = dict(value)
    for name, child in node.get("properties", {}).items():
        if name not in filled and "default" in child:
            filled[name] = copy.deepcopy(child["default"])
        if name in filled:
            filled[name] = complete(child, filled[name])
    return filled


def draft4(node: Json) -> Json:
    """The node in the JSON Schema dialect of OpenAPI 3.0 (draft 4), which the jsonschema package knows.

    Objects are closed, as field validation of kubectl closes them.
    """
    result = {key: value for key, value in node.items() if not key.startswith("x-kubernetes")}
    if node.get("x-kubernetes-int-or-string"):
        result["type"] = ["integer", "string"]
    if node.get("x-kubernetes-list-type") == "set":
        result["uniqueItems"] = True
    if "properties" in node:
        result["properties"] = {name: draft4(child) for name, child in node["properties"].items()}
        result["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if key in node:
            result[key] = draft4(node[key])
    return result


def walk(node: Json, at: str = "") -> Iterator[tuple[str, Json]]:
    """Every node of a schema with its path; items and values of maps are `[]`."""
    yield at, node
    for name, child in node.get("properties", {}).items():
        yield from walk(child, f"{at}.{name}" if at else name)
    for key in ("items", "additionalProperties"):
        if key in node:
            yield from walk(node[key], f"{at}[]")


def at(obj: Any, path: str) -> Any:
    """The value at a dotted path, None where it stops; the object itself at none."""
    for part in path.split(".") if path else ():
        obj = obj.get(part) if isinstance(obj, dict) else None
    return obj


def each(obj: Any, path: str) -> list[Any]:
    """The values at a path of `walk`: one, none, or all items of a list."""
    above, items, rest = path.partition("[]")
    found = at(obj, above)
    if not items:
        return [] if found is None else [found]
    inside = found if isinstance(found, list) else []
    return [value for item in inside for value in (each(item, rest[1:]) if rest else [item])]


@functools.cache
def _program(rule: str) -> celpy.Runner:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule), functions=LIBRARY)


def _sum(numbers: Any) -> celtypes.IntType:
    return celtypes.IntType(sum(numbers))


def _quantity(text: Any) -> celtypes.DoubleType:
    return celtypes.DoubleType(float(parse(str(text))))


def _is_cidr(text: Any) -> celtypes.BoolType:
    try:
        ipaddress.ip_network(str(text), strict=False)
    except ValueError:
        return celtypes.BoolType(False)
    return celtypes.BoolType("/" in text and "." not in text.partition("/")[2])


def _masked(text: Any) -> celtypes.StringType:
    return celtypes.StringType(ipaddress.ip_network(str(text), strict=False))


def _split(text: Any, by: Any) -> celtypes.ListType:
    return celtypes.ListType([celtypes.StringType(part) for part in str(text).split(str(by))])


LIBRARY: dict[str, Any] = {
    "sum": _sum,
    "quantity": _quantity,
    "asApproximateFloat": lambda quantity: quantity,
    "isCIDR": _is_cidr,
    "cidr": lambda text: text,
    "masked": _masked,
    "split": _split,
}
"""What Kubernetes adds to CEL and celpy lacks, as far as rules use it."""


@functools.cache
def _read_by(rule: str) -> frozenset[str] | None:
    """The fields of an object that a rule reads; None if it reads the value as a whole."""
    names = re.findall(r"\b(?:self|oldSelf)\b(?:\.(\w+)\b(?!\())?", rule)
    return frozenset(names) if all(names) else None


@functools.cache
def _holds(rule: str, new: str, old: str) -> bool:
    names = {"self": celpy.json_to_cel(json.loads(new)), "oldSelf": celpy.json_to_cel(json.loads(old))}
    return bool(_program(rule).evaluate(names))


def _runs(rule: str, new: Any, old: Any) -> bool:
    """Whether a rule holds. An evaluation takes milliseconds, and most objects of a test differ elsewhere."""
    read = _read_by(rule)
    texts = (
        json.dumps({name: value[name] for name in value if name in read} if read is not None else value)
        if isinstance(value, dict)
        else json.dumps(value)
        for value in (new, old)
    )
    return _holds(rule, *texts)


def server_refusals(kind: str, obj: Json, old: Json | None = None) -> list[str]:
    """`path: message` of every CEL rule that does not hold, as `kubectl apply` would list them."""
    schema = SCHEMAS[kind]
    new, before = complete(schema, obj), complete(schema, old)
    found = []
    for path, node in walk(schema):
        was = at(before, path)
        for rule, value in itertools.product(node.get(crd.VALIDATIONS, ()), each(new, path)):
            transition = "oldSelf" in rule["rule"]
            if transition and was is None:
                continue
            if not _runs(rule["rule"], value, was):
                found.append(f"{path}{rule.get('fieldPath', '')}: {rule['message']}".lstrip("."))
    return sorted(found)


def model_refusals(kind: str, obj: Json) -> list[str]:
    """The same from the model; any other complaint of the model is listed with its type."""
    try:
        KINDS[kind].model.model_validate(obj, by_alias=True, by_name=False)
    except ValidationError as error:
        found = []
        for problem in error.errors():
            path = re.sub(r"\.\d+", "[]", ".".join(str(part) for part in problem["loc"]))
            if problem["type"] != RULES_BROKEN:
                found.append(f"{path}: {problem['type']}")
                continue
            for rule in problem["ctx"]["broken"]:
                found.append(f"{path}{'.' + rule.field if rule.field else ''}: {rule.message}")
        return sorted(found)
    return []
