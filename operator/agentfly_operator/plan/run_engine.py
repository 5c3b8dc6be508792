"""Who makes the trainer pods of an attempt: this operator, or KubeRay.

Guarantees:
1. What a run asks for by name it gets, or waits for; nothing else is taken instead.
2. Without a name it gets a RayCluster where KubeRay is installed and there is more than one pod, else plain
   pods. The status says which and why.
3. It is chosen for each attempt when that is numbered, and never changes within it: what was made of the
   attempt is known by it.
4. Of a RayCluster that has not the pods it should have it is said why, as far as anybody knows.
"""

from collections.abc import Sequence

from agentfly.api import TrainingRun, TrainingRunStatus
from agentfly.api.reasons import Reason
from agentfly.api.trainingrun import EngineStatus
from agentfly_operator.plan.run_seen import ClusterOf, RunObserved

DEFINITION = "rayclusters.ray.io"
FALLBACK = f"KubeRay is not installed: {DEFINITION} is not defined in this cluster"


def engine_of(run: TrainingRun, seen: RunObserved) -> EngineStatus:
    """The engine of an attempt that begins now."""
    asked = run.spec.trainer.engine
    if asked != "Auto":
        return EngineStatus(kind=asked, message="spec.trainer.engine asks for it")
    if run.spec.trainer.nodes == 1:
        return EngineStatus(kind="Native", message="one pod needs no RayCluster")
    if seen.kuberay:
        return EngineStatus(kind="KubeRay", message=f"KubeRay is installed: {DEFINITION} is defined")
    return EngineStatus(kind="Native", message=FALLBACK)


def missing_engine(run: TrainingRun, seen: RunObserved) -> tuple[Reason, str] | None:
    """Why no attempt can begin with the engine that the run asks for, and what to do; None if one can."""
    if run.spec.trainer.engine != "KubeRay" or seen.kuberay:
        return None
    begun = ", while the run is suspended" if run.status.attempt else ""
    return Reason.KubeRayMissing, (
        f"spec.trainer.engine is KubeRay, and CRD {DEFINITION} is not there: install KubeRay 1.5 or newer, "
        f"or set spec.trainer.engine to Native{begun}"
    )


def by_kuberay(status: TrainingRunStatus) -> bool:
    """Whether KubeRay makes the pods of the newest attempt."""
    return status.engine is not None and status.engine.kind == "KubeRay"


def lacks_kuberay(status: TrainingRunStatus, seen: RunObserved) -> bool:
    """Whether the newest attempt is KubeRay's, and KubeRay's kind is gone since it was chosen."""
    return by_kuberay(status) and not seen.kuberay


def wants_pods(clusters: Sequence[ClusterOf], attempt: int) -> str:
    """What keeps the RayCluster of an attempt from having its pods, for people; "" if nothing is known."""
    cluster = next((each for each in clusters if each.attempt == attempt), None)
    if cluster is None:
        return ""
    if cluster.trouble:
        return f"RayCluster {cluster.name}: {cluster.trouble}"
    if not cluster.taken:
        return f"RayCluster {cluster.name}: KubeRay has not seen it; does it run, and watch this namespace?"
    return f"RayCluster {cluster.name}: KubeRay is making its pods"
