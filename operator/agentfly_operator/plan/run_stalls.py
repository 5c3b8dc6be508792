"""What keeps a run or job from starting until a person acts.

Guarantees:
1. Each text names what is wrong and how to mend it.
2. A checkpoint that cannot be cut for the ranks that are asked for is found before a pod is made; where it
   can, or where nobody knows how many wrote it, the trainer decides.

Not here: queues (`plan.queue`).
"""

from collections.abc import Sequence

from agentfly.api import RolloutJob, TrainingRun
from agentfly.api.reasons import Reason
from agentfly_operator.plan.run_engine import missing_engine
from agentfly_operator.plan.run_seen import RunObserved

_CUT = {"fsdp_size": "-1", "strategy": "fsdp2"}  # with these verl's settings, a checkpoint can be cut anew


def stall(run: TrainingRun, seen: RunObserved) -> tuple[Reason, str] | None:
    """Why nothing may be made now, with a sentence for people; None if nothing is in the way."""
    return missing_engine(run, seen) or held(run, seen.missing, seen.conflicts, seen.refused) or _uncut(run)


def held(
    work: TrainingRun | RolloutJob, missing: Sequence[str], conflicts: Sequence[str], refused: str
) -> tuple[Reason, str] | None:
    """What keeps runs and jobs alike; arguments are those of a `RunObserved`."""
    word = "run" if isinstance(work, TrainingRun) else "job"
    if work.spec.storage is None:
        return Reason.MissingObject, (
            f"spec.storage is absent: a cluster keeps a {word} on a PersistentVolumeClaim; make the {word} "
            "anew with spec.storage.claim"
        )
    if missing:
        return Reason.MissingObject, f"not there: {', '.join(missing)}"
    if conflicts:
        return Reason.NameTaken, "; ".join(conflicts)
    return (Reason.StartFailed, refused) if refused else None


def _uncut(run: TrainingRun) -> tuple[Reason, str] | None:
    saved, ranks = run.status.checkpoint, run.spec.trainer.ranks
    if saved is None or saved.ranks is None or saved.ranks == ranks:
        return None
    last = {}
    for override in run.spec.overrides:
        key, _, value = override.partition("=")
        last[key.lstrip("+")] = value.strip("'\"")
    for key, value in sorted(last.items()):
        if value != _CUT.get(key.rpartition(".")[2], value):
            return Reason.CheckpointWorldSizeMismatch, (
                f"the checkpoint was written by {saved.ranks} ranks, spec.trainer asks for {ranks}, and with "
                f"{key}={value} it cannot be cut anew; set nodes * gpusPerNode to {saved.ranks}"
            )
    return None
