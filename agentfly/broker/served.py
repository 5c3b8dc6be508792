"""The ResourcePools of a namespace as pools of the broker's engine.

Guarantees:
1. What the engine has follows what the namespace has: a pool is added, changed and removed with its object.
   Of many changes of one the last is carried out, and one after the other.
2. Before a pool is served for the first time, its members of an earlier broker are taken over, whoever holds
   them: nothing is decided about it in between.
3. A pool that cannot be served as it is written is kept out, or goes on as it was, and its problems say why.
   Its members are left alone until that changes.
4. An object that is being deleted, whatever with, is none: its pool is removed and gets no new member.
5. What a pool may make the broker do is limited: it loads only modules that the broker was started with, and
   sends nothing but keys from Secrets.

Not here: how objects are followed (``agentfly.kube``), what becomes of members (``agentfly.resources``).
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import ValidationError

from agentfly.api import ResourcePool
from agentfly.api.problems import Complaint, ManifestError, explain, path_text
from agentfly.broker.pools import pool_spec
from agentfly.errors import AgentflyError
from agentfly.kube import Obj
from agentfly.resources.errors import PoolNotFound, ResourceError
from agentfly.resources.runners.base import Found
from agentfly.resources.spec import InProcessSpec, PoolSpec

logger = logging.getLogger(__name__)

AGAIN_S = 5.0  # before another try at what the engine could not do yet, such as to stop all members


class Engine(Protocol):
    """What pools are served with."""

    def set_pool(self, pool: PoolSpec) -> None:
        """Serve this pool from now on, in place of the one of its name."""
        ...

    async def remove_pool(self, name: str) -> None:
        """Stop its members and serve it no more."""
        ...

    def adopt(self, found: Found) -> bool:
        """Take over a member of an earlier engine."""
        ...


@dataclass(frozen=True, slots=True)
class _Served:
    """What the engine has: a spec, and the uid of the object that it is of."""

    uid: str
    spec: PoolSpec


class ServedPools:
    """Keeps an engine's pools as a namespace has them.

    Args:
        engine: whose pools these are; it has no others.
        find: gives each member of an earlier broker once.
        modules: what InProcess pools may load: these modules, and what is below them.
    """

    def __init__(
        self,
        engine: Engine,
        find: Callable[[], Awaitable[Sequence[Found]]],
        modules: Sequence[str] = (),
    ) -> None:
        self._engine = engine
        self._find = find
        self._modules = tuple(modules)
        self._wanted: dict[str, Obj] = {}  # by name: the objects that are there and stay
        self._served: dict[str, _Served] = {}
        self._problems: dict[str, list[str]] = {}
        self._refused: set[str] = set()  # by the engine, which may think otherwise later
        self._left: dict[str, list[Found]] = {}  # of pools that are not served yet
        self._work: dict[str, asyncio.Task[None]] = {}

    def problems(self) -> Mapping[str, Sequence[str]]:
        """What is wrong with pools, by name; nothing of those that are served as they are written."""
        return self._problems

    def owner(self, pool: str) -> Obj | None:
        """The ownerReference for members of a pool; None if there is no such pool, or it is being deleted."""
        wanted = self._wanted.get(pool)
        if wanted is None:
            return None
        return {
            "apiVersion": wanted["apiVersion"],
            "kind": wanted["kind"],
            "name": pool,
            "uid": wanted["metadata"]["uid"],
            "controller": True,
        }

    def per_node(self, pool: str) -> int | None:
        """How many members of a pool one node may have; None is any number."""
        served = self._served.get(pool)
        return None if served is None else served.spec.per_node

    async def begin(self, objects: Callable[[], Sequence[Obj]]) -> None:
        """Serve these pools, with what an earlier broker left of each. Members of no pool are stopped.

        Nothing is awaited from the last call of ``objects`` to the return.
        """
        self._see(objects())  # whose members are which follows from their owners
        await self._look()
        self._see(objects())
        for name, wanted in self._wanted.items():
            self._serve(name, wanted)
        for name in [*self._served, *(left for left in self._left if left not in self._wanted)]:
            self._take_over(name)
        for name in self._refused:
            self._begin_work(name)

    def changed(self, kind: str, obj: Obj) -> None:
        """An object was added, modified or deleted."""
        self._note(kind, obj)
        self._begin_work(obj["metadata"]["name"])

    def _begin_work(self, name: str) -> None:
        if (work := self._work.get(name)) is None or work.done():
            self._work[name] = asyncio.create_task(self._follow(name), name=f"agentfly pool {name}")

    async def close(self) -> None:
        """Follow no more changes."""
        for work in self._work.values():
            work.cancel()
        if self._work:
            await asyncio.wait(self._work.values())

    def _see(self, objects: Sequence[Obj]) -> None:
        self._wanted.clear()
        for obj in objects:
            self._note("ADDED", obj)

    def _note(self, kind: str, obj: Obj) -> None:
        name = obj["metadata"]["name"]
        if kind == "DELETED" or obj["metadata"].get("deletionTimestamp"):
            gone = self._wanted.get(name)
            if gone is None or gone["metadata"]["uid"] == obj["metadata"]["uid"]:
                self._wanted.pop(name, None)
        else:
            self._wanted[name] = obj

    async def _follow(self, name: str) -> None:
        """Carry out what is wanted of a pool until nothing is left to do."""
        while True:
            wanted = self._wanted.get(name)
            try:
                await self._carry_out(name, wanted)
            except Exception:
                logger.exception("pool %s: a change of it was not carried out, and is tried again", name)
                await asyncio.sleep(AGAIN_S)
                continue
            if self._wanted.get(name) is not wanted:
                continue
            if name not in self._refused:
                return
            await asyncio.sleep(AGAIN_S)

    async def _carry_out(self, name: str, wanted: Obj | None) -> None:
        served = self._served.get(name)
        if served is not None and (wanted is None or wanted["metadata"]["uid"] != served.uid):
            with contextlib.suppress(PoolNotFound):  # an earlier try began it, and its members stop
                await self._engine.remove_pool(name)
            del self._served[name]
        if wanted is None:
            self._problems.pop(name, None)
            self._refused.discard(name)
        elif name in self._served:
            self._serve(name, wanted)
        else:
            await self._serve_first(name)

    async def _serve_first(self, name: str) -> None:
        await self._look()
        if (wanted := self._wanted.get(name)) is None:
            return
        self._serve(name, wanted)
        if name in self._served:
            self._take_over(name)

    async def _look(self) -> None:
        """See which members of earlier brokers there are that were not seen yet."""
        for found in await self._find():
            self._left.setdefault(found.pool, []).append(found)

    def _take_over(self, name: str) -> None:
        for found in self._left.pop(name, ()):
            self._engine.adopt(found)

    def _serve(self, name: str, wanted: Obj) -> None:
        """Bring the engine to what the object says, or note why not. Awaits nothing."""
        served = self._served.get(name)
        self._refused.discard(name)
        try:
            spec = parse(wanted)
            problems = list(self._forbidden(spec))
        except (AgentflyError, ValidationError) as error:
            spec, problems = None, _texts(error)
        if spec is not None and not problems and (served is None or served.spec != spec):
            try:
                self._engine.set_pool(spec)
                self._served[name] = _Served(wanted["metadata"]["uid"], spec)
            except ResourceError as error:
                problems = _texts(error)
                self._refused.add(name)
        if not problems:
            self._problems.pop(name, None)
        elif problems != self._problems.get(name):
            self._problems[name] = problems
            logger.warning("pool %s: is not served as it is written: %s", name, "; ".join(problems))

    def _forbidden(self, pool: PoolSpec) -> Iterator[str]:
        """What a pool of a cluster may not make its broker do."""
        spec = pool.resource
        if isinstance(spec, InProcessSpec):
            module = spec.entrypoint.rpartition(":")[0]
            if not any(module == each or module.startswith(f"{each}.") for each in self._modules):
                known = ", ".join(self._modules) or "none"
                yield (
                    f"spec.inProcess.entrypoint: {module} is not a module that this broker loads ({known}); "
                    f"add it to AGENTFLY_IN_PROCESS_MODULES of the operator"
                )


def parse(obj: Obj) -> PoolSpec:
    """The engine's pool of an object of the API server.

    Raises:
        ValidationError, AgentflyError: it is no pool of a cluster.
    """
    meta = obj["metadata"]
    written = {
        "apiVersion": obj["apiVersion"],
        "kind": obj["kind"],
        "metadata": {"name": meta["name"], "namespace": meta.get("namespace")},
        "spec": obj.get("spec"),
    }
    return pool_spec(ResourcePool.model_validate(written), platform="kubernetes")


def _texts(error: AgentflyError | ValidationError) -> list[str]:
    """One line for each thing that is wrong, with its remedy."""
    if isinstance(error, AgentflyError):
        return ["; ".join([error.message, *error.hints])]
    if error.title != ResourcePool.__name__:
        return [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
    complaints = [each for fault in error.errors(include_url=False) for each in explain(fault, ResourcePool)]
    return ["; ".join([_text(complaint), *complaint.hints]) for complaint in complaints]


def _text(complaint: Complaint) -> str:
    return str(ManifestError("", None, path_text(complaint.where), complaint.value, complaint.problem))
