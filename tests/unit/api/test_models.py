"""Models are as strict as the API server; sections are numbered like the guarantees of agentfly.api.base."""

import copy
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from agentfly.api import Condition, ResourcePool, TrainingRun, TrainingRunStatus, decimal
from agentfly.api.reasons import ConditionType, Reason, TrainingRunPhase
from tests.unit.api.worlds import (
    KINDS,
    OBJECTS,
    SCHEMAS,
    Json,
    complete,
    draft4,
    made,
    model_refusals,
    server_refusals,
    walk,
)

NASTY: list[Any] = [
    0, 1, -1, 2, 7, 64, 65, 1024, 2**31 - 1, 2**31, 0.5, 1.5, -0.1, True, False, "", "1", "x", "x" * 5000,
    "500m", "1Gi", "a.py:b", "/tmp", "a=b", "grpo", "host", [], ["x"], ["x", "x"], ["a=b"], [1], {},
    {"x": "y"}, {"x": 1},
]  # fmt: skip
VALIDATORS = {
    kind: jsonschema.Draft4Validator(draft4(schema["properties"]["spec"])) for kind, schema in SCHEMAS.items()
}


def server_accepts(kind: str, obj: Json) -> bool:
    """Whether `kubectl create` of the object would succeed, by schema, sets and CEL."""
    spec = complete(SCHEMAS[kind]["properties"]["spec"], obj["spec"])
    return VALIDATORS[kind].is_valid(spec) and server_refusals(kind, obj) == []


ITEMS: Json = {
    "tolerations": {"operator": "Exists"},
    "egress": {"cidr": "10.0.0.0/8"},
    "credentials": {"env": "A"},
}
"""A right item of each list of blocks."""


def fields(kind: str) -> list[str]:
    """Paths of all fields of spec, without list items and map values."""
    spec = SCHEMAS[kind]["properties"]["spec"]
    return [path for path, _ in walk(spec) if path and "[]" not in path]


def items(kind: str) -> list[str]:
    """Paths of all fields of list items of spec."""
    return [path for path, _ in walk(SCHEMAS[kind]["properties"]["spec"]) if "[]." in path]


def _with(schema: Json, found: Any, path: list[str], value: Any) -> Any:
    """`found` with another value at the path: in a list its only item, in a map that of x."""
    if not path:
        return copy.deepcopy(value)
    first, *rest = path
    if first == "[]" and "items" in schema:
        return [_with(schema["items"], found, rest, value)]
    if first == "[]":
        return {"x": _with(schema["additionalProperties"], {}, rest, value)}
    child = (found or {}).get(first, ITEMS.get(first, {}))
    return {**(found or {}), first: _with(schema["properties"][first], child, rest, value)}


def placed(kind: str, path: str, value: Any) -> Json:
    """A right object but for the field at `path` of spec."""
    changes: Json = {}
    if path.startswith("modelService"):
        changes = {
            "type": "ModelService",
            "container": None,
            "modelService": {"model": "m", "maxModelLen": 64},
        }
    if path.startswith("externalAPI"):
        changes = {
            "type": "ExternalAPI",
            "scope": "Global",
            "container": None,
            "externalAPI": {"baseUrl": "http://a"},
            "capacity": {"max": 1},
        }
    if path.startswith("inProcess"):
        changes = {"type": "InProcess", "container": None, "inProcess": {"entrypoint": "a.py:b"}}
    if path.startswith("model.build"):
        changes = {"model": {"build": {"script": "s"}}}
    if path.startswith("security.egress"):
        changes = {"container.network": True}
    obj = made(kind, changes)
    schema = SCHEMAS[kind]["properties"]["spec"]
    obj["spec"] = _with(schema, obj["spec"], re.findall(r"\[\]|[^.\[\]]+", path), value)
    return obj


# 1. Closed, strict, frozen.


@pytest.mark.parametrize("kind", KINDS)
def test_model_and_server_agree_on_every_field_with_every_nasty_value(kind: str) -> None:
    differ = []
    for path in fields(kind) + items(kind):
        for value in NASTY:
            obj = placed(kind, path, value)
            if server_accepts(kind, obj) != (model_refusals(kind, obj) == []):
                differ.append((path, value, model_refusals(kind, obj)))
    assert differ == []


def refusals_at(kind: str, path: str, value: Any) -> list[str]:
    """What the model says, with the key x of a map written as in paths of a schema."""
    return [re.sub(r"\.x(?=[.:])", "[]", text) for text in model_refusals(kind, placed(kind, path, value))]


@pytest.mark.parametrize("kind", KINDS)
def test_every_bound_is_the_same_in_model_and_schema(kind: str) -> None:
    seen = 0
    for path, node in walk(SCHEMAS[kind]["properties"]["spec"]):
        for key, step, name in (("minimum", -1, "greater_than_equal"), ("maximum", 1, "less_than_equal")):
            if node.get("type") == "integer" and key in node:
                refusal = f"spec.{path}: {name}"
                assert refusal not in refusals_at(kind, path, node[key])
                assert refusal in refusals_at(kind, path, node[key] + step)
                seen += 1
    assert seen >= 10


def test_a_lease_may_last_as_long_as_the_daemon_allows() -> None:
    source = (Path(__file__).parents[3] / "operator" / "sandboxd" / "api.go").read_text()
    longest = re.search(r"\bmaxTTL\s*=\s*time\.(\w+)", source)
    assert longest is not None
    seconds = {"Minute": 60, "Hour": 3600}[longest[1]]
    assert model_refusals("ResourcePool", made("ResourcePool", {"lease.ttlSeconds": seconds})) == []
    assert model_refusals("ResourcePool", made("ResourcePool", {"lease.ttlSeconds": seconds + 1})) == [
        "spec.lease.ttlSeconds: less_than_equal"
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_fields_are_refused_at_every_level(kind: str) -> None:
    assert model_refusals(kind, made(kind, {"typo": 1})) == ["spec.typo: extra_forbidden"]
    assert model_refusals(kind, {**OBJECTS[kind], "typo": 1}) == ["typo: extra_forbidden"]


def test_yaml_has_camel_case_and_python_has_snake_case() -> None:
    assert model_refusals("TrainingRun", made("TrainingRun", {"tasks_per_step": 4})) == [
        "spec.tasks_per_step: extra_forbidden"
    ]
    assert TrainingRun.model_validate(made("TrainingRun", {"tasksPerStep": 4})).spec.tasks_per_step == 4


def test_models_are_frozen() -> None:
    pool = ResourcePool.model_validate(OBJECTS["ResourcePool"])
    with pytest.raises(ValidationError, match="frozen"):
        pool.spec = pool.spec  # type: ignore[misc]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_finite(value: float) -> None:
    assert model_refusals("TrainingRun", made("TrainingRun", {"rollout.temperature": value})) == [
        "spec.rollout.temperature: finite_number"
    ]


# 2. null is absence.


def optional_fields() -> list[Any]:
    found = []
    for kind, obj in OBJECTS.items():
        for path in fields(kind):
            if path not in obj["spec"]:
                found.append(pytest.param(kind, path, id=f"{kind}-{path}"))
    return found


@pytest.mark.parametrize(("kind", "path"), optional_fields())
def test_null_means_what_absence_means(kind: str, path: str) -> None:
    with_null, without = placed(kind, path, None), placed(kind, path, None)
    node = without["spec"]
    *above, last = path.split(".")
    for part in above:
        node = node[part]
    del node[last]
    assert model_refusals(kind, with_null) == model_refusals(kind, without)
    if not model_refusals(kind, without):
        model = KINDS[kind].model
        assert model.model_validate(with_null) == model.model_validate(without)


# 3. What the API server stores.


@pytest.mark.parametrize("kind", KINDS)
def test_stored_form_reads_back_as_the_same_object(kind: str) -> None:
    model = KINDS[kind].model
    obj = model.model_validate(OBJECTS[kind])
    assert model.model_validate(obj.to_json()) == obj


@pytest.mark.parametrize("kind", KINDS)
def test_stored_spec_is_the_written_one_with_the_servers_defaults(kind: str) -> None:
    model = KINDS[kind].model
    spec = SCHEMAS[kind]["properties"]["spec"]
    obj = OBJECTS[kind]
    written = complete(spec, obj["spec"])
    stored = model.model_validate(obj).to_json()["spec"]
    if kind == "TrainingRun":
        written["model"]["build"].setdefault("args", [])
    assert stored == written


def test_an_object_as_the_api_server_returns_it_is_read() -> None:
    stored = copy.deepcopy(OBJECTS["ResourcePool"])
    stored["metadata"] |= {
        "uid": "6f1c",
        "resourceVersion": "12",
        "generation": 3,
        "creationTimestamp": "2026-11-30T05:37:57Z",
        "managedFields": [{"manager": "kubectl", "operation": "Apply"}],
        "ownerReferences": [{"kind": "TrainingRun", "name": "first"}],
        "finalizers": ["a/b"],
    }
    pool = ResourcePool.model_validate(stored)
    assert pool.metadata.generation == 3
    assert pool.metadata.creation_timestamp == datetime(2026, 11, 30, 5, 37, 57, tzinfo=UTC)
    assert pool.status.observed_generation == -1


def test_a_status_is_written_in_the_form_of_the_schema() -> None:
    now = datetime(2026, 11, 30, 5, 37, 57, tzinfo=UTC)
    condition = Condition(
        type=ConditionType.Running,
        status="True",
        observed_generation=1,
        last_transition_time=now,
        reason=Reason.Training,
        message="",
    )
    status = TrainingRunStatus(
        observed_generation=1,
        phase=TrainingRunPhase.Running,
        start_time=now,
        attempt=1,
        conditions=(condition,),
    )
    stored = status.to_json()
    assert stored["phase"] == "Running"
    assert stored["startTime"] == "2026-11-30T05:37:57Z"
    assert stored["conditions"][0]["type"] == "Running"
    schema = SCHEMAS["TrainingRun"]["properties"]["status"]
    jsonschema.Draft4Validator(draft4(schema)).validate(stored)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.41, "0.41"), (-2.0, "-2"), (1e-7, "1e-07"), (123456789.0, "1.23457e+08"), (1 / 3, "0.333333")],
)
def test_decimal_text_fits_the_field(value: float, text: str) -> None:
    assert decimal(value) == text
    status = TrainingRunStatus.model_validate(
        {"progress": {"step": 1, "totalSteps": 2, "metrics": {"reward": text}}}
    )
    assert status.progress is not None
    assert status.progress.metrics == {"reward": text}


def test_decimal_text_is_no_word() -> None:
    with pytest.raises(ValidationError):
        TrainingRunStatus.model_validate({"progress": {"metrics": {"reward": decimal(float("nan"))}}})
