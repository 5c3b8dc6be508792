"""The records of a pool: its members, with an index of where each stands, and its tickets.

Guarantees:
1. The index holds nothing that does not follow from the records: ``file`` derives the places of a member from
   its record alone, and is called after every change of one.
2. Members on one shelf are in the order in which they came to it.

Not here: what changes a record (``pool``), and the tickets that wait (``shares``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agentfly.resources.actions import Phase, Reason, State

Shelf = dict[str, "MemberRecord"]

_NONE: Shelf = {}


@dataclass(slots=True)
class MemberRecord:
    """One member as its pool knows it. Times are those of the events."""

    id: str
    image: str
    begun: float
    cause: int | None  # the waiter this start was begun for; None once it is the pool's own
    state: State = State.STARTING
    since: float = 0.0
    born: float = 0.0
    probed: float = 0.0
    leases: int = 0
    holders: set[int] = field(default_factory=set)
    condemned: Reason | None = None
    revision: str = ""  # the identity of its spec, but for its image
    outdated: bool = False  # that is not the pool's any more
    why: str = ""  # what the check of its last reset found
    places: "tuple[tuple[str, object], ...]" = ()


@dataclass(slots=True)
class TicketRecord:
    """One asking, from the queue to the end of its lease."""

    number: int
    share: str = ""
    image: str = ""
    place: int = 0  # how many of its share had asked before
    phase: Phase = Phase.WAITING
    member: str | None = None
    start: str | None = None  # the member whose start was begun for it
    since: float = 0.0
    expires: float = 0.0


@dataclass
class Roster:
    """The members of one pool. Shelves are by state, by image, and by what a waiter can hope for."""

    shared: bool
    members: dict[str, MemberRecord] = field(default_factory=dict)
    used: dict[str, float] = field(default_factory=dict)  # when an image was last granted or given back
    _shelves: dict[str, dict[object, Shelf]] = field(
        default_factory=lambda: {
            kind: {} for kind in ("state", "image", "free", "old", "coming", "own", "load", "old load")
        }
    )

    def __len__(self) -> int:
        return len(self.members)

    def get(self, member_id: str, *states: State) -> MemberRecord | None:
        """The member, if it is in one of these states."""
        member = self.members.get(member_id)
        return member if member is not None and member.state in states else None

    def file(self, member: MemberRecord) -> None:
        """Put a member where its record says that it belongs."""
        self.members[member.id] = member
        self._move(member, self._places(member))

    def remove(self, member: MemberRecord) -> None:
        """Forget a member."""
        del self.members[member.id]
        self._move(member, ())
        if not self.of_image(member.image):
            self.used.pop(member.image, None)

    # Where members stand.

    def state(self, state: State) -> Mapping[str, MemberRecord]:
        """Those in this state, in the order in which they came to it."""
        return self._shelves["state"].get(state, _NONE)

    def images(self) -> dict[str, int]:
        """How many there are of each image."""
        return {str(image): len(shelf) for image, shelf in self._shelves["image"].items()}

    def of_image(self, image: str) -> Mapping[str, MemberRecord]:
        """Those of this image."""
        return self._shelves["image"].get(image, _NONE)

    def free(self, image: str) -> Mapping[str, MemberRecord]:
        """Those of this image that nobody holds and anybody may have, the newest last."""
        return self._shelves["free"].get(image, _NONE)

    def old(self, image: str) -> Mapping[str, MemberRecord]:
        """As ``free``, of an older spec: for those to whom there is nothing better to give."""
        return self._shelves["old"].get(image, _NONE)

    def grantable(self, image: str) -> int:
        """How many of this image anybody may have, of whatever spec."""
        return len(self.free(image)) + len(self.old(image))

    def best_free(self, image: str) -> MemberRecord:
        """The one of these that came last, of the newest spec that there is."""
        shelf = self._shelves["free" if self.free(image) else "old"][image]
        return next(reversed(shelf.values()))

    def free_images(self) -> list[str]:
        """The images of which there are free members of the pool's own spec."""
        return [str(image) for image in self._shelves["free"]]

    def old_images(self) -> list[str]:
        """The images of which there are free members of an older one."""
        return [str(image) for image in self._shelves["old"]]

    def outdated(self) -> int:
        """How many free members are of an older spec."""
        return sum(len(shelf) for shelf in self._shelves["old"].values())

    def coming(self) -> dict[str, int]:
        """How many of each image are being started, or reset for whoever comes next."""
        return {str(image): len(shelf) for image, shelf in self._shelves["coming"].items()}

    def own(self) -> list[MemberRecord]:
        """Those that were reset for the holder that keeps them."""
        return list(self._shelves["own"].get("", _NONE).values())

    def least_loaded(self) -> tuple[int, MemberRecord] | None:
        """Of a shared pool: the fewest holders that a living member has, and who has them, the newest."""
        return _least(self._shelves["load"])

    def least_loaded_old(self) -> tuple[int, MemberRecord] | None:
        """As ``least_loaded``, of those of an older spec."""
        return _least(self._shelves["old load"])

    def living(self) -> int:
        """Of a shared pool: how many members a new holder can be given."""
        return sum(len(shelf) for shelf in self._shelves["load"].values())

    def with_room(self, slots: int) -> int:
        """Of a shared pool: how many living members have fewer holders than this."""
        loads = self._shelves["load"].items()
        return sum(len(shelf) for load, shelf in loads if isinstance(load, int) and load < slots)

    def _places(self, member: MemberRecord) -> tuple[tuple[str, object], ...]:
        places: list[tuple[str, object]] = [("state", member.state), ("image", member.image)]
        state, held = member.state, len(member.holders)
        if state is State.STARTING or (state is State.RESETTING and not held):
            places.append(("coming", member.image))
        elif member.condemned is None and state is State.FREE:
            kind = "old" if member.outdated else "free"
            places.append(("own", "") if held else (kind, member.image))
        if self.shared and member.condemned is None and state in (State.FREE, State.LEASED):
            places.append(("old load" if member.outdated else "load", held))
        return tuple(places)

    def _move(self, member: MemberRecord, places: tuple[tuple[str, object], ...]) -> None:
        if places == member.places:
            return
        for kind, key in member.places:
            if (kind, key) not in places:
                shelf = self._shelves[kind][key]
                del shelf[member.id]
                if not shelf:
                    del self._shelves[kind][key]
        for kind, key in places:
            self._shelves[kind].setdefault(key, {}).setdefault(member.id, member)
        member.places = places


def _least(loads: dict[object, Shelf]) -> tuple[int, MemberRecord] | None:
    if not loads:
        return None
    load = min(key for key in loads if isinstance(key, int))
    return load, next(reversed(loads[load].values()))
