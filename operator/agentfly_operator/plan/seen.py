"""What is true of a pool now, as far as it is known: what planners decide on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from agentfly.api import Condition
from agentfly.resources.lease import PoolStatus
from agentfly_operator.plan.facts import NO_PODS, PodFacts

_QUOTED = 3  # images of which the cause is told
_OF_IMAGES = ("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName")


class PoolReport(PoolStatus):
    """What a broker says of one pool; ``problems`` is why it cannot serve it as it is written."""

    problems: tuple[str, ...] = ()

    @property
    def usable(self) -> int:
        """Members that serve: free, held, or on their way from one holder to the next."""
        return self.ready + self.leased + self.resetting

    @property
    def total(self) -> int:
        """Members in any state."""
        return self.usable + self.starting + self.stopping + len(self.quarantined)

    @property
    def unpulled(self) -> dict[str, str]:
        """Images that a node could not get, and why: pods that failed of it are gone."""
        return {image: text for image, text in self.failing.items() if text.startswith(_OF_IMAGES)}

    @property
    def fails(self) -> str:
        """What starts fail of; "" if they do not."""
        causes = sorted(f"image {image}: {text}" if image else text for image, text in self.failing.items())
        return self.message or "; ".join(causes[:_QUOTED])


@dataclass(frozen=True, slots=True)
class BrokerSeen:
    """What is known of a broker.

    Attributes:
        since: when it fell silent, or when it began to answer.
        answered: when the question was put that was answered last; None: none ever was.
        error: why it does not answer; "" when it does.
        pools: its last answer, by pool.
    """

    since: datetime
    answered: datetime | None = None
    error: str = ""
    pools: Mapping[str, PoolReport] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PoolSeen:
    """What is true of one pool now.

    Attributes:
        conditions: of its status as it is.
        fresh: the broker's answer is younger than the pool's generation, so that it is about that.
        low_since: since when members are missing that it should have; None: none is.
    """

    broker: BrokerSeen
    pods: PodFacts = NO_PODS
    conditions: Sequence[Condition] = ()
    fresh: bool = True
    low_since: datetime | None = None
