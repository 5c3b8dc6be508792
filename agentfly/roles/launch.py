"""What is between whoever makes pods of a role and what runs in them: a file to read, and a report to give.

Guarantees:
1. A `Launch` says all that a pod has to know; it is mounted as a file and holds no secret.
2. A `Report` is small enough for a pod's termination message, whatever is in it.
3. A report of another version is read without the fields that are unknown here: a run is not lost because its
   image is newer than the operator.
4. Importing this module needs pydantic alone.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentfly.api.trainingrun import CheckpointStatus, Progress
from agentfly.roles.trainer import TrainerConfig
from agentfly.roles.worker import RolloutWorkerConfig, WorkerReport

STORAGE: Final = Path("/agentfly-cache")  # the claim of a run, in every pod of it, the model servers' too
SOURCE: Final = Path("/agentfly/source")  # the folder of the manifest, where it comes from a volume
LAUNCH_FILE: Final = Path("/agentfly/launch/launch.json")
ASKED_FILE: Final = Path("/agentfly/asked/suspend")  # the pod's annotation, empty until one is asked for
TERMINATION_FILE: Final = Path("/dev/termination-log")
SUSPEND_ANNOTATION: Final = "agentfly.dev/suspend"
STATE_PORT: Final = 7090  # GET /state of a trainer's head: a Report
RAY_PORT: Final = 6379
HEAD_RESOURCE: Final = "trainer_head"  # of Ray, on the head alone
TERMINATION_MAX: Final = 4096  # bytes that the kubelet keeps
_MESSAGE_MIN: Final = 1024  # bytes of a long message that are worth more than the numbers beside it
_REASON_MAX: Final = 64


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PrepareLaunch(_Model):
    """Before anything else starts: make the model, read the tasks, have verl accept its settings.

    Attributes:
        model: where it has to be; made by ``script`` if it is not there yet.
        arguments: of the script, with --seed and --output; empty where the manifest names a model.
        trainer: a training run's; its overrides are checked.
        worker: a rollout job's; its tasks are counted.
    """

    model: Path
    base_dir: Path
    script: Path | None = None
    arguments: tuple[str, ...] = ()
    trainer: TrainerConfig | None = None
    worker: RolloutWorkerConfig | None = None


class TrainerLaunch(_Model):
    """One attempt of a training run, in all of its trainer pods.

    Attributes:
        trainer: what the trainer itself reads.
        job: name of the run, its share in every queue.
        policy: name of the pool of the policy's servers, of which the head leases ``servers``; 0 where the
            trainer's own processes serve it.
        head: name in DNS of the head's pod.
        barrier_s: until all pods have joined Ray; the report names those that did not.
    """

    trainer: TrainerConfig
    job: str
    broker: str
    policy: str
    servers: int = Field(ge=0)
    servers_deadline_s: float = Field(gt=0)
    head: str
    pods: tuple[str, ...]  # names of all trainer pods, the head's first; () where nobody knows them before
    barrier_s: float = Field(gt=0)


class ShardLaunch(_Model):
    """One shard of a rollout job; which one, the pod knows by ``JOB_COMPLETION_INDEX``.

    Attributes:
        tasks_per_shard: shard ``i`` has the tasks from ``i * tasks_per_shard`` on.
    """

    worker: RolloutWorkerConfig
    job: str
    broker: str
    policy: str
    servers: int = Field(ge=1)
    servers_deadline_s: float = Field(gt=0)
    tasks_per_shard: int = Field(ge=1)


class Report(_Model):
    """How a pod of a role is, or how it ended.

    Attributes:
        attempt: of a training run; 0 elsewhere.
        phase: Running from the first finished step of the attempt on.
        message: what it waits for, or why it ended as it did.
        step_time: Unix time at which the newest step of this attempt was finished.
        suspended: it ended because it was asked to, with the checkpoint on disk.
        tasks: how many a prepared rollout job has.
        shard: what came of a shard.
    """

    attempt: int = 0
    phase: Literal["Starting", "Running", "Ended"] = "Starting"
    message: str = ""
    reason: str = ""
    progress: Progress | None = None
    step_time: float | None = None
    checkpoint: CheckpointStatus | None = None
    exit_code: int | None = None
    suspended: bool = False
    tasks: int | None = None
    shard: WorkerReport | None = None

    def termination_message(self) -> str:
        """The report as text of at most ``TERMINATION_MAX`` bytes.

        What is too long goes in this order: the beginning of the message, the progress, by which reasons
        rollouts of a shard failed, the checkpoint.
        """
        whole = len(json.dumps(self.message, ensure_ascii=False).encode())
        for report in self._shorter():
            text = report.model_copy(update={"message": ""}).model_dump_json(exclude_none=True)
            room = TERMINATION_MAX - len(text.encode())
            if room >= min(whole, _MESSAGE_MIN):
                break
        kept = _end(self.message, room)
        return report.model_copy(update={"message": kept}).model_dump_json(exclude_none=True)

    def _shorter(self) -> Iterator[Self]:
        report = self
        yield report
        report = report.model_copy(update={"progress": None})
        yield report
        if report.shard is not None and report.shard.failed:
            shard = report.shard.model_copy(update={"failed": {"Other": sum(report.shard.failed.values())}})
            report = report.model_copy(update={"shard": shard})
            yield report
        yield report.model_copy(update={"checkpoint": None, "reason": report.reason[:_REASON_MAX]})

    @classmethod
    def read(cls, text: str) -> Self | None:
        """What `termination_message` or ``GET /state`` gave; None for anything else."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            unknown = [each["loc"] for each in error.errors() if each["type"] == "extra_forbidden"]
        if not unknown:
            return None
        try:
            return cls.model_validate(_without(json.loads(text), unknown))
        except ValidationError:
            return None


def _without(found: Any, places: Iterable[tuple[int | str, ...]]) -> Any:
    """What was read from JSON, less the fields at these places."""
    for *folders, name in places:
        inner = found
        for folder in folders:
            inner = inner[folder]
        del inner[name]
    return found


def _end(text: str, room: int) -> str:
    """As much of the end of a text as has ``room`` bytes in JSON."""
    for index in range(len(text) - 1, -1, -1):
        room -= len(json.dumps(text[index], ensure_ascii=False).encode()) - 2
        if room < 0:
            return text[index + 1 :]
    return text
