"""The files in crds/ are what the models say, in the form that an API server accepts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from agentfly.api import crd
from tests.unit.api.worlds import complete, draft4

CRDS = Path(__file__).parents[3] / "crds"
Where = tuple[str, ...]
FORBIDDEN = {
    "$ref", "$defs", "definitions", "dependencies", "deprecated", "discriminator", "id", "patternProperties",
    "readOnly", "writeOnly", "xml", "const", "title", "propertyNames", "prefixItems", "uniqueItems", "anyOf",
    "oneOf", "allOf", "not", "nullable", "examples",
}  # fmt: skip
TYPES = {"object", "array", "string", "integer", "number", "boolean"}


def kinds() -> list[Any]:
    return [pytest.param(kind, id=kind.name) for kind in crd.KINDS]


def walk(node: dict[str, Any], at: Where = ()) -> Iterator[tuple[Where, dict[str, Any]]]:
    yield at, node
    for name, child in node.get("properties", {}).items():
        yield from walk(child, (*at, name))
    for key in ("items", "additionalProperties"):
        if key in node:
            yield from walk(node[key], (*at, f"[{key}]"))


def misshapen(node: dict[str, Any]) -> list[str]:
    """What breaks the rules of structural schemas at one node, but for its children."""
    wrong = [f"has {key}" for key in sorted(FORBIDDEN & set(node))]
    if node.get("type") not in TYPES and not node.get("x-kubernetes-int-or-string"):
        wrong.append("has no type")
    if node.get("type") == "array" and "items" not in node:
        wrong.append("has no items")
    if "properties" in node and "additionalProperties" in node:
        wrong.append("has properties and additionalProperties")
    if not isinstance(node.get("additionalProperties", {}), dict):
        wrong.append("closes its properties")
    if node.get("type") != "object" and ({"properties", "additionalProperties", "required"} & set(node)):
        wrong.append("has properties but is no object")
    wrong += [
        f"requires {name}, which it lacks"
        for name in node.get("required", ())
        if name not in node["properties"]
    ]
    for key in ("exclusiveMinimum", "exclusiveMaximum"):
        if not isinstance(node.get(key, True), bool):
            wrong.append(f"has a number as {key}")
    if node.get("x-kubernetes-list-type") == "map":
        keys = node.get("x-kubernetes-list-map-keys", [])
        wrong += [
            f"has key {key}, not required" for key in keys if key not in node["items"].get("required", [])
        ]
    return wrong


# 1. The schemas are structural.


@pytest.mark.parametrize("kind", kinds())
def test_every_node_is_structural(kind: crd.Kind) -> None:
    wrong = {at: found for at, node in walk(crd.schema(kind.model)) if (found := misshapen(node))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        ({"description": "?"}, "has no type"),
        ({"type": "array"}, "has no items"),
        ({"type": "string", "nullable": True}, "has nullable"),
        ({"type": "object", "additionalProperties": False}, "closes its properties"),
        ({"type": "number", "exclusiveMinimum": 0}, "has a number as exclusiveMinimum"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "requires a, which it lacks"),
    ],
)
def test_the_checker_sees_what_is_not_structural(node: dict[str, Any], problem: str) -> None:
    assert misshapen(node) == [problem]


@pytest.mark.parametrize("kind", kinds())
def test_the_root_restricts_of_metadata_the_name_alone(kind: crd.Kind) -> None:
    root = crd.schema(kind.model)
    assert root["required"] == ["spec"]
    assert root["properties"]["metadata"] == {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40, "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"}
        },
    }
    assert root["properties"]["kind"]["type"] == root["properties"]["apiVersion"]["type"] == "string"


@pytest.mark.parametrize("kind", kinds())
def test_every_field_says_what_it_is(kind: crd.Kind) -> None:
    silent = [
        at
        for at, node in walk(crd.schema(kind.model))
        if at and at[0] in ("spec", "status") and not at[-1].startswith("[") and not node.get("description")
    ]
    assert silent == []


@pytest.mark.parametrize("kind", kinds())
def test_everything_that_grows_is_bounded_where_a_rule_reads_it(kind: crd.Kind) -> None:
    for at, node in walk(crd.schema(kind.model)):
        if crd.VALIDATIONS not in node:
            continue
        for below, part in walk(node):
            bound = {"string": {"maxLength", "enum"}, "array": {"maxItems"}}.get(part.get("type", ""), set())
            assert not bound or bound & set(part), f"{at}: {below} has no bound"


@pytest.mark.parametrize("kind", kinds())
def test_every_rule_points_at_a_field_that_exists(kind: crd.Kind) -> None:
    rules = [
        (node, rule) for _, node in walk(crd.schema(kind.model)) for rule in node.get(crd.VALIDATIONS, ())
    ]
    assert rules
    for node, rule in rules:
        assert rule["rule"]
        assert rule["message"]
        field = rule.get("fieldPath", "").removeprefix(".")
        assert not field or field in node["properties"]
    for change in kind.transitions:
        assert defined(crd.schema(kind.model), change.path)


# 2. Defaults.


@pytest.mark.parametrize("kind", kinds())
def test_every_spec_default_is_valid_and_complete(kind: crd.Kind) -> None:
    spec = crd.schema(kind.model)["properties"]["spec"]
    for at, node in walk(spec):
        if "default" in node:
            jsonschema.Draft4Validator(draft4(node)).validate(node["default"])
            assert complete(node, node["default"]) == node["default"], at


@pytest.mark.parametrize("kind", kinds())
def test_status_has_one_default_and_it_says_unseen(kind: crd.Kind) -> None:
    status = crd.schema(kind.model)["properties"]["status"]
    assert [(at, node["default"]) for at, node in walk(status) if "default" in node] == [
        ((), {"observedGeneration": -1})
    ]


@pytest.mark.parametrize("kind", kinds())
def test_nothing_in_a_list_has_a_default(kind: crd.Kind) -> None:
    """GitOps tools compare lists item by item with what was written: a default there differs for ever."""
    inside = [
        at
        for at, node in walk(crd.schema(kind.model)["properties"]["spec"])
        if "[items]" in at and "default" in node
    ]
    assert inside == []


# 3. Versions, columns, names.


def defined(node: dict[str, Any], path: str) -> bool:
    for part in path.split("[", maxsplit=1)[0].strip(".").split("."):
        if "additionalProperties" in node:
            return True
        if part not in node.get("properties", {}):
            return False
        node = node["properties"][part]
    return True


@pytest.mark.parametrize("kind", kinds())
def test_every_column_shows_a_field_of_the_schema(kind: crd.Kind) -> None:
    root = crd.schema(kind.model)
    columns = crd.crd(kind)["spec"]["versions"][0]["additionalPrinterColumns"]
    own = [column for column in columns if not column["jsonPath"].startswith(".metadata.")]
    assert [column["jsonPath"] for column in own if not defined(root, column["jsonPath"])] == []
    assert columns[-1] == {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}


def test_the_column_check_sees_a_field_that_is_missing() -> None:
    assert not defined(crd.schema(crd.KINDS[0].model), ".status.members.sleeping")


def test_columns_are_those_that_people_were_promised() -> None:
    shown = {
        kind.name: [column.name for column in kind.columns if column.priority == 0] for kind in crd.KINDS
    }
    assert shown == {
        "ResourcePool": ["Type", "Ready", "Free", "Leased", "Starting", "Queued", "Max", "Reason", "Age"],
        "RolloutJob": ["Status", "Total", "Scored", "Masked", "Failed", "Reward", "Age"],
        "TrainingRun": ["Status", "Step", "Total", "Reward", "Attempt", "Age"],
    }


def test_wide_output_has_the_rates_of_a_pool() -> None:
    (kind,) = [kind for kind in crd.KINDS if kind.name == "ResourcePool"]
    assert [column.name for column in kind.columns if column.priority == 1] == ["Hit%", "P99"]


@pytest.mark.parametrize("kind", kinds())
def test_the_definition_serves_one_version_with_status(kind: crd.Kind) -> None:
    made = crd.crd(kind)
    (version,) = made["spec"]["versions"]
    assert made["metadata"]["name"] == f"{made['spec']['names']['plural']}.{made['spec']['group']}"
    assert (version["name"], version["served"], version["storage"]) == ("v1alpha1", True, True)
    assert version["subresources"]["status"] == {}
    short = {"ResourcePool": "rpool", "RolloutJob": "rjob", "TrainingRun": "trun"}
    assert made["spec"]["names"]["shortNames"] == [short[kind.name]]


def test_pools_and_jobs_are_scaled_by_fields_that_exist() -> None:
    found = {
        kind.name: crd.crd(kind)["spec"]["versions"][0]["subresources"].get("scale") for kind in crd.KINDS
    }
    assert found == {
        "ResourcePool": {
            "specReplicasPath": ".spec.capacity.min",
            "statusReplicasPath": ".status.members.total",
            "labelSelectorPath": ".status.selector",
        },
        "RolloutJob": {
            "specReplicasPath": ".spec.workers.count",
            "statusReplicasPath": ".status.workers",
            "labelSelectorPath": ".status.selector",
        },
        "TrainingRun": None,
    }
    for kind in crd.KINDS:
        assert all(defined(crd.schema(kind.model), path) for path in (found[kind.name] or {}).values())


def test_jobs_of_a_queue_merge_by_name() -> None:
    status = crd.schema(crd.KINDS[0].model)["properties"]["status"]["properties"]
    jobs = status["queue"]["properties"]["byJob"]
    assert jobs["x-kubernetes-list-map-keys"] == jobs["items"]["required"] == ["job"]
    assert jobs["maxItems"] == 16


def test_conditions_merge_by_type() -> None:
    conditions = crd.schema(crd.KINDS[0].model)["properties"]["status"]["properties"]["conditions"]
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]


# 4. The same bytes, and the files in the repository are they.


def test_files_in_the_repository_are_what_the_models_say() -> None:
    assert crd.check(CRDS) == []


def test_two_makings_give_the_same_bytes() -> None:
    assert crd.crds_yaml() == crd.crds_yaml()


def test_written_files_parse_to_the_definitions(tmp_path: Path) -> None:
    paths = crd.write(tmp_path / "new")
    assert [yaml.safe_load(path.read_text()) for path in paths] == [crd.crd(kind) for kind in crd.KINDS]


def test_check_names_every_file_that_differs(tmp_path: Path) -> None:
    first, second, _ = crd.write(tmp_path)
    first.unlink()
    second.write_text(second.read_text() + "# changed by hand\n")
    (tmp_path / "old.yaml").write_text("{}\n")
    assert crd.check(tmp_path) == [
        f"{first}: is missing",
        f"{tmp_path / 'old.yaml'}: is made by no model",
        f"{second}: differs from the models",
    ]


def test_definitions_stay_small_enough_for_client_side_apply() -> None:
    assert max(len(text.encode()) for text in crd.crds_yaml().values()) < 100_000
