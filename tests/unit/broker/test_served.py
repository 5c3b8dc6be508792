"""Pools of a namespace at an engine; numbers are those of served.py."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from agentfly.broker import served
from agentfly.broker.served import ServedPools
from agentfly.resources.errors import Infra, PoolNotFound, ResourceError
from agentfly.resources.runners.base import Found, Member
from agentfly.resources.spec import ContainerSpec, PoolSpec

CONTAINER = {"image": "docker.io/library/debian:12"}


def pool(name: str = "shell", uid: str = "u1", maximum: int = 4, **fields: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {"type": "Container", "container": CONTAINER, "capacity": {"max": maximum}}
    return {
        "apiVersion": "agentfly.dev/v1alpha1",
        "kind": "ResourcePool",
        "metadata": {"name": name, "namespace": "team", "uid": uid, "resourceVersion": "1"},
        "spec": spec | fields,
        "status": {"written": "by a newer operator"},
    }


def deleting(obj: dict[str, Any]) -> dict[str, Any]:
    return obj | {"metadata": obj["metadata"] | {"deletionTimestamp": "2026-11-30T00:00:00Z"}}


def found(member: str, of: str = "shell") -> Found:
    return Found(of, Member(member, ContainerSpec(), 1, "http://10.0.0.1:7070"), "free")


class FakeEngine:
    """Writes down what it is told; ``pools`` is what it has."""

    def __init__(self) -> None:
        self.pools: dict[str, PoolSpec] = {}
        self.told: list[str] = []
        self.refuse: ResourceError | None = None
        self.stops = asyncio.Event()
        self.stops.set()
        self.removing = 0

    def set_pool(self, pool: PoolSpec) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.pools[pool.name] = pool
        self.told.append(f"set {pool.name} {pool.max}")

    async def remove_pool(self, name: str) -> None:
        if name not in self.pools:
            raise PoolNotFound(f"pool {name}: was deleted")
        self.removing += 1
        self.told.append(f"remove {name}")
        del self.pools[name]
        await self.stops.wait()
        self.removing -= 1

    def adopt(self, found: Found) -> bool:
        self.told.append(f"adopt {found.member.id}")
        return True


class World:
    """An engine, what earlier brokers left, and the pools between them."""

    def __init__(self, *left: Found, modules: Sequence[str] = ()) -> None:
        self.engine = FakeEngine()
        self.left = list(left)
        self.pools = ServedPools(self.engine, self.find, modules)

    async def find(self) -> list[Found]:
        await asyncio.sleep(0)
        self.engine.told.append("find")
        left, self.left = self.left, []
        return left

    async def begin(self, *objects: dict[str, Any]) -> None:
        await self.pools.begin(lambda: objects)

    async def settled(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "AGAIN_S", 0.01)


# 1. The engine follows the namespace.


async def test_pool_is_added_changed_and_removed_with_its_object() -> None:
    world = World()
    await world.begin()
    world.pools.changed("ADDED", pool())
    await world.settled()
    assert world.engine.pools["shell"].resource.runner == "kubernetes"
    world.pools.changed("MODIFIED", pool(maximum=7))
    await world.settled()
    assert world.engine.pools["shell"].max == 7
    world.pools.changed("DELETED", pool(maximum=7))
    await world.settled()
    assert world.engine.told == ["find", "find", "set shell 4", "set shell 7", "remove shell"]
    assert world.pools.problems() == {}


async def test_what_changes_nothing_is_not_told() -> None:
    world = World()
    await world.begin(pool())
    world.pools.changed("MODIFIED", pool())
    await world.settled()
    assert world.engine.told == ["find", "set shell 4"]


async def test_last_of_many_changes_is_carried_out_after_the_one_that_goes_on() -> None:
    world = World()
    await world.begin(pool())
    world.engine.stops.clear()
    world.pools.changed("DELETED", pool())
    await world.settled()
    for uid, maximum in (("u2", 5), ("u3", 6), ("u4", 8)):
        world.pools.changed("ADDED", pool(uid=uid, maximum=maximum))
        await world.settled()
        world.pools.changed("DELETED", pool(uid=uid))
    world.pools.changed("ADDED", pool(uid="u5", maximum=9))
    await world.settled()
    assert world.engine.removing == 1
    assert "shell" not in world.engine.pools
    world.engine.stops.set()
    await world.settled()
    assert world.engine.told[-1] == "set shell 9"
    assert world.engine.told.count("remove shell") == 1


async def test_object_that_replaced_another_of_its_name_is_another_pool() -> None:
    world = World()
    await world.begin(pool(uid="u1"))
    world.pools.changed("MODIFIED", pool(uid="u2"))  # the watch was cut while it was deleted
    await world.settled()
    assert world.engine.told[1:] == ["set shell 4", "remove shell", "find", "set shell 4"]
    owner = world.pools.owner("shell")
    assert owner is not None
    assert owner["uid"] == "u2"


async def test_late_news_of_the_deletion_of_the_one_before_removes_nothing() -> None:
    world = World()
    await world.begin(pool(uid="u2"))
    world.pools.changed("DELETED", pool(uid="u1"))
    await world.settled()
    assert "shell" in world.engine.pools


async def test_members_that_do_not_stop_are_waited_for_and_the_next_pool_too() -> None:
    world = World()
    await world.begin(pool())
    remove = world.engine.remove_pool

    async def fails(name: str) -> None:
        await remove(name)
        world.engine.refuse = ResourceError(
            f"pool {name}: is being deleted, 1 of its members still have to stop"
        )
        raise Infra("pool shell: members shell-1: not stopped in 60 s")

    world.engine.remove_pool = fails  # type: ignore[method-assign]
    world.pools.changed("DELETED", pool())
    await asyncio.sleep(0.05)
    assert world.pools.problems() == {}
    world.pools.changed("ADDED", pool(uid="u2"))
    await asyncio.sleep(0.05)
    assert "1 of its members still have to stop" in world.pools.problems()["shell"][0]
    world.engine.refuse = None
    await asyncio.sleep(0.05)
    assert world.engine.pools["shell"].max == 4
    assert world.pools.problems() == {}
    await world.pools.close()


# 2. Members of an earlier broker.


async def test_members_are_taken_over_before_anything_is_decided() -> None:
    world = World(found("shell-aaaa-1"), found("other-bbbb-1", "other"), found("gone-cccc-1", "gone"))
    decided: list[list[str]] = []
    begin = asyncio.create_task(world.begin(pool(), pool("other", uid="u2")))
    while not any(each.startswith("set") for each in world.engine.told):
        await asyncio.sleep(0)
        decided.append(list(world.engine.told))
    await begin
    # The first look after the first pool was set already sees all of them taken over.
    assert decided[-1] == [
        "find",
        *("set shell 4", "set other 4"),
        *("adopt shell-aaaa-1", "adopt other-bbbb-1", "adopt gone-cccc-1"),
    ]


async def test_owners_are_known_before_members_are_looked_for() -> None:
    world, owners = World(), []
    find = world.pools._find

    async def looks() -> Sequence[Found]:
        owners.append(world.pools.owner("shell"))
        return await find()

    world.pools._find = looks
    there = [pool()]
    beginning = asyncio.create_task(world.pools.begin(lambda: list(there)))
    await asyncio.sleep(0)
    there.clear()  # deleted meanwhile
    await beginning
    assert owners[0] is not None
    assert world.pools.owner("shell") is None
    assert world.engine.pools == {}


async def test_pool_that_comes_later_takes_over_its_own() -> None:
    world = World()
    await world.begin()
    world.left = [found("shell-aaaa-1"), found("other-bbbb-1", "other")]
    world.pools.changed("ADDED", pool())
    await world.settled()
    assert world.engine.told[1:] == ["find", "set shell 4", "adopt shell-aaaa-1"]


# 3. Pools that cannot be served.


async def test_pool_that_is_wrong_is_kept_out_with_a_line_for_each_fault() -> None:
    world = World(found("shell-aaaa-1"))
    await world.begin(pool(capacity={"min": 3, "max": 2}, colour="red"), pool("other", uid="u2"))
    problems = world.pools.problems()["shell"]
    assert any(text.startswith("spec.capacity.max: 2 is less than min") for text in problems), problems
    assert any(text.startswith("spec.colour: is not a known field") for text in problems), problems
    assert set(world.engine.pools) == {"other"}
    assert "adopt shell-aaaa-1" not in world.engine.told, "its members are left alone"
    world.pools.changed("MODIFIED", pool())
    await world.settled()
    assert world.pools.problems() == {}
    assert world.engine.told[-2:] == ["set shell 4", "adopt shell-aaaa-1"]


async def test_pool_that_becomes_wrong_goes_on_as_it_was() -> None:
    world = World()
    await world.begin(pool())
    world.pools.changed("MODIFIED", pool(capacity={"max": 0}))
    await world.settled()
    assert world.engine.pools["shell"].max == 4
    assert world.pools.problems()["shell"] == ["spec.capacity.max: 0 is less than 1; use 1 or more"]
    world.pools.changed("DELETED", pool())
    await world.settled()
    assert (world.engine.pools, world.pools.problems()) == ({}, {})


async def test_what_the_engine_refuses_is_a_problem_until_it_does_not() -> None:
    world = World()
    world.engine.refuse = ResourceError(
        "pool shell: runner kubernetes cannot work here: no key", hints=("h",)
    )
    await world.begin(pool())
    assert world.pools.problems() == {"shell": ["pool shell: runner kubernetes cannot work here: no key; h"]}
    world.engine.refuse = None
    await asyncio.sleep(0.05)
    assert (set(world.engine.pools), world.pools.problems()) == ({"shell"}, {})


async def test_api_server_that_does_not_answer_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    await world.begin()
    find, failures = world.pools._find, 2

    async def fails() -> Sequence[Found]:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise Infra("kubernetes: no answer")
        return await find()

    world.pools._find = fails
    world.pools.changed("ADDED", pool())
    await asyncio.sleep(0.1)
    assert "shell" in world.engine.pools
    assert "is tried again" in caplog.text


# 4. Deletion.


@pytest.mark.parametrize("finalizer", ["foregroundDeletion", "orphan", "example.com/keep"])
async def test_object_that_is_being_deleted_has_no_pool_and_no_owner(finalizer: str) -> None:
    world = World(found("shell-aaaa-1"))
    obj = pool()
    obj["metadata"]["finalizers"] = [finalizer]
    await world.begin(obj)
    assert world.pools.owner("shell") == {
        "apiVersion": "agentfly.dev/v1alpha1",
        "kind": "ResourcePool",
        "name": "shell",
        "uid": "u1",
        "controller": True,
    }
    world.pools.changed("MODIFIED", deleting(obj))
    assert world.pools.owner("shell") is None, "at once, whatever else goes on"
    await world.settled()
    assert world.engine.told[-1] == "remove shell"
    world.pools.changed("DELETED", deleting(obj))
    await world.settled()
    assert world.engine.told.count("remove shell") == 1


async def test_broker_that_starts_during_a_deletion_stops_what_is_left() -> None:
    world = World(found("shell-aaaa-1"))
    await world.begin(deleting(pool()))
    assert world.engine.told == ["find", "adopt shell-aaaa-1"], "the engine stops members of no pool"
    assert world.pools.owner("shell") is None


# 5. What a pool may make the broker do.


@pytest.mark.parametrize(
    ("entrypoint", "allowed"),
    [
        ("games.chess:make", True),
        ("games:make", True),
        ("gamesome.chess:make", False),
        ("os:system", False),
    ],
)
async def test_only_modules_of_the_list_are_loaded(entrypoint: str, allowed: bool) -> None:
    made = pool(type="InProcess", inProcess={"entrypoint": entrypoint})
    del made["spec"]["container"]
    world = World(modules=["games"])
    await world.begin(made)
    assert ("shell" in world.engine.pools) is allowed
    if not allowed:
        assert "AGENTFLY_IN_PROCESS_MODULES" in world.pools.problems()["shell"][0]


@pytest.mark.parametrize("credential", [{"env": "KEY"}, {"file": "/var/run/secrets/agentfly/signing-key"}])
async def test_keys_of_a_cluster_come_from_secrets_only(credential: dict[str, str]) -> None:
    made = pool(
        type="ExternalAPI",
        scope="Global",
        externalAPI={"baseUrl": "https://attacker.example/v1", "credentials": [credential]},
        capacity={"max": 1},
    )
    del made["spec"]["container"]
    world = World()
    await world.begin(made)
    assert world.engine.pools == {}
    assert "make a Secret of the key, and write secretKeyRef" in world.pools.problems()["shell"][0]
