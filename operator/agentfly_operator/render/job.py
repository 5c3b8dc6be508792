"""The workers of a rollout job as Kubernetes objects.

Guarantees:
1. Each shard is an index of one Job, whose parallelism is how many pods play at the same time; 0 is allowed.
2. A shard has three more tries after failures of its own, and none where the next would fail alike. A node
   that goes, or a pod that somebody deletes, is no failure. No number of failed shards ends the others, but
   in a job of more shards than Kubernetes allows that for.
3. The Job of a job in a queue of Kueue is in that queue, and does not begin by itself.

Not here: what all role pods share (`render.roles`); its preparation and its policy (`render.run`).
"""

from typing import Final

from agentfly.api import RolloutJob
from agentfly.roles.plan import shard_launch
from agentfly.roles.trainer import EXIT_INVALID
from agentfly.roles.worker import EXIT_BUDGET, EXIT_STOPPED
from agentfly_operator.config import Config
from agentfly_operator.names import PRIORITY, QUEUE, launch_name, priority_of, queue_of, workers_name
from agentfly_operator.render.roles import Object, RoleSpec, child, launch_map, places_of, pod_template
from agentfly_operator.render.run import DISRUPTED

GRACE_S: Final = 60
_RETRIES: Final = 3
_MANY: Final = 100_000  # with more indexes Kubernetes wants a bound of those that fail,
_MAY_FAIL: Final = 10_000  # which is at most this


def launch_config(job: RolloutJob, config: Config) -> Object:
    """The ConfigMap that all worker pods read.

    Raises:
        AgentflyError: spec.storage is absent.
    """
    launch = shard_launch(job, places_of(job, config))
    return launch_map(job, "worker", launch_name(job.metadata.name), launch)


def workers_job(job: RolloutJob, shards: int, config: Config) -> Object:
    """The Job whose pods play the shards.

    Args:
        shards: how many there are, known once the job is prepared.
    """
    workers = job.spec.workers
    pods = RoleSpec(
        role="worker",
        module="shard",
        launch=launch_name(job.metadata.name),
        image=workers.pod.image or config.inference_image,
        pod=workers.pod,
        grace_s=GRACE_S,
    )
    stopped = {"containerName": "worker", "operator": "In", "values": [EXIT_STOPPED]}
    alike = {"containerName": "worker", "operator": "In", "values": [EXIT_BUDGET, EXIT_INVALID]}
    rules = [
        DISRUPTED,
        {"action": "Ignore", "onExitCodes": stopped},
        {"action": "FailIndex", "onExitCodes": alike},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": shards,
        "parallelism": workers.count,
        "backoffLimitPerIndex": _RETRIES,
        "podFailurePolicy": {"rules": rules},
        "template": pod_template(job, pods, config),
        **({"maxFailedIndexes": _MAY_FAIL} if shards > _MANY else {}),
        # In a queue it is Kueue that lets it begin; one that had begun before would be killed.
        **({"suspend": True} if job.spec.suspend or queue_of(job) else {}),
    }
    marks = {QUEUE: queue_of(job), PRIORITY: priority_of(job)} if queue_of(job) else {}
    marks = {label: value for label, value in marks.items() if value}
    return child(job, "worker", "batch/v1", "Job", workers_name(job.metadata.name), marks, spec=spec)
