"""The trainer pods of an attempt as a RayCluster, which KubeRay makes pods of.

Guarantees:
1. The pods are those that we would make ourselves, with their commands, which KubeRay would replace, their
   volumes, their end. A pod that ended is not started again.
2. What KubeRay adds to them changes nothing of their life: it neither kills a pod whose Ray serves no
   dashboard, nor keeps one waiting for an answer that only who has the run's key gets.
3. Who a pod belongs to is to be seen in it, also when its RayCluster is gone.
4. The head is known by its label, as elsewhere, and has the name in DNS that the others look for.

KubeRay puts another pod in the place of one that ended: that is dealt with where heads and pods begin
(`agentfly.launch`), and where they are looked at (`plan.run_members`).
"""

from typing import Any, Final

from agentfly.api import TrainingRun
from agentfly.roles.launch import LAUNCH_FILE
from agentfly_operator.names import ATTEMPT, RUN_UID, cluster_name
from agentfly_operator.render.roles import Object, child

GROUP: Final = "nodes"
OWN_COMMANDS: Final = "ray.io/overwrite-container-cmd"
# KubeRay's init container asks the head's Ray for its health until it answers, and has no key: it would never
# end. Our pods wait for the head themselves. The init container is a script of bash, which reads this first.
HEALTHY_FILE: Final = "kuberay.sh"
HEALTHY: Final = 'ray() { [ "$1" = health-check ] || command ray "$@"; }\n'
_PERIOD_S: Final = 3600


def ray_cluster(run: TrainingRun, attempt: int, head: Object, other: Object) -> Object:
    """The RayCluster of an attempt.

    Args:
        head: template of the head's pod.
        other: template of the other pods, if there is one.
    """
    nodes = run.spec.trainer.nodes
    spec: dict[str, Any] = {"headGroupSpec": {"rayStartParams": {}, "template": _ours(run, head)}}
    if nodes > 1:
        count = nodes - 1
        container = other["spec"]["containers"][0]
        reads = {"name": "BASH_ENV", "value": str(LAUNCH_FILE.parent / HEALTHY_FILE)}
        container["env"] = [*container["env"], reads]
        spec["workerGroupSpecs"] = [
            {
                "groupName": GROUP,
                **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), count),
                "rayStartParams": {},
                "template": _ours(run, other),
            }
        ]
    name = cluster_name(run.metadata.name, attempt)
    made = child(run, "trainer", "ray.io/v1", "RayCluster", name, {ATTEMPT: str(attempt)}, spec=spec)
    made["metadata"]["annotations"] = {OWN_COMMANDS: "true"}
    return made


def _ours(run: TrainingRun, template: Object) -> Object:
    """A template whose pods say whose they are, and have probes, so that KubeRay adds none."""
    template["metadata"]["labels"] |= {RUN_UID: run.metadata.uid}
    probe = {"exec": {"command": ["true"]}, "periodSeconds": _PERIOD_S, "timeoutSeconds": 30}
    template["spec"]["containers"][0] |= {"livenessProbe": probe, "readinessProbe": probe}
    return template
