"""The roles of a run in its status: how many of each there should be, how many answer, and why not all do.

Guarantees:
1. Of many that do not answer one is named, always the same one while nothing changes.
2. Where all answer, there is no reason.
"""

from agentfly.api import RolloutJob, TrainingRun
from agentfly.api.trainingrun import RoleStatus
from agentfly.roles.plan import serves_itself
from agentfly_operator.plan.run_attempt import Attempt
from agentfly_operator.plan.run_seen import PodOf, PolicyOf, PrepareOf

_REASON_MAX = 1024


def prepare_role(prepare: PrepareOf) -> RoleStatus:
    """The Job that prepares, until it is complete."""
    return _role(1, 0, prepare.message or ("at work" if prepare.exists else "not made yet"))


def inference_role(work: TrainingRun | RolloutJob, policy: PolicyOf) -> RoleStatus:
    """The policy's servers."""
    desired = work.spec.inference.replicas
    ready = min(policy.use.ready, desired)
    if not policy.exists:
        return _role(desired, 0, "their pool is not made yet")
    if policy.deleting:
        return _role(desired, ready, "their pool is being removed")
    # A pool is Ready, too, while it can still start a server: then the number says more than its reason.
    words = "starting" if policy.ready or not policy.reason else f"{policy.reason}: {policy.message}"
    return _role(desired, ready, words)


def server_roles(run: TrainingRun, policy: PolicyOf) -> dict[str, RoleStatus]:
    """The policy's servers of a run; none where its trainer serves the policy."""
    return {} if serves_itself(run) else {"inference": inference_role(run, policy)}


def trainer_role(attempt: Attempt) -> RoleStatus:
    """The trainer pods of the attempt."""
    ready, reason = 0, ""
    for index in range(attempt.wanted):
        pod = attempt.pods.get(index)
        if index == 0 and attempt.unreached:
            reason = attempt.unreached
        elif pod is not None and pod.ready and not pod.over:
            ready += 1
        elif not reason:
            reason = _why(pod) if pod is not None else _why_not_there(attempt, index)
    return _role(attempt.wanted, ready, reason)


def _why(pod: PodOf) -> str:
    return f"pod {pod.name}: {pod.waiting or pod.phase}"


def _why_not_there(attempt: Attempt, index: int) -> str:
    return attempt.unmade or f"pod {attempt.members.absent[index]} is gone"


def _role(desired: int, ready: int, reason: str) -> RoleStatus:
    return RoleStatus(
        desired=desired, ready=ready, reason=reason[:_REASON_MAX] if ready < desired and reason else None
    )
