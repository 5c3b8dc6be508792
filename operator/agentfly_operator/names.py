"""Names, labels and ports that operator, broker, members, workers and trainers share.

Guarantees:
1. A name made from an object's is a valid name of what it is for: an object's has at most 40 characters. One
   that would be too long is cut, and has a digest.
2. What belongs to a run or job has labels by which all of it is found, and pods of an attempt among them.
3. Pods that lease from a broker have the component that brokers and members admit: ``worker``. What they are
   there for is said by their role.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final, Literal

from agentfly.api import RolloutJob, TrainingRun
from agentfly.api.base import API_VERSION

MANAGED_BY = "app.kubernetes.io/managed-by"
PART_OF = "app.kubernetes.io/part-of"
COMPONENT = "agentfly.dev/component"
POOL = "agentfly.dev/pool"
AGENTFLY = "agentfly"

RUN: Final = "agentfly.dev/training-run"
JOB: Final = "agentfly.dev/rollout-job"
ROLE: Final = "agentfly.dev/role"
ATTEMPT: Final = "agentfly.dev/attempt"
INDEX: Final = "agentfly.dev/index"
RUN_UID: Final = "agentfly.dev/training-run-uid"
"""Of pods that a RayCluster of a run controls: whose they are is to be known when that is gone, too."""

QUEUE: Final = "kueue.x-k8s.io/queue-name"
PRIORITY: Final = "kueue.x-k8s.io/priority-class"
"""Labels by which people put a run or job into a queue of Kueue, as they do with a Job."""
SHAPE: Final = "agentfly.dev/shape"
"""On a run's Workload: a hash of what it asks for."""
PAUSED: Final = "agentfly.dev/paused"
"""On a Workload: it is not active because its run or job is to be suspended, and for no other reason."""

BROKER = "agentfly-broker"
CLIENT_SECRET = "agentfly-broker-client"
CREDENTIALS = "agentfly-broker-credentials"
SIGNING_KEY = "signing-key"
CLIENT_TOKEN = "client-token"
TOKEN_HEADER = "X-Agentfly-Token"
MEMBERS_POLICY = "agentfly-members"
OPERATOR = "agentfly-operator"

BROKER_PORT = 7080
GATEWAY_PORT = 7081
SANDBOXD_PORT = 7070
MODEL_PORT = 8000

CLUSTER_NAME_MAX: Final = 53
"""KubeRay does nothing for a RayCluster with a longer name."""

MEMBER_SELECTOR = f"{MANAGED_BY}={AGENTFLY},{COMPONENT}=member"
CHILD_SELECTOR = f"{MANAGED_BY}={AGENTFLY},{ROLE}"
"""Everything that belongs to a run or a job."""

Work = TrainingRun | RolloutJob
Role = Literal["trainer", "prepare", "worker", "policy"]
_DIGEST: Final = 8  # letters of the digest of a name that is cut
_WORKERS: Final = "-workers"
_COMPONENTS: Final[dict[Role, str]] = {"trainer": "worker", "worker": "worker"}


def pool_policy(pool: str) -> str:
    """The NetworkPolicy of a pool's members."""
    return f"agentfly-pool-{pool}"


def prepare_name(work: str) -> str:
    """The Job that prepares a run or job, and the ConfigMap that it reads."""
    return f"{work}-prepare"


def launch_name(work: str, attempt: int | None = None) -> str:
    """The ConfigMap that the pods of a job read, or those of one attempt of a run."""
    return f"{work}-launch" if attempt is None else f"{work}-launch-{attempt}"


def trainer_name(run: str) -> str:
    """The Service and the NetworkPolicy of a run's trainer pods."""
    return f"{run}-trainer"


def roles_name(work: str) -> str:
    """The NetworkPolicy of the pods of all roles."""
    return f"{work}-roles"


def trainer_pod(run: str, attempt: int, index: int) -> str:
    """A trainer pod; the one with index 0 is the head."""
    return f"{run}-trainer-{attempt}-{index}"


def cluster_name(run: str, attempt: int) -> str:
    """The RayCluster of an attempt: another one for every run and attempt."""
    end = f"-trainer-{attempt}"
    if len(run) + len(end) <= CLUSTER_NAME_MAX:
        return run + end
    end = f"-{sha256(run.encode()).hexdigest()[:_DIGEST]}{end}"
    return run[: CLUSTER_NAME_MAX - len(end)].rstrip("-") + end


def trainer_host(run: str, namespace: str, attempt: int, index: int = 0) -> str:
    """A trainer pod's name in DNS."""
    return f"{trainer_pod(run, attempt, index)}.{trainer_name(run)}.{namespace}.svc"


def workers_name(job: str) -> str:
    """The Job of a job's worker pods."""
    return f"{job}{_WORKERS}"


def job_of_workers(name: str) -> str:
    """The job whose workers a Job of this name may be; "" if it is none."""
    return name.removesuffix(_WORKERS) if name.endswith(_WORKERS) else ""


def queue_of(work: Work) -> str:
    """The queue that a run or job is put into; "" if into none."""
    return work.metadata.labels.get(QUEUE, "")


def priority_of(work: Work) -> str:
    """The class of its priority in that queue; "" if it has none."""
    return work.metadata.labels.get(PRIORITY, "")


def labels(component: str, **more: str) -> dict[str, str]:
    """What every object of ours is found by."""
    return {MANAGED_BY: AGENTFLY, PART_OF: AGENTFLY, COMPONENT: component, **more}


def child_labels(work: Work, role: Role, **more: str) -> dict[str, str]:
    """What an object of a run or job is found by."""
    return labels(_COMPONENTS.get(role, role), **work_labels(work), **{ROLE: role, **more})


def work_labels(work: Work) -> dict[str, str]:
    """What all objects of a run or job are found by, together with the name of any role."""
    return {RUN if isinstance(work, TrainingRun) else JOB: work.metadata.name}


def role_selector(work: Work, role: Role) -> str:
    """Finds the objects of one role."""
    owner = RUN if isinstance(work, TrainingRun) else JOB
    return f"{MANAGED_BY}={AGENTFLY},{owner}={work.metadata.name},{ROLE}={role}"


def owner_of(pool: Mapping[str, Any], *, controller: bool = False) -> dict[str, Any]:
    """The ownerReference of a ResourcePool, given as the API server returned it."""
    metadata = pool["metadata"]
    reference = {"apiVersion": API_VERSION, "kind": "ResourcePool"}
    reference |= {"name": metadata["name"], "uid": metadata["uid"]}
    return {**reference, "controller": True} if controller else reference


def controlled_by(work: Work) -> dict[str, Any]:
    """The ownerReference by which an object goes when its run or job does."""
    reference = {"apiVersion": API_VERSION, "kind": work.kind}
    return {**reference, "name": work.metadata.name, "uid": work.metadata.uid, "controller": True}
