"""What a ResourcePool is now, as its status says it.

Guarantees:
1. A number that moves all the time is a whole one or text, rounded: the API conventions keep floats out.
2. Nothing grows with the number of members or jobs: long answers have a bound, and metrics have the rest.
"""

from pydantic import Field

from agentfly.api.base import ApiModel, Conditions, Decimal, Int

JOBS_MAX = 16
REASON_MAX = 1024
"""Jobs in `status.queue.byJob`: those with the most waiting acquires and leases."""


class MemberCounts(ApiModel):
    """Counts of members by state."""

    total: Int = Field(default=0, ge=0, description="Members in any state.")
    ready: Int = Field(default=0, ge=0, description="Verified members, leased or free.")
    free: Int = Field(default=0, ge=0, description="Verified members that an acquire gets at once.")
    leased: Int = Field(default=0, ge=0, description="Members that are held.")
    starting: Int = Field(default=0, ge=0, description="Members that are being started.")
    resetting: Int = Field(default=0, ge=0, description="Members that are being reset and verified.")
    quarantined: Int = Field(default=0, ge=0, description="Members that are kept for a look.")
    outdated: Int = Field(
        default=0, ge=0, description="Members of an older spec, replaced when nobody holds them."
    )


class JobQueue(ApiModel):
    """What one job, or another share of the queue, has and waits for."""

    job: str = Field(max_length=253, description="Name of the job, or of the share that it asked for.")
    pending: Int = Field(default=0, ge=0, description="Its waiting acquires.")
    leased: Int = Field(default=0, ge=0, description="Members that it holds.")
    share: Decimal = Field(default="0", description="Fraction of all leased members that it holds, 0 to 1.")


class QueueStatus(ApiModel):
    """The queue now."""

    pending: Int = Field(default=0, ge=0, description="Waiting acquires.")
    oldest_seconds: Int = Field(default=0, ge=0, description="How long the first of them has waited.")
    by_job: tuple[JobQueue, ...] = Field(
        default=(),
        strict=False,
        max_length=JOBS_MAX,
        description=f"The {JOBS_MAX} jobs that wait for most and hold most.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["job"]},
    )


class ImageStatus(ApiModel):
    """Images of a pool whose acquires name them."""

    resident: Int = Field(default=0, ge=0, description="Images of which there is a member.")


class Rates(ApiModel):
    """How the last acquires and resets went."""

    warm_hit_percent: Decimal | None = Field(
        default=None,
        description="Acquires that found a member free, of the last 512, in percent. Absent: none yet.",
    )
    acquire_p99_milliseconds: Int | None = Field(
        default=None,
        ge=0,
        alias="acquireP99Milliseconds",
        description="99th percentile of their waits. Absent: none yet.",
    )
    reset_clean_percent: Decimal | None = Field(
        default=None,
        description="Resets after which the same member was verified, in percent. Absent: none yet.",
    )


class ResetStatus(ApiModel):
    """How members are reset."""

    method: str = Field(
        max_length=32,
        description="The method that members report, in the words of container.reset.method; Mixed if they "
        "differ.",
    )
    reason: str = Field(
        default="", max_length=REASON_MAX, description="Why it is not a better one, for people. May be empty."
    )


class ResourcePoolStatus(ApiModel):
    """What the pool is. Written by the controller."""

    observed_generation: int = Field(
        default=-1,
        ge=-1,
        description="metadata.generation that this status describes; -1 before the first look.",
    )
    revision: str | None = Field(
        default=None,
        max_length=64,
        description="Identity of what a member should be; pods have it as label agentfly.dev/spec. Absent: "
        "not looked at yet.",
    )
    selector: str | None = Field(
        default=None,
        max_length=1024,
        description="Label selector of the pool's pods, for the scale subresource. Absent: no pods.",
    )
    members: MemberCounts | None = Field(
        default=None, description="Members by state. Absent: not looked at yet."
    )
    queue: QueueStatus | None = Field(default=None, description="The queue now. Absent: not looked at yet.")
    images: ImageStatus | None = Field(
        default=None, description="Images, where images.policy is PerAcquire. Absent for other pools."
    )
    rates: Rates | None = Field(
        default=None, description="How the last acquires and resets went. Absent: not looked at yet."
    )
    reset: ResetStatus | None = Field(
        default=None, description="How members are reset. Absent: no member of a Container pool has said."
    )
    conditions: Conditions = Field(default=(), description="Ready, Reconciling, Stalled and others, by type.")
