"""A training run as Kubernetes objects, and what a rollout job has in common with it.

Guarantees:
1. A preparation whose failure would come again (exit code 87) is not tried again; a node that goes is no
   failure.
2. A preparation may run where its run's pods will, with their image, claim, CPU and memory, and takes no GPU
   from others.
3. The policy's servers are a ResourcePool like any other, with the operator's image where the run names none.
4. Trainer pods run once: a head that ended is never started in place, so its exit code is its last word.
5. Every trainer pod of an attempt is known to the others by name before it is ready.
6. From outside, trainer pods are reached by the operator alone, on the one port that tells how far they are.
   Ray's key is one more wall: whoever had passed both could run anything.
7. The pods of all roles reach everything but the address at which a cloud tells a node's credentials.
8. A pod has time to write a checkpoint before it is killed.
9. Each trainer pod asks for gpusPerNode GPUs, so a node of as many has one of them.

Not here: what all role pods share (`render.roles`), the pods as a RayCluster (`render.cluster`); when any of
it is made (`plan`).
"""

from typing import Final

from agentfly.api import TrainingRun
from agentfly.roles.launch import ASKED_FILE, STATE_PORT, SUSPEND_ANNOTATION
from agentfly.roles.plan import inference_pool, prepare_launch, serves_itself, trainer_launch
from agentfly.roles.trainer import EXIT_INVALID
from agentfly_operator.config import Config
from agentfly_operator.names import (
    ATTEMPT,
    INDEX,
    ROLE,
    Work,
    child_labels,
    controlled_by,
    launch_name,
    prepare_name,
    roles_name,
    trainer_host,
    trainer_name,
    trainer_pod,
    work_labels,
)
from agentfly_operator.render.cluster import HEALTHY, HEALTHY_FILE, ray_cluster
from agentfly_operator.render.policy import operator_pods
from agentfly_operator.render.roles import (
    Object,
    RoleSpec,
    child,
    field_of,
    launch_map,
    places_of,
    pod_template,
)

GRACE_S: Final = 930  # a checkpoint of a large model, and the step before it
_RETRIES: Final = 3
_ANYWHERE: Final = (
    {"cidr": "0.0.0.0/0", "except": ["169.254.169.254/32"]},
    {"cidr": "::/0", "except": ["fd00:ec2::254/128"]},
)
# To some network plug-ins a pod has no address: it is named beside all addresses.
_EGRESS: Final = [{"to": [{"namespaceSelector": {}}, *({"ipBlock": each} for each in _ANYWHERE)]}]
DISRUPTED: Final[Object] = {
    "action": "Ignore",
    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
}
"""Of a Job's failure policy: who was evicted has not failed."""


def roles_policy(work: Work) -> Object:
    """What the pods of all roles of a run or job may reach; to be made before the first of them.

    The trainer's own policy says it too, since that is made again if somebody removes it.
    """
    pods = {"matchLabels": work_labels(work), "matchExpressions": [{"key": ROLE, "operator": "Exists"}]}
    spec = {"podSelector": pods, "policyTypes": ["Egress"], "egress": _EGRESS}
    name = roles_name(work.metadata.name)
    return child(work, "prepare", "networking.k8s.io/v1", "NetworkPolicy", name, spec=spec)


def prepare_job(work: Work, config: Config) -> tuple[Object, Object]:
    """The preparation of a run or job: its ConfigMap and its Job.

    Raises:
        AgentflyError: spec.storage is absent.
    """
    name = prepare_name(work.metadata.name)
    pod = work.spec.trainer.pod if isinstance(work, TrainingRun) else work.spec.workers.pod
    spec = RoleSpec(
        role="prepare",
        module="prepare",
        launch=name,
        image=trainer_image(work, config)
        if isinstance(work, TrainingRun)
        else pod.image or config.inference_image,
        pod=pod,
        near_gpus=isinstance(work, TrainingRun) and work.spec.trainer.gpus_per_node > 0,
        leases=False,
    )
    launch = prepare_launch(work, places_of(work, config))
    invalid = {"containerName": "prepare", "operator": "In", "values": [EXIT_INVALID]}
    job = {
        "backoffLimit": _RETRIES,
        "podFailurePolicy": {"rules": [DISRUPTED, {"action": "FailJob", "onExitCodes": invalid}]},
        "template": pod_template(work, spec, config),
    }
    return launch_map(work, "prepare", name, launch), child(
        work, "prepare", "batch/v1", "Job", name, spec=job
    )


def trainer_image(run: TrainingRun, config: Config) -> str:
    """What trainer pods run: it has vLLM too where they serve the policy."""
    own = config.colocated_image if serves_itself(run) else config.trainer_image
    return run.spec.trainer.pod.image or own


def policy_pool(work: Work, config: Config) -> Object:
    """The pool of the policy's servers.

    Raises:
        AgentflyError: spec.storage is absent.
    """
    pool = inference_pool(work, places_of(work, config))
    spec = pool.to_json()["spec"]
    spec["modelService"]["image"] = work.spec.inference.pod.image or config.inference_image
    return child(work, "policy", pool.api_version, pool.kind, pool.metadata.name, spec=spec)


def attempt_objects(
    run: TrainingRun, attempt: int, config: Config, *, kuberay: bool = False
) -> tuple[Object, ...]:
    """One attempt: ConfigMap, Service and NetworkPolicy, then the pods with the head first, or a RayCluster.

    Raises:
        AgentflyError: spec.storage is absent.
    """
    name, nodes = run.metadata.name, range(run.spec.trainer.nodes)
    launch = trainer_launch(
        run,
        places_of(run, config),
        attempt,
        pods=() if kuberay else [trainer_pod(name, attempt, index) for index in nodes],
        head=trainer_host(name, run.metadata.namespace or "", attempt),
    )
    read = launch_map(run, "trainer", launch_name(name, attempt), launch, {ATTEMPT: str(attempt)})
    if not kuberay:
        pods = [trainer_pod_of(run, attempt, index, config) for index in nodes]
        return read, *network_objects(run, config), *pods
    read["data"][HEALTHY_FILE] = HEALTHY
    head, other = (_trainer_template(run, attempt, index, config) for index in (0, None))
    return read, *network_objects(run, config), ray_cluster(run, attempt, head, other)


def network_objects(run: TrainingRun, config: Config) -> tuple[Object, Object]:
    """The Service by which the trainer pods of all attempts are found, and the NetworkPolicy of these."""
    return _service(run), _policy(run, config)


def trainer_pod_of(run: TrainingRun, attempt: int, index: int, config: Config) -> Object:
    """One trainer pod of an attempt, made by ourselves.

    Raises:
        AgentflyError: spec.storage is absent.
    """
    template = _trainer_template(run, attempt, index, config)
    metadata = template["metadata"] | {
        "name": trainer_pod(run.metadata.name, attempt, index),
        "namespace": run.metadata.namespace,
        "ownerReferences": [controlled_by(run)],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def _trainer_template(run: TrainingRun, attempt: int, index: int | None, config: Config) -> Object:
    """A trainer pod without its name; ``index`` is None for any but the head, where all are alike."""
    trainer, name = run.spec.trainer, run.metadata.name
    interface = trainer.network.socket_interface
    spec = RoleSpec(
        role="trainer",
        module="head" if index == 0 else "node",
        launch=launch_name(name, attempt),
        image=trainer_image(run, config),
        pod=trainer.pod,
        gpus=trainer.gpus_per_node,
        rdma=trainer.network.rdma,
        grace_s=GRACE_S,
        marks={ATTEMPT: str(attempt), **({} if index is None else {INDEX: str(index)})},
        environment={
            "NCCL_DEBUG": "WARN",
            # The kernel's limit decides: Ray would end ranks, and call it their error.
            "RAY_memory_monitor_refresh_ms": "0",
            **({"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface} if interface else {}),
        },
    )
    template = pod_template(run, spec, config)
    pod = template["spec"]
    if index is not None:
        pod |= {"hostname": trainer_pod(name, attempt, index), "subdomain": trainer_name(name)}
    if index == 0:
        _hears_annotation(pod)
        # An attempt has one head: another pod may have the same name, and never the same uid.
        pod["containers"][0]["env"].append({"name": "POD_UID", "valueFrom": field_of("metadata.uid")})
    return template


def _hears_annotation(pod: Object) -> None:
    """The head is asked by an annotation of its pod: that needs neither a way into it nor a shared folder."""
    path = field_of(f"metadata.annotations['{SUSPEND_ANNOTATION}']")
    items = [{"path": ASKED_FILE.name, **path}]
    pod["volumes"].append({"name": "asked", "downwardAPI": {"items": items}})
    mount = {"name": "asked", "mountPath": str(ASKED_FILE.parent), "readOnly": True}
    pod["containers"][0]["volumeMounts"].append(mount)


def _trainers(run: TrainingRun) -> dict[str, str]:
    """Labels of the trainer pods of all attempts, and of nothing else that runs."""
    return {
        key: value for key, value in child_labels(run, "trainer").items() if key.startswith("agentfly.dev/")
    }


def _service(run: TrainingRun) -> Object:
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _trainers(run)}
    return child(run, "trainer", "v1", "Service", trainer_name(run.metadata.name), spec=spec)


def _policy(run: TrainingRun, config: Config) -> Object:
    state = {"port": STATE_PORT, "protocol": "TCP"}
    spec = {
        "podSelector": {"matchLabels": _trainers(run)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"from": [{"podSelector": {"matchLabels": _trainers(run)}}]},
            {"from": [operator_pods(config)], "ports": [state]},
        ],
        "egress": _EGRESS,
    }
    name = trainer_name(run.metadata.name)
    return child(run, "trainer", "networking.k8s.io/v1", "NetworkPolicy", name, spec=spec)
