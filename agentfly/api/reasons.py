"""The vocabulary of status: phases, condition types and reasons. These words are API; messages are prose.

Guarantees:
1. Every phase, condition type and reason that agentfly writes is a member here, with its meaning below it.
2. A member's value is its name, in CamelCase.

How a generic tool reads them (kstatus, Argo CD, Flux): `Reconciling=True` is in progress, `Stalled=True` is
failed, never both; without either the object is current. So a bounded object sets `Stalled` with `Failed`.
"""

from enum import StrEnum


class TrainingRunPhase(StrEnum):
    """One word for people; derived from conditions."""

    Pending = "Pending"
    """Accepted; nothing was started yet."""
    Starting = "Starting"
    """Roles of the attempt are being started."""
    Running = "Running"
    """All roles are ready and the trainer makes steps."""
    Suspending = "Suspending"
    """A checkpoint was asked for, to stop after it."""
    Suspended = "Suspended"
    """Stopped with a checkpoint; nothing runs."""
    Restarting = "Restarting"
    """An attempt failed; the next one waits for its back-off."""
    Succeeded = "Succeeded"
    """All steps are done. For good."""
    Failed = "Failed"
    """It will not be tried again. For good."""


class RolloutJobPhase(StrEnum):
    """One word for people; derived from conditions."""

    Pending = "Pending"
    """Accepted; nothing was started yet."""
    Starting = "Starting"
    """Inference servers are being started."""
    Running = "Running"
    """Rollouts are in flight."""
    Succeeded = "Succeeded"
    """All tasks are done within the failure budget. For good."""
    Failed = "Failed"
    """It will not be tried again. For good."""


class ConditionType(StrEnum):
    """What a condition observes."""

    Reconciling = "Reconciling"
    """True: the object is on its way to the state that spec asks for."""
    Stalled = "Stalled"
    """True: it will not get there without a person. Reason: the failure."""
    Ready = "Ready"
    """ResourcePool. True: an acquire now gets a member or a place in the queue."""
    StartFailing = "StartFailing"
    """ResourcePool. True: the last starts of members failed."""
    RolesReady = "RolesReady"
    """TrainingRun, RolloutJob. True: every role of the attempt answers."""
    Running = "Running"
    """TrainingRun, RolloutJob. True: work is being done."""
    Suspended = "Suspended"
    """TrainingRun. True: stopped with a checkpoint, to be resumed."""
    Checkpointed = "Checkpointed"
    """TrainingRun. True: there is a complete checkpoint to continue from."""
    Succeeded = "Succeeded"
    """TrainingRun, RolloutJob. True: done."""
    Failed = "Failed"
    """TrainingRun, RolloutJob. True: ended without being done; Stalled is True with the same reason."""
    Finished = "Finished"
    """TrainingRun, RolloutJob. True with either outcome, so that one wait covers both."""


class Reason(StrEnum):
    """Why a condition has its status, or why an attempt ended."""

    StartFailed = "StartFailed"
    """A member or role could not be started; the message has the cause."""
    Provisioning = "Provisioning"
    """Reconciling=True or RolesReady=False: roles or members are being started."""
    AllReady = "AllReady"
    """RolesReady=True, Reconciling=False: everything that spec asks for answers."""
    Training = "Training"
    """TrainingRun, Running=True: the trainer makes steps."""
    NotStarted = "NotStarted"
    """Running=False, Succeeded=False or Failed=False: it did not come to that yet."""
    Suspending = "Suspending"
    """Reconciling=True: a checkpoint is being made, to stop after it."""
    SuspendedByUser = "SuspendedByUser"
    """Suspended=True, Running=False: a person asked for it."""
    Restarting = "Restarting"
    """Reconciling=True, Running=False: an attempt failed; the next one waits for its back-off."""
    Saved = "Saved"
    """Checkpointed=True: status.checkpoint is complete."""
    NoneYet = "NoneYet"
    """Checkpointed=False: no step was saved yet."""
    SaveFailed = "SaveFailed"
    """Checkpointed=False: the trainer could not save; the message has the cause."""
    Completed = "Completed"
    """Succeeded=True, Finished=True: all steps or tasks are done."""
    AttemptFailed = "AttemptFailed"
    """lastFailure: a role ended with an error; the message has its last lines."""
    Interrupted = "Interrupted"
    """Failed=True or lastFailure: the process that drove it was stopped."""
    NoProgress = "NoProgress"
    """lastFailure: runPolicy.stallTimeoutSeconds passed without progress."""
    StartupDeadlineExceeded = "StartupDeadlineExceeded"
    """lastFailure: not all roles were ready within runPolicy.startupDeadlineSeconds."""
    DeadlineExceeded = "DeadlineExceeded"
    """Failed=True: runPolicy.activeDeadlineSeconds passed."""
    BackoffLimitExceeded = "BackoffLimitExceeded"
    """Failed=True: more than runPolicy.backoffLimit attempts failed without a checkpoint."""
    InvalidSpec = "InvalidSpec"
    """TrainingRun, Failed=True: tasks or overrides cannot be trained with; the message has the cause."""
    DriftExceeded = "DriftExceeded"
    """TrainingRun, Failed=True: a step drifted more than rollout.maxDriftFraction."""
    FailureBudgetExceeded = "FailureBudgetExceeded"
    """Failed=True: more than runPolicy.failureBudget of the rollouts failed; of one step in a TrainingRun."""
