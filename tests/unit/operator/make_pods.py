"""The pods of all roles of runs and jobs, and what is read from their manifests."""

from typing import Any

import pytest

from agentfly.api import RolloutJob, TrainingRun
from agentfly_operator.render.job import workers_job
from agentfly_operator.render.run import attempt_objects, prepare_job
from tests.unit.operator.make import CONFIG
from tests.unit.operator.make_work import Object, job, run

PLACED: Object = {
    "nodeSelector": {"nvidia.com/gpu.product": "H100"},
    "tolerations": [{"key": "team", "operator": "Equal", "value": "rl", "effect": "NoSchedule"}],
    "priorityClassName": "research",
    "schedulerName": "gangs",
    "podLabels": {"example.com/team": "rl"},
    "podAnnotations": {"example.com/cost": "42"},
}


def trainers(found: TrainingRun, attempt: int = 1) -> list[Object]:
    return [each for each in attempt_objects(found, attempt, CONFIG) if each["kind"] == "Pod"]


def head(found: TrainingRun) -> Object:
    return trainers(found)[0]


def prepare(found: TrainingRun | RolloutJob) -> Object:
    made: Object = prepare_job(found, CONFIG)[1]["spec"]["template"]
    return made


def worker(found: RolloutJob) -> Object:
    made: Object = workers_job(found, 4, CONFIG)["spec"]["template"]
    return made


def placed(**pod: Any) -> dict[str, Object]:
    """A pod of each role whose spec says ``pod`` of it."""
    training, rolling = run(trainer={"pod": pod}), job(workers={"pod": pod})
    return {
        "head": head(training),
        "node": trainers(run(trainer={"pod": pod, "nodes": 2}))[1],
        "prepare of a run": prepare(training),
        "prepare of a job": prepare(rolling),
        "worker": worker(rolling),
    }


def container(pod: Object) -> Object:
    (found,) = pod["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def environment(pod: Object) -> dict[str, str | None]:
    return {each["name"]: each.get("value") for each in container(pod)["env"]}


def mounted(pod: Object) -> dict[str, tuple[Object, Object]]:
    """Volume and mount by path."""
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    assert len(volumes) == len(pod["spec"]["volumes"])
    return {each["mountPath"]: (volumes[each["name"]], each) for each in container(pod)["volumeMounts"]}


ROLES = tuple(placed())
each_role = pytest.mark.parametrize("role", ROLES)


def matches(selector: str, labels: dict[str, str]) -> bool:
    terms = [term.partition("=") for term in selector.split(",")]
    return all(key in labels and (not equals or labels[key] == value) for key, equals, value in terms)
