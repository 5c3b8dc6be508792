"""The pools of an engine: what is added, changed and removed, and which one a name or a spec means.

Guarantees:
1. A name is one pool from ``set`` until all that its removal stops has stopped: a next pool of this name
   never runs beside what the last one left.
2. A pool whose members cannot run here is refused with the runner's reason; what is there goes on as it was.
3. A pool that was removed is told so to whoever asks for it while it ends.

Not here: what becomes of members (``pool``) and of holders (``leasing``).
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from agentfly.resources.actions import State
from agentfly.resources.errors import PoolNotFound, ResourceError
from agentfly.resources.names import member_prefix
from agentfly.resources.pool import Pool
from agentfly.resources.runners.base import Runner
from agentfly.resources.spec import PoolSpec, ResourceSpec, parse_spec

SPEC_POOL_MAX = 8  # members of a pool that exists only because somebody acquired by spec


class Pools:
    """The pools of one engine, by name."""

    def __init__(self, runners: Mapping[str, Runner]) -> None:
        self._runners = runners
        self._pools: dict[str, Pool] = {}
        self._ending: dict[str, Pool] = {}
        self._by_spec: dict[tuple[str, bool], Pool] = {}  # the first of each identity, shared or not

    def __iter__(self) -> Iterator[Pool]:
        return iter(list(self._pools.values()))

    def get(self, name: str) -> Pool | None:
        """The pool of this name, if there is one."""
        return self._pools.get(name)

    def named(self, name: str) -> Pool:
        """The pool of this name.

        Raises:
            PoolNotFound: there is none.
        """
        if (pool := self._pools.get(name)) is not None:
            return pool
        if self._ends(name):
            raise deleted(name)
        known, near = ", ".join(sorted(self._pools)) or "none", get_close_matches(name, self._pools, n=1)
        meant = [f"did you mean {near[0]}?"] if near else []
        raise PoolNotFound(f"pool {name}: does not exist", hints=(*meant, f"pools that do: {known}"))

    def add(self, spec: PoolSpec, *, unnamed: bool = False) -> Pool:
        """A pool of a new name, or the equal one that there is.

        Raises:
            ResourceError: another pool has this name, or its kind cannot run here.
        """
        if (known := self._pools.get(spec.name)) is not None:
            if known.spec != spec:
                raise ResourceError(f"pool {spec.name}: exists already with another specification")
            return known
        if left := self._ends(spec.name):
            raise ResourceError(
                f"pool {spec.name}: is being deleted, {left} of its members still have to stop",
                hints=("try again when they have",),
            )
        self._check(spec)
        pool = self._pools[spec.name] = Pool(spec, prefix=member_prefix(spec.name), unnamed=unnamed)
        self._index()
        return pool

    def set(self, spec: PoolSpec) -> Pool:
        """The pool of this name, which goes on under this specification, or a new one.

        Raises:
            ResourceError: its type or scope is another, it is being deleted, or it cannot run here.
        """
        if (known := self._pools.get(spec.name)) is None:
            return self.add(spec)
        if spec.resource != known.spec.resource:
            self._check(spec)
        try:
            known.change(spec)
        except ValueError as error:
            raise ResourceError(f"pool {spec.name}: {error}") from error
        self._index()
        return known

    def remove(self, name: str) -> Pool:
        """The pool of this name, which is closed and known only as what ends.

        Raises:
            PoolNotFound: there is none.
        """
        pool = self.named(name)
        del self._pools[name]
        self._ending[name] = pool
        pool.close()
        self._index()
        return pool

    def of_spec(self, spec: ResourceSpec, shared: bool) -> Pool:
        """The pool whose members are of this spec, made if need be."""
        identity = spec.identity()
        if (known := self._by_spec.get((identity, shared))) is not None:
            return known
        name = f"{'shared' if shared else 'spec'}-{identity}"
        most = 1 if shared else SPEC_POOL_MAX
        resource = parse_spec(spec.model_dump())
        return self.add(PoolSpec(name=name, resource=resource, max=most, shared=shared), unnamed=True)

    def runner(self, spec: ResourceSpec) -> Runner | None:
        """The runner of members of this spec, if there is one."""
        return self._runners.get(spec.runner)

    def _check(self, spec: PoolSpec) -> None:
        runner = self.runner(spec.resource)
        reason = "there is no such runner" if runner is None else runner.check()
        if reason is not None:
            wanted = spec.resource.runner
            raise ResourceError(f"pool {spec.name}: runner {wanted} cannot work here: {reason}")

    def _ends(self, name: str) -> int:
        """How many members a pool of this name that was removed still has."""
        left = self._ending[name].count(*State) if name in self._ending else 0
        if not left:
            self._ending.pop(name, None)
        return left

    def _index(self) -> None:
        self._by_spec = {}
        for pool in self._pools.values():
            self._by_spec.setdefault((pool.revision, pool.shared), pool)


def deleted(name: str) -> PoolNotFound:
    """What whoever asks for a pool that was removed is told."""
    return PoolNotFound(f"pool {name}: was deleted")
