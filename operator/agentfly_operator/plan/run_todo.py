"""The steps of a run: what must be made and what must go.

Guarantees:
1. A step follows from the stored status and from the new one: so none is wrong, whichever of the two is
   stored when it is carried out.
2. What was seen to be on its way out is not removed again, and what exists is not made again.
3. Of a finished run everything goes that was made for it. The policy's servers go when no pod is left that
   could ask them for something.
4. Pods of an attempt that ended have `GRACE_S` seconds left: there is nothing more for them to save. A
   RayCluster goes before its pods, or KubeRay would replace them, and takes care of it that they go.
5. A preparation that a suspension overtakes is stopped, and done again when the run goes on. So it is when
   the queue of the run takes its quota back.
6. A run whose trainer serves the policy has no servers beside it.
7. What the pods of an attempt find each other by is made again if somebody deleted it.
"""

from collections.abc import Iterator

from agentfly.api import TrainingRun, TrainingRunStatus
from agentfly.api.reasons import ConditionType as Type
from agentfly.api.reasons import TrainingRunPhase as Phase
from agentfly.roles.plan import serves_itself
from agentfly_operator.names import launch_name, trainer_name
from agentfly_operator.plan.queue import may_have, may_start
from agentfly_operator.plan.run_attempt import OVER, TRAINER, in_attempt
from agentfly_operator.plan.run_engine import by_kuberay
from agentfly_operator.plan.run_seen import ClusterOf, PodOf, RunObserved
from agentfly_operator.plan.run_steps import (
    AskSuspend,
    MakeAttempt,
    MakeNetwork,
    MakePolicy,
    MakePrepare,
    Remove,
    Step,
)
from agentfly_operator.plan.said import is_true

GRACE_S = 30
NETWORK = ("Service", "NetworkPolicy")


def steps(run: TrainingRun, after: TrainingRunStatus, seen: RunObserved) -> tuple[Step, ...]:
    """What to do; ``run.status`` is the stored status."""
    before = run.status
    if after.phase in OVER:
        return tuple(_everything(seen)) if before.phase in OVER else ()
    found: list[Step] = [*_leftovers(before, run.metadata.name, seen)]
    going = in_attempt(after) and before.attempt == after.attempt  # it is numbered before anything is made
    idle, kept = not in_attempt(before) and not in_attempt(after), may_have(run, seen)
    if idle and (after.phase in (Phase.Suspended, Phase.Suspending) or not kept):
        found += [*_policy_goes(seen), *_prepare_stops(before, seen)]
    if kept and run.spec.suspend is not True and not is_true(after, Type.Stalled):
        found += _needed(run, after, seen)
    if going:
        made = TRAINER in before.roles or TRAINER in after.roles
        if not made and may_start(run, seen):
            found.append(MakeAttempt(before.attempt, by_kuberay(before)))
        found += _ask(before, after, seen)
        if made and _cut_off(run.metadata.name, seen):
            found.append(MakeNetwork())  # last: it may be refused, and holds up nothing then
    return tuple(found)


def _cut_off(name: str, seen: RunObserved) -> bool:
    """Whether something is gone by which the pods find each other."""
    there = {(child.kind, child.name) for child in seen.others}
    return not there.issuperset((kind, trainer_name(name)) for kind in NETWORK)


def _prepare_stops(before: TrainingRunStatus, seen: RunObserved) -> Iterator[Step]:
    prepare = seen.prepare
    waits = prepare.exists and not (prepare.complete or prepare.failed or prepare.deleting)
    if before.attempt == 0 and waits:
        yield Remove("Job", prepare.name, prepare.uid)


def _needed(run: TrainingRun, after: TrainingRunStatus, seen: RunObserved) -> Iterator[Step]:
    """What must be there before an attempt."""
    prepared = run.status.attempt > 0 or seen.prepare.complete
    if not prepared and not seen.prepare.exists:
        yield MakePrepare()
    if serves_itself(run):
        return
    if prepared and not seen.policy.exists and after.phase is not Phase.Suspending:
        yield MakePolicy()


def _ask(before: TrainingRunStatus, after: TrainingRunStatus, seen: RunObserved) -> Iterator[Step]:
    """Ask the head for a checkpoint: a person wants it, or another pod of the attempt has to go."""
    pods = [pod for pod in seen.pods if pod.attempt == before.attempt]
    first = before.engine.head if before.engine is not None else None
    head = next((pod for pod in pods if pod.index == 0 and first in (None, pod.uid)), None)
    if head is None or head.over or head.deleting or head.asked:
        return
    suspending = before.phase is Phase.Suspending and after.phase is Phase.Suspending
    drained = before.phase is Phase.Running and any(pod.deleting and not pod.over for pod in pods)
    if suspending or drained:
        yield AskSuspend(head.name, head.uid)


def _leftovers(before: TrainingRunStatus, name: str, seen: RunObserved) -> Iterator[Step]:
    """Pods of attempts that ended, and what only they read."""
    going = before.attempt if in_attempt(before) else None
    there = {pod.attempt for pod in seen.pods} | {cluster.attempt for cluster in seen.clusters}
    for cluster in seen.clusters:
        if cluster.attempt != going:
            yield from _cluster_goes(cluster)
    for pod in seen.pods:
        if pod.attempt != going:
            yield from _pod_goes(pod, seen)
    if in_attempt(before):
        there.add(before.attempt)
    kept = {launch_name(name, attempt) for attempt in there}
    launches = launch_name(name) + "-"
    for child in seen.others:
        if child.kind == "ConfigMap" and child.name.startswith(launches) and child.name not in kept:
            yield Remove(child.kind, child.name, child.uid)


def _everything(seen: RunObserved) -> Iterator[Step]:
    for cluster in seen.clusters:
        yield from _cluster_goes(cluster)
    for pod in seen.pods:
        yield from _pod_goes(pod, seen)
    yield from _policy_goes(seen)
    if seen.prepare.exists and not seen.prepare.deleting:
        yield Remove("Job", seen.prepare.name, seen.prepare.uid)
    for child in seen.others:
        yield Remove(child.kind, child.name, child.uid)


def _cluster_goes(cluster: ClusterOf) -> Iterator[Step]:
    if not cluster.deleting:
        yield Remove("RayCluster", cluster.name, cluster.uid)


def _pod_goes(pod: PodOf, seen: RunObserved) -> Iterator[Step]:
    if any(each.name == pod.cluster and not each.deleting for each in seen.clusters):
        return  # its cluster goes first
    if not pod.deleting or (pod.cluster and pod.grace_s is not None and pod.grace_s > GRACE_S):
        yield Remove("Pod", pod.name, pod.uid, GRACE_S)


def _policy_goes(seen: RunObserved) -> Iterator[Step]:
    policy = seen.policy
    if policy.exists and not policy.deleting and not seen.pods and not seen.clusters:
        yield Remove("ResourcePool", policy.name, policy.uid)
