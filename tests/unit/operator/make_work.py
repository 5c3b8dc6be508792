"""Builders of training runs and rollout jobs, and all that the operator makes of them."""

from typing import Any

from agentfly.api import RolloutJob, TrainingRun
from agentfly_operator.render.job import launch_config, workers_job
from agentfly_operator.render.run import attempt_objects, policy_pool, prepare_job, roles_policy
from tests.unit.operator.make import CONFIG

Object = dict[str, Any]

SPEC: Object = {
    "agent": {"entrypoint": "agent.py:agent"},
    "tasks": {"path": "tasks.jsonl"},
    "model": {"path": "/agentfly-cache/models/m"},
    "source": {"configMap": "quickstart"},
    "storage": {"claim": "runs"},
}
META = {"name": "first", "namespace": "team", "uid": "0123456789abcdef"}


def run(*, trainer: Object | None = None, **spec: Any) -> TrainingRun:
    whole = {**SPEC, "trainer": trainer or {}, **spec}
    return TrainingRun.model_validate({"metadata": META, "spec": whole})


def job(**spec: Any) -> RolloutJob:
    return RolloutJob.model_validate({"metadata": META, "spec": {**SPEC, **spec}})


def children() -> list[Object]:
    training, rolling = run(trainer={"nodes": 2}), job()
    return [
        roles_policy(training),
        *prepare_job(training, CONFIG),
        policy_pool(training, CONFIG),
        *attempt_objects(training, 1, CONFIG),
        roles_policy(rolling),
        attempt_objects(training, 1, CONFIG, kuberay=True)[-1],
        *prepare_job(rolling, CONFIG),
        policy_pool(rolling, CONFIG),
        launch_config(rolling, CONFIG),
        workers_job(rolling, 4, CONFIG),
    ]
