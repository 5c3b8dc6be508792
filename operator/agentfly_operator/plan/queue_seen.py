"""What is true of a run's or job's place in a queue of Kueue: what `plan.queue` decides on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkloadOf:
    """A Workload, which is how Kueue knows a run or the Job of a job.

    Attributes:
        owner: the uid of what controls it.
        shape: what it asks for, as a hash; "" of one that Kueue made.
        active: it may be admitted.
        paused: it is not active because its run or job is to be suspended.
        reserved: quota is kept for it, whether it may use it or not.
        admitted: it may use that quota; it stays True while it is asked to give it back.
        evicted: why it must give it back, for programs; "" if it need not.
        why: the same for people.
        pending: what it waits for, in Kueue's words.
        pods_ready: Kueue was told that all its pods run.
        finished: it needs no quota any more.
        flavors: of each pod set, what its quota is of.
    """

    name: str
    uid: str
    owner: str = ""
    shape: str = ""
    deleting: bool = False
    active: bool = True
    paused: bool = False
    reserved: bool = False
    admitted: bool = False
    evicted: str = ""
    why: str = ""
    pending: str = ""
    pods_ready: bool = False
    finished: bool = False
    flavors: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def may_run(self) -> bool:
        """What it stands for may run now."""
        return self.admitted and self.reserved and not (self.evicted or self.deleting or self.finished)


@dataclass(frozen=True, slots=True)
class QueueSeen:
    """Kueue, as one run or job sees it.

    Attributes:
        served: Workloads are known to this cluster, and all of them were listed.
        absent: why not; "" if they are.
        workload: that of the run, or of the Job of a job's workers; None: there is none.
        outdated: the Workload asks for something else than its run does now.
        missing: what the labels name and is not there, each as "LocalQueue name".
        refused: why its priority, or where its quota is, cannot be told, as a sentence; "" if it can.
        servers: pods of the policy's servers that are there, whatever their state.
        preparing: pods of the preparation that have not ended.
        taken: children that Kueue has put into a queue of their own, each as "Job name".
    """

    served: bool = False
    absent: str = ""
    workload: WorkloadOf | None = None
    outdated: bool = False
    missing: tuple[str, ...] = ()
    refused: str = ""
    servers: int = 0
    preparing: int = 0
    taken: tuple[str, ...] = ()
