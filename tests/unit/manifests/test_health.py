"""GitOps tools say of every object what kstatus says: Argo CD's script in Lua 5.1, Flux' expressions in CEL.

One difference is meant: a run or job that is suspended or queued is Suspended to Argo CD and not done to the
expressions.
"""

import itertools
from datetime import UTC, datetime
from typing import Any

import celpy
import pytest
import yaml
from lupa.lua51 import LuaRuntime, lua_type

from agentfly.api import RolloutJob, TrainingRun
from agentfly.api.reasons import Reason, RolloutJobPhase, TrainingRunPhase
from agentfly.roles.status import Admission, JobSeen, RunSeen, rollout_status, training_status
from tests.unit.manifests.kstatus import kstatus
from tests.unit.manifests.rendered import MANIFESTS, Object

KINDS = ("ResourcePool", "RolloutJob", "TrainingRun")
ARGO = yaml.safe_load((MANIFESTS / "gitops/argocd/argocd-cm.yaml").read_text())["data"]
FLUX = yaml.safe_load((MANIFESTS / "gitops/flux/kustomization-pools.yaml").read_text())["spec"]
SPEC = {
    "agent": {"entrypoint": "agent.py:agent"},
    "tasks": {"entrypoint": "agent.py:tasks"},
    "model": {"path": "m"},
}
IN_ARGO = {"Current": "Healthy", "InProgress": "Progressing", "Failed": "Degraded"}


def argo(obj: Object) -> tuple[str, str]:
    """Status and message of Argo CD, whose health scripts have the base and table libraries only."""
    lua = LuaRuntime(register_eval=False, register_builtins=False)
    script = ARGO[f"resource.customizations.health.agentfly.dev_{obj['kind']}"]
    enter = lua.execute(
        "local base, tab = {ipairs = ipairs, pairs = pairs, type = type, tostring = tostring}, table\n"
        "base.table = tab\n"
        "return function(code, given) base.obj = given\n"
        "local run = assert(loadstring(code)); setfenv(run, base); return run() end"
    )
    answer = enter(script, lua.table_from(obj, recursive=True))
    assert lua_type(answer) == "table"
    return answer["status"], answer["message"]


def flux(obj: Object) -> str:
    """kustomize-controller's evaluation: inProgress, failed, current; InProgress if none holds."""
    if obj["status"].get("observedGeneration") != obj["metadata"]["generation"]:
        return "InProgress"
    (check,) = (check for check in FLUX["healthCheckExprs"] if check["kind"] == obj["kind"])
    assert check["apiVersion"] == obj["apiVersion"]
    environment = celpy.Environment()
    given = {name: celpy.json_to_cel(obj[name]) for name in ("metadata", "status")}
    for name, verdict in {"inProgress": "InProgress", "failed": "Failed", "current": "Current"}.items():
        program = environment.program(environment.compile(check[name]))
        if program.evaluate(given):
            return verdict
    return "InProgress"


def an_object(kind: str, conditions: dict[str, str], *, observed: int = 3) -> Object:
    listed = [{"type": t, "status": s, "reason": f"{t}R", "message": f"{t}M"} for t, s in conditions.items()]
    return {
        "apiVersion": "agentfly.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": "x", "generation": 3},
        "status": {"observedGeneration": observed, "conditions": listed},
    }


POOLS = [
    {"Ready": ready, "Reconciling": reconciling, "Stalled": stalled, "Degraded": degraded}
    for ready, reconciling, stalled, degraded in itertools.product(
        ("True", "False", "Unknown"), ("True", "False"), ("True", "False"), ("True", "False")
    )
    if (reconciling, stalled) != ("True", "True")  # never both: agentfly.api.reasons
]


@pytest.mark.parametrize("conditions", POOLS, ids=lambda conditions: "-".join(conditions.values()))
@pytest.mark.parametrize("observed", [3, 2, -1])
def test_of_a_pool_all_three_say_the_same(conditions, observed):
    pool = an_object("ResourcePool", conditions, observed=observed)
    verdict = kstatus(pool)
    assert flux(pool) == verdict
    assert argo(pool)[0] == IN_ARGO[verdict]


def test_each_verdict_is_reached():
    assert {kstatus(an_object("ResourcePool", conditions)) for conditions in POOLS} == set(IN_ARGO)


def test_a_pool_that_nobody_has_looked_at_is_in_progress():
    pool = {
        **an_object("ResourcePool", {}),
        "status": {"observedGeneration": -1},
    }  # the default of the schema
    assert kstatus(pool) == flux(pool) == "InProgress"
    assert argo(pool) == ("Progressing", "the operator has not looked at this generation yet")


def test_argo_shows_why():
    failed = {"Ready": "False", "Reconciling": "False", "Stalled": "True"}
    assert argo(an_object("ResourcePool", failed)) == ("Degraded", "StalledR: StalledM")
    assert argo(an_object("ResourcePool", {"Ready": "Unknown"})) == ("Progressing", "ReadyR: ReadyM")


def runs() -> list[tuple[str, Object]]:
    now = datetime(2026, 11, 30, tzinfo=UTC)
    run = TrainingRun.model_validate({"metadata": {"name": "r"}, "spec": {**SPEC, "steps": 3}})
    job = RolloutJob.model_validate({"metadata": {"name": "j"}, "spec": SPEC})
    statuses: list[tuple[str, str, Any]] = [
        *(
            ("TrainingRun", p, training_status(run, RunSeen(phase=p, admission=waits(p)), now))
            for p in TrainingRunPhase
        ),
        *(
            ("RolloutJob", p, rollout_status(job, JobSeen(phase=p, admission=waits(p)), now))
            for p in RolloutJobPhase
        ),
    ]
    return [
        (
            phase,
            {**an_object(kind, {}, observed=1), "metadata": {"generation": 1}} | {"status": dumped(status)},
        )
        for kind, phase, status in statuses
    ]


def waits(phase: str) -> Admission | None:
    """What a queue says of the phases in which it has a say."""
    if phase == "Queued":
        return Admission(False, Reason.Queued, "8 more needed")
    # Without Kueue an attempt goes on.
    return Admission(False, Reason.KueueMissing, "") if phase == "Running" else None


def dumped(status: Any) -> Object:
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


@pytest.mark.parametrize(
    ("phase", "obj"), runs(), ids=lambda each: each if isinstance(each, str) else each["kind"]
)
def test_of_a_run_in_every_phase_all_three_say_the_same(phase, obj):
    verdict = kstatus(obj)
    expected = dict.fromkeys(("Queued", "Running", "Suspended", "Succeeded"), "Current")
    assert verdict == {**expected, "Failed": "Failed"}.get(phase, "InProgress")
    suspended = phase in ("Suspended", "Queued")
    assert flux(obj) == ("InProgress" if suspended else verdict)
    assert argo(obj)[0] == ("Suspended" if suspended else IN_ARGO[verdict])


@pytest.mark.parametrize("kind", ["TrainingRun", "RolloutJob"])
def test_of_a_run_that_waits_for_a_person_all_three_say_so(kind):
    now = datetime(2026, 11, 30, tzinfo=UTC)
    stalled = {"stalled": Reason.MissingObject, "message": "PersistentVolumeClaim runs is not there"}
    root = {"metadata": {"name": "x"}, "spec": SPEC}
    made = (
        training_status(
            TrainingRun.model_validate(root), RunSeen(phase=TrainingRunPhase.Pending, **stalled), now
        )
        if kind == "TrainingRun"
        else rollout_status(
            RolloutJob.model_validate(root), JobSeen(phase=RolloutJobPhase.Pending, **stalled), now
        )
    )
    obj = {**an_object(kind, {}), "metadata": {"generation": 1}, "status": dumped(made)}
    assert (kstatus(obj), flux(obj)) == ("Failed", "Failed")
    assert argo(obj) == ("Degraded", "MissingObject: PersistentVolumeClaim runs is not there")


def test_every_kind_has_its_checks():
    assert {key.rpartition("_")[2] for key in ARGO if ".health." in key} == set(KINDS)
    assert [check["kind"] for check in FLUX["healthCheckExprs"]] == list(KINDS)


# What a person or a tool acts on, or what changes a few times in an object's life.
STEADY = {
    "ResourcePool": {"reset", "revision", "selector"},
    "RolloutJob": {"phase", "startTime", "completionTime", "selector", "path"},
    "TrainingRun": {
        *("phase", "startTime", "completionTime", "attempt", "restarts", "failures", "attemptTime"),
        *("resumedStep", "restartTime", "activeSeconds", "lastFailure", "engine"),
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_argo_ignores_moving_numbers_and_no_condition(kind):
    ignored = yaml.safe_load(ARGO[f"resource.customizations.ignoreResourceUpdates.agentfly.dev_{kind}"])
    (version,) = a_crd(kind)["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    fields = {pointer.removeprefix("/status/") for pointer in ignored["jsonPointers"]}
    assert fields == set(schema) - {"conditions", "observedGeneration"} - STEADY[kind]


def a_crd(kind: str) -> Object:
    found: Object = yaml.safe_load((MANIFESTS.parent / f"crds/agentfly.dev_{kind.lower()}s.yaml").read_text())
    return found


def test_the_field_that_an_autoscaler_writes_is_the_one_of_the_scale_subresource():
    application = yaml.safe_load((MANIFESTS / "gitops/argocd/application.yaml").read_text())
    ignored = {each["kind"]: each["jsonPointers"] for each in application["spec"]["ignoreDifferences"]}
    scaled = {kind: a_crd(kind)["spec"]["versions"][0]["subresources"].get("scale") for kind in KINDS}
    paths = {kind: scale["specReplicasPath"] for kind, scale in scaled.items() if scale is not None}
    assert ignored == {kind: [path.replace(".", "/")] for kind, path in paths.items()}
