"""Reading manifests; the sections have the numbers of the guarantees in agentfly.api.load."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.api import shape
from agentfly.api.base import ApiModel
from agentfly.api.load import MODELS, Manifests, load_manifests
from agentfly.api.problems import (
    NOTHING,
    PATTERNS,
    InvalidManifests,
    ManifestError,
    nearest,
    path_text,
    shown,
)
from agentfly.errors import AgentflyError
from tests.unit.api.worlds import SCHEMAS, walk

WRONG = Path(__file__).parent / "wrong"
NAMES = sorted(path.name for path in WRONG.glob("*.yaml"))

RIGHT = """\
apiVersion: agentfly.dev/v1alpha1
kind: ResourcePool
metadata:
  name: shell
spec:
  type: Container
  container: {}
  capacity: {min: 1, max: 4}
---
apiVersion: agentfly.dev/v1alpha1
kind: TrainingRun
metadata: {name: first}
spec:
  agent: {entrypoint: "agent.py:agent"}
  tasks: {entrypoint: "agent.py:tasks"}
  pools:
  - shell
  model:
    build: {script: model.py}
  algorithm: {learningRate: 1e-5}
  steps: 30
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """A right file with all that it names beside it."""
    (tmp_path / "run.yaml").write_text(RIGHT)
    (tmp_path / "agent.py").write_text("raise SystemExit('never run')\n")
    (tmp_path / "model.py").write_text("raise SystemExit('never run')\n")
    (tmp_path / "weights").mkdir()
    return tmp_path / "run.yaml"


def refusals(path: Path | str, sets: Sequence[str] = ()) -> str:
    with pytest.raises(InvalidManifests) as caught:
        load_manifests(path, sets)
    return caught.value.render().replace(str(Path(path).parent), "<here>")


# Right files.


def test_a_right_file_gives_its_objects(manifest: Path) -> None:
    found = load_manifests(manifest)
    assert [pool.metadata.name for pool in found.pools] == ["shell"]
    (run,) = found.runs
    assert (run.spec.steps, run.spec.pools, run.spec.algorithm.learning_rate) == (30, ("shell",), 1e-5)
    assert (found.jobs, found.base) == ((), manifest.parent)


def test_a_relative_path_has_an_absolute_base(manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(manifest.parent)
    assert load_manifests("run.yaml") == load_manifests(manifest)


# 1. All errors, in whole words.


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_manifest_says_everything_that_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(WRONG)
    with pytest.raises(InvalidManifests) as caught:
        load_manifests(name)
    text = caught.value.render().replace(str(WRONG), "<here>")
    assert text + "\n" == (WRONG / name).with_suffix(".txt").read_text()


def test_every_pinned_text_has_its_manifest() -> None:
    assert len(NAMES) > 20
    assert sorted(path.with_suffix(".yaml").name for path in WRONG.glob("*.txt")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_error_is_followed_by_a_remedy(name: str) -> None:
    lines = [*(WRONG / name).with_suffix(".txt").read_text().splitlines(), ""]
    errors = [(line, below) for line, below in pairwise(lines) if not line.startswith("  hint: ")]
    assert errors
    assert [line for line, below in errors if not below.startswith("  hint: ")] == []


def test_errors_carry_file_line_path_value_problem_and_hints(manifest: Path) -> None:
    manifest.write_text(RIGHT.replace("max: 4", "max: -1"))
    with pytest.raises(InvalidManifests) as caught:
        load_manifests(manifest)
    assert caught.value.errors == (
        ManifestError(str(manifest), 8, "spec.capacity.max", -1, "is less than 1", ("use 1 or more",)),
    )
    assert isinstance(caught.value, AgentflyError)
    assert caught.value.message == f"{manifest}:8: spec.capacity.max: -1 is less than 1"


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    assert refusals(tmp_path / "no.yaml") == (
        "<here>/no.yaml: cannot be read: No such file or directory\n  hint: name a file that is in <here>"
    )


# 2. Flags.


def with_sets(manifest: Path, *sets: str) -> Manifests:
    return load_manifests(manifest, sets)


def test_a_flag_sets_a_field_of_the_run(manifest: Path) -> None:
    (run,) = with_sets(manifest, "steps=7", "model.path=weights", "spec.rollout.groupSize=4").runs
    assert (run.spec.steps, run.spec.model.path, run.spec.rollout.group_size) == (7, "weights", 4)


def test_a_flag_sets_a_field_of_a_named_pool(manifest: Path) -> None:
    (pool,) = with_sets(manifest, "pool/shell.capacity.max=9", "pool/shell.spec.container.env.A=b").pools
    assert pool.spec.capacity.max == 9
    assert pool.spec.container is not None
    assert pool.spec.container.env == {"A": "b"}


def test_the_last_flag_wins(manifest: Path) -> None:
    (run,) = with_sets(manifest, "steps=7", "steps=8").runs
    assert run.spec.steps == 8


@pytest.mark.parametrize("nothing", ["model.build=null", "model.build=", "model.build=~"])
def test_null_removes_a_field(manifest: Path, nothing: str) -> None:
    (run,) = with_sets(manifest, "model.path=weights", nothing).runs
    assert run.spec.model.build is None


def test_a_value_may_be_a_list_and_have_equals_signs(manifest: Path) -> None:
    (run,) = with_sets(manifest, "overrides=[trainer.x=1, +a.b=c=d]").runs
    assert run.spec.overrides == ("trainer.x=1", "+a.b=c=d")


def test_the_file_is_left_as_it_was(manifest: Path) -> None:
    with_sets(manifest, "steps=7")
    assert manifest.read_text() == RIGHT


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("steps=0", "--set steps=0: spec.steps: 0 is less than 1\n  hint: use 1 or more"),
        (
            "step=3",
            "--set step=3: spec.step: is not a known field\n  hint: did you mean steps?",
        ),
        (
            "rollout.timeouts.call=3",
            "--set rollout.timeouts.call=3: spec.rollout.timeouts.call: is not a known field\n"
            "  hint: use one of callSeconds, turnSeconds, rolloutSeconds",
        ),
        (
            "steps.x=3",
            "--set steps.x=3: spec.steps: has no fields that can be set\n"
            "  hint: set spec.steps itself, to a value such as 100",
        ),
        (
            "pools.0=x",
            "--set pools.0=x: spec.pools: has no fields that can be set\n"
            "  hint: set spec.pools itself, to a value such as [a, b]",
        ),
        ("steps", "--set steps: is not path=value\n  hint: write path=value, as in steps=30"),
        ("=3", "--set =3: is not path=value\n  hint: write path=value, as in steps=30"),
        (
            "a..b=3",
            "--set a..b=3: a..b is not a path of fields joined by dots\n"
            "  hint: write path=value, as in steps=30",
        ),
        (
            "pools/shell.capacity.max=3",
            "--set pools/shell.capacity.max=3: "
            "pools/shell.capacity.max is not a path of fields joined by dots\n"
            "  hint: write path=value, as in steps=30",
        ),
        (
            "pool/shel.capacity.max=3",
            "--set pool/shel.capacity.max=3: the file has no ResourcePool shel\n  hint: did you mean shell?",
        ),
        (
            "pool/other.capacity.max=3",
            "--set pool/other.capacity.max=3: the file has no ResourcePool other\n  hint: use shell",
        ),
        (
            "pools=[shel]",
            "--set pools=[shel]: spec.pools[0]: shel is no ResourcePool of this file\n"
            "  hint: did you mean shell?",
        ),
        (
            "model.path=gone",
            "--set model.path=gone: spec.model.path: gone is not a directory (looked at <here>/gone)\n"
            "  hint: give a directory in Hugging Face layout, or remove path and set build",
        ),
        (
            "pool/shell.capacity.max=0",
            "--set pool/shell.capacity.max=0: spec.capacity.max: 0 is less than 1\n"
            "  hint: use 1 or more",
        ),
        ("agent=null", "--set agent=null: spec.agent: is missing\n"
                       '  hint: add agent: The agent, as {entrypoint: "agent.py:agent"}'),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_flag_is_said_of_the_flag(manifest: Path, flag: str, text: str) -> None:
    assert refusals(manifest, [flag]) == text


def test_a_value_that_is_no_yaml_is_said_of_the_flag(manifest: Path) -> None:
    error, hint = refusals(manifest, ["steps=["]).splitlines()
    assert error.startswith("--set steps=[: not YAML: ")
    assert hint == "  hint: end each { with } and each [ with ]"


def test_a_flag_needs_one_run(manifest: Path) -> None:
    manifest.write_text(RIGHT + "---\n" + RIGHT.split("---\n")[1].replace("first", "second"))
    assert refusals(manifest, ["steps=3"]) == (
        "--set steps=3: the file has 2 TrainingRun or RolloutJob\n"
        "  hint: keep one TrainingRun or RolloutJob in the file"
    )
    manifest.write_text(RIGHT.split("---\n", maxsplit=1)[0])
    assert refusals(manifest, ["steps=3"]) == (
        "--set steps=3: the file has no TrainingRun or RolloutJob\n"
        "  hint: add a TrainingRun or RolloutJob to the file"
    )


def test_a_flag_is_for_the_kind_that_was_asked_for(manifest: Path) -> None:
    pool, run = RIGHT.split("---\n")
    job = run.replace("TrainingRun", "RolloutJob").partition("  algorithm")[0]
    manifest.write_text("---\n".join([pool, run, job]))
    found = load_manifests(manifest, ["steps=3"], "TrainingRun")
    assert (found.runs[0].spec.steps, found.jobs[0].spec.limit) == (3, None)
    found = load_manifests(manifest, ["limit=3", "seed=5"], "RolloutJob")
    assert (found.jobs[0].spec.limit, found.jobs[0].spec.seed, found.runs[0].spec.seed) == (3, 5, 0)
    manifest.write_text(RIGHT)
    with pytest.raises(InvalidManifests) as caught:
        load_manifests(manifest, ["seed=3"], "RolloutJob")
    assert caught.value.render() == (
        "--set seed=3: the file has no RolloutJob\n  hint: add a RolloutJob to the file"
    )


def test_a_flag_for_a_pool_needs_one_of_that_name(manifest: Path) -> None:
    pool, run = RIGHT.split("---\n")
    manifest.write_text(
        "---\n".join([pool, pool.replace("  name: shell", "  name: shell\n  namespace: lab"), run])
    )
    assert refusals(manifest, ["pool/shell.capacity.max=3"]) == (
        "--set pool/shell.capacity.max=3: the file has 2 ResourcePool shell\n"
        "  hint: keep one ResourcePool shell in the file"
    )
    manifest.write_text(run)
    assert refusals(manifest, ["pool/shell.capacity.max=3", "pools=[]"]) == (
        "--set pool/shell.capacity.max=3: the file has no ResourcePool shell\n"
        "  hint: add a ResourcePool shell to the file"
    )


def test_a_rule_that_a_flag_breaks_is_said_of_the_flag(manifest: Path) -> None:
    assert refusals(manifest, ["rollout.timeouts.callSeconds=200"]) == (
        "--set rollout.timeouts.callSeconds=200: "
        "spec.rollout.timeouts.callSeconds: 200 is more than turnSeconds\n"
        "  hint: set callSeconds to turnSeconds or less"
    )


def test_errors_of_file_and_flags_come_together(manifest: Path) -> None:
    manifest.write_text(RIGHT.replace("min: 1", "min: 5").replace("steps: 30", "stepz: 30"))
    assert refusals(manifest, ["seed=x"]) == (
        "<here>/run.yaml:8: spec.capacity.max: 4 is less than min\n"
        "  hint: raise max or lower min\n"
        "<here>/run.yaml:21: spec.stepz: is not a known field\n"
        "  hint: did you mean steps?\n"
        '--set seed=x: spec.seed: "x" is not a whole number\n'
        "  hint: write a whole number, such as 0"
    )


# 3. What stands around the objects.


def test_a_pool_of_another_namespace_is_another_pool(manifest: Path) -> None:
    manifest.write_text(RIGHT.replace("{name: first}", "{name: first, namespace: lab}"))
    assert refusals(manifest) == (
        "<here>/run.yaml:17: spec.pools[0]: shell is no ResourcePool of this file\n"
        "  hint: add a ResourcePool named shell to the file"
    )


def test_a_pool_that_is_wrong_itself_counts_as_there(manifest: Path) -> None:
    manifest.write_text(RIGHT.replace("max: 4", "max: 0"))
    assert refusals(manifest) == (
        "<here>/run.yaml:8: spec.capacity.max: 0 is less than 1\n  hint: use 1 or more"
    )


def test_a_script_that_is_not_used_need_not_exist(manifest: Path) -> None:
    (manifest.parent / "model.py").unlink()
    assert with_sets(manifest, "model.path=weights").runs


def test_a_model_directory_may_be_absolute(manifest: Path) -> None:
    (run,) = with_sets(manifest, f"model.path={manifest.parent}/weights").runs
    assert run.spec.model.path == f"{manifest.parent}/weights"


def test_an_importable_module_counts_as_there(manifest: Path) -> None:
    (run,) = with_sets(manifest, "agent.entrypoint=json.decoder:agent").runs
    assert run.spec.agent.entrypoint == "json.decoder:agent"


def test_two_kinds_may_share_a_name(manifest: Path) -> None:
    manifest.write_text(RIGHT.replace("name: first", "name: shell"))
    assert len(load_manifests(manifest).runs) == 1


def test_a_name_too_long_for_a_file_is_no_file(manifest: Path) -> None:
    assert " is not a file (looked at " in refusals(manifest, [f"model.build.script={'x' * 1000}"])
    assert " is not a directory (looked at " in refusals(manifest, [f"model.path={'x' * 1000}"])


LINES = RIGHT.splitlines()
SCRAPS = [
    *LINES,
    "",
    "  ",
    "- 1",
    "x: [",
    "\tx: 1",
    "spec: 3",
    "metadata: [a]",
    "  type: {}",
    "<<: *a",
    "kind: ~",
    "é",
]


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(LINES) - 1),
            st.sampled_from(["drop", "insert", "replace"]),
            st.sampled_from(SCRAPS),
        ),
        max_size=4,
    ),
    st.lists(
        st.sampled_from(["steps=3", "spec=1", "model=x", "pool/shell.container=[]", "tasks={}", "a=b"]),
        max_size=2,
    ),
)
def test_no_file_and_no_flag_makes_it_fall_over(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, str, str]], sets: list[str]
) -> None:
    lines = list(LINES)
    for place, what, scrap in edits:
        here = min(place, len(lines))
        lines[here : here + (what != "insert")] = [] if what == "drop" else [scrap]
    path = tmp_path_factory.mktemp("m") / "run.yaml"
    path.write_text("\n".join(lines) + "\n")
    errors: tuple[ManifestError, ...] = ()
    try:
        found = load_manifests(path, sets)
    except InvalidManifests as invalid:
        errors = invalid.errors
    assert errors or found.pools or found.runs
    assert all(error.line is None or 1 <= error.line <= len(lines) + 1 for error in errors)
    assert all(error.hints for error in errors)


# 4. Nothing is run: agent.py and model.py of every test above end the process.


# The words of agentfly.api.problems.


AMOUNTS = (".cpu", ".memory", ".disk", ".maxMemory", ".sharedMemory", ".ephemeralStorage")


def test_every_pattern_of_spec_has_a_text() -> None:
    patterns = {
        node["pattern"]
        for schema in SCHEMAS.values()
        for path, node in walk(schema)
        if "pattern" in node and not path.startswith("status") and not path.endswith(AMOUNTS)
    }
    assert patterns == set(PATTERNS)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (4, "4"),
        (1.5, "1.5"),
        (float("-inf"), "-.inf"),
        (float("nan"), ".nan"),
        (True, "true"),
        ("", '""'),
        (" a", '" a"'),
        ("café", "café"),
        ([1], "a list"),
        ({}, "a mapping"),
        ("x" * 100, "x" * 59 + "…"),
    ],
)
def test_values_are_shown_as_they_stand_in_yaml(value: object, text: str) -> None:
    assert shown(value) == text


def test_paths_are_shown_with_dots_and_brackets() -> None:
    assert path_text(("spec", "overrides", 0, "a")) == "spec.overrides[0].a"
    assert path_text(()) == ""


@pytest.mark.parametrize(
    ("word", "near"),
    [("groupsize", "groupSize"), ("group_size", "groupSize"), ("gropSize", "groupSize"), ("x", None)],
)
def test_the_nearest_word_ignores_case_and_underscores(word: str, near: str | None) -> None:
    assert nearest(word, ["maxTurns", "groupSize"]) == near


def test_an_error_of_the_whole_file_has_neither_line_nor_path() -> None:
    assert str(ManifestError("a.yaml", None, "", NOTHING, "has no objects")) == "a.yaml: has no objects"


def test_every_rule_has_a_remedy() -> None:
    models = [ApiModel]
    for model in models:
        models += model.__subclasses__()
    rules = [rule for model in models for rule in model.rules]
    assert len(rules) > 10
    assert [rule.problem for rule in rules if not rule.hint] == []


ITEM = "Settings of verl in Hydra's form (trainer.x=y), applied last; the last wins"


@pytest.mark.parametrize(
    ("flag", "text", "hint"),
    [
        ("rollout=3", "spec.rollout: 3 is not a mapping", "write a mapping, such as {groupSize: 8}"),
        ("agent=a", 'spec.agent: "a" is not a mapping', 'write {entrypoint: "agent.py:agent"}'),
        ("model.build=a", 'spec.model.build: "a" is not a mapping', "write a mapping with script"),
        ("pools={}", "spec.pools: a mapping is not a list", "begin each entry with '- '"),
        ("overrides=[{}]", "spec.overrides[0]: a mapping is not text", f"write text: {ITEM}"),
        ("pools=[shell, shell]", "spec.pools: has shell twice", "write shell once"),
        ("steps='2.5'", 'spec.steps: "2.5" is not a whole number', "write a whole number, such as 100"),
        ("steps='true'", 'spec.steps: "true" is not a whole number', "write a whole number, such as 100"),
        (
            "rollout.temperature='.5'",
            'spec.rollout.temperature: ".5" is not a number',
            "write .5 without quotes",
        ),
        ("seed=3000000000", "spec.seed: 3000000000 is more than 2147483647", "use 2147483647 or less"),
        (
            "algorithm.learningRate=0",
            "spec.algorithm.learningRate: 0 is not more than 0",
            "use more than 0, such as 1e-06",
        ),
        (
            "algorithm.clipLow=1",
            "spec.algorithm.clipLow: 1 is not less than 1",
            "use less than 1, such as 0.5",
        ),
        (
            "rollout.maxDriftFraction=no",
            "spec.rollout.maxDriftFraction: false is not a number",
            "write a number, such as 0",
        ),
        (
            "pool/shell.type=x",
            "spec.type: x is not one of Container, ModelService, ExternalAPI, InProcess",
            "use one of Container, ModelService, ExternalAPI, InProcess",
        ),
        (
            "pool/shell.type.x=x",
            "spec.type: has no fields that can be set",
            "set spec.type itself, to a value such as Container",
        ),
        ("pool/shell.container.image=''", 'spec.container.image: "" is empty', "write text, such as host"),
        (
            'pool/shell.container.image="\\ud800"',
            'spec.container.image: "\ud800" is not text in Unicode',
            "write text, such as host",
        ),
        (
            "pool/shell.container.network='true'",
            'spec.container.network: "true" is not true or false',
            "write true without quotes",
        ),
        (
            "pool/shell.container.network=1",
            "spec.container.network: 1 is not true or false",
            "write true or false",
        ),
        (
            "pool/shell.container.env=[]",
            "spec.container.env: a list is not a mapping",
            "write a mapping, such as {name: text}",
        ),
        (
            "pool/shell.container.env.A.b=1",
            "spec.container.env.A: has no fields that can be set",
            "set spec.container.env.A itself, to a value such as text",
        ),
        (
            f"pool/shell.container.env={{{', '.join(f'A{n}: b' for n in range(65))}}}",
            "spec.container.env: has 65 entries, more than 64",
            "keep 64 entries or less",
        ),
        (
            "pool/shell.reuse=x",
            'spec.reuse: "x" is not a mapping',
            "write a mapping, such as {quarantine: 0}",
        ),
        (
            "pool/shell.capacity.min.x=x",
            "spec.capacity.min: has no fields that can be set",
            "set spec.capacity.min itself, to a value such as 0",
        ),
    ],
)
def test_a_remedy_has_the_value_to_use(manifest: Path, flag: str, text: str, hint: str) -> None:
    assert refusals(manifest, [flag]) == f"--set {flag}: {text}\n  hint: {hint}"


def test_what_the_api_server_writes_has_remedies_too(manifest: Path) -> None:
    manifest.write_text(
        RIGHT.replace("  name: shell", "  name: shell\n  creationTimestamp: 2026-01-31").replace(
            "---", "status:\n  conditions: [{type: '0', status: x, reason: a, message: a}]\n---"
        )
    )
    assert refusals(manifest).splitlines() == [
        "<here>/run.yaml:5: metadata.creationTimestamp: 2026-01-31 is not a time with its zone",
        "  hint: write it as 2026-01-31T12:00:00Z",
        "<here>/run.yaml:11: status.conditions[0].type: 0 does not match "
        "^[A-Za-z]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        "  hint: write text: What is observed; one of agentfly.api.reasons.ConditionType",
        "<here>/run.yaml:11: status.conditions[0].status: x is not one of True, False, Unknown",
        "  hint: use one of True, False, Unknown",
        "<here>/run.yaml:11: status.conditions[0].lastTransitionTime: is missing",
        "  hint: add lastTransitionTime: When status last changed to another value",
    ]  # fmt: skip


# The way in a model, agentfly.api.shape.


@pytest.mark.parametrize(
    ("where", "found"),
    [
        (("spec", "steps"), int),
        (("spec", "pools", 0), str),
        (("status", "pools", "shell", "ready"), int),
        (("spec", "pools", "a"), None),
        (("spec", "nothing"), None),
        (("spec", "steps", "x"), None),
    ],
)
def test_a_path_leads_to_the_field(where: tuple[str | int, ...], found: type | None) -> None:
    annotation = shape.below(MODELS["TrainingRun"], where)
    assert (None if annotation is None else shape.bare(annotation)) is found


def test_a_path_leads_through_optional_blocks() -> None:
    model = shape.model_of(shape.below(MODELS["ResourcePool"], ("spec", "container")))
    assert model is not None
    assert issubclass(model, ApiModel)
    assert "memory" in shape.fields(model)
