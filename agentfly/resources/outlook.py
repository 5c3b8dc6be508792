"""What a pool has on its way once its waiters are provided for, and what may still be begun.

Guarantees:
1. What is coming and each place is set aside for one waiter or one start only.

Not here: who is provided for, and with what (``rules``).
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Outlook:
    """What there is once all waiters were provided for, as far as that goes.

    ``coming`` are the members of each image that are on their way and that no waiter needs, ``places`` those
    that can be started for others, now or when what is being stopped has stopped. ``starts`` are wanted for
    waiters that have a place, ``unmet`` for those that have none, in the order of their turns. ``ahead`` is
    how many of each image should be free or coming though nobody waits for them.
    """

    coming: dict[str, int]
    places: int
    starts: list[str] = field(default_factory=list)
    unmet: list[str] = field(default_factory=list)
    ahead: dict[str, int] = field(default_factory=dict)

    def provide(self, image: str, count: int = 1) -> int:
        """Set aside what is coming, else places, for waiters; how many of them there is neither for."""
        back = min(count, self.coming.get(image, 0))
        begun = min(count - back, self.places)
        if back:
            self.coming[image] -= back
        self.places -= begun
        self.starts += [image] * begun
        return count - back - begun

    def begin(self, image: str, count: int) -> int:
        """Set aside places for starts that no waiter needs; how many there were."""
        begun = max(0, min(count, self.places))
        self.places -= begun
        self.starts += [image] * begun
        self.coming[image] = self.coming.get(image, 0) + begun
        return begun
