"""An API server in memory, as far as the operator's passes ask one."""

import asyncio
import copy
import itertools
from collections.abc import Mapping
from typing import Any

from agentfly.kube import Conflict, KubeError, NotFound, Resource

Obj = dict[str, Any]


class FakeKube:
    """Objects by plural, namespace and name. `calls` is what was asked, `refuses` how it is answered,
    `served` the plurals of each group and version that somebody else defined."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Obj] = {}
        self.calls: list[tuple[str, str, str]] = []
        self.refuses: dict[tuple[str, str], KubeError] = {}
        self.served: dict[str, list[str]] = {}
        self.graces: dict[tuple[str, str], int | None] = {}
        self.propagations: dict[tuple[str, str], str] = {}
        self._numbers = itertools.count(1)

    def put(self, resource: Resource, obj: Obj) -> Obj:
        """An object that somebody else made."""
        made, meta = copy.deepcopy(obj), obj["metadata"]
        made["metadata"] |= {"resourceVersion": str(next(self._numbers))}
        made["metadata"].setdefault("uid", f"uid-{next(self._numbers)}")
        self.objects[resource.plural, meta["namespace"], meta["name"]] = made
        return copy.deepcopy(made)

    def names(self, resource: Resource) -> set[str]:
        """Of all that there is of a kind."""
        return {name for plural, _, name in self.objects if plural == resource.plural}

    def writes(self) -> list[tuple[str, str, str]]:
        """What was asked that may change something."""
        return [call for call in self.calls if call[0] not in ("get", "list")]

    async def get(self, resource: Resource, name: str, namespace: str = "") -> Obj:
        await self._asked("get", resource, name)
        return copy.deepcopy(self._live(resource, namespace if resource.namespaced else "", name))

    async def list(self, resource: Resource, namespace: str | None = None) -> list[Obj]:
        await self._asked("list", resource, "")
        return [
            copy.deepcopy(obj)
            for (plural, space, _), obj in self.objects.items()
            if plural == resource.plural and namespace in (None, space)
        ]

    async def request(self, method: str, path: str, *, params: Mapping[str, str] | None = None) -> Obj:
        """A list by its path, or what an API group has."""
        if params is None:
            group = path.removeprefix("/apis/")
            await self._asked("discover", Resource("", "", group), "")
            if group not in self.served:
                raise NotFound("no such group", status=404)
            return {"resources": [{"name": plural} for plural in self.served[group]]}
        assert (method, params) == ("GET", {"limit": "1"})
        plural = path.rpartition("/")[2]
        return {"items": await self.list(Resource("", "v1", plural))}

    async def create(
        self, resource: Resource, obj: Obj, namespace: str | None = None, *, dry_run: bool = False
    ) -> Obj:
        meta = obj["metadata"]
        await self._asked("try" if dry_run else "create", resource, meta.get("name", ""))
        if (refusal := self.refuses.get(("create", resource.plural))) is not None:
            raise refusal
        if (resource.plural, meta["namespace"], meta["name"]) in self.objects:
            raise Conflict("exists", status=409)
        return copy.deepcopy(obj) if dry_run else self.put(resource, obj)

    async def apply(self, resource: Resource, obj: Obj, *, subresource: str = "") -> Obj:
        meta = obj["metadata"]
        await self._asked("apply", resource, meta["name"])
        live = self._live(resource, meta["namespace"], meta["name"])
        if (
            meta.get("resourceVersion", live["metadata"]["resourceVersion"])
            != live["metadata"]["resourceVersion"]
        ):
            raise Conflict("changed", status=409)
        live[subresource] = copy.deepcopy(obj[subresource])
        live["metadata"]["resourceVersion"] = str(next(self._numbers))
        return copy.deepcopy(live)

    async def patch(
        self, resource: Resource, name: str, body: Obj, namespace: str, *, subresource: str = ""
    ) -> Obj:
        await self._asked("patch", resource, name)
        live = self._live(resource, namespace, name)
        for field in ("uid", "resourceVersion"):
            if body["metadata"].get(field, live["metadata"][field]) != live["metadata"][field]:
                raise Conflict("another", status=409)
        marks = live["metadata"].setdefault("annotations", {})
        for mark, value in body["metadata"].get("annotations", {}).items():
            marks.pop(mark, None) if value is None else marks.update({mark: value})
        part = subresource or "spec"
        live.setdefault(part, {}).update(copy.deepcopy(body.get(part, {})))
        live["metadata"]["resourceVersion"] = str(next(self._numbers))
        return copy.deepcopy(live)

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str,
        *,
        uid: str,
        grace_s: int | None,
        propagation: str,
    ) -> bool:
        self.propagations[resource.plural, name] = propagation
        self.graces[resource.plural, name] = grace_s
        await self._asked("delete", resource, name)
        live = self.objects.get((resource.plural, namespace, name))
        if live is None:
            return False
        if live["metadata"]["uid"] != uid:
            raise Conflict("another", status=409)
        del self.objects[resource.plural, namespace, name]
        return True

    def _live(self, resource: Resource, namespace: str, name: str) -> Obj:
        try:
            return self.objects[resource.plural, namespace, name]
        except KeyError:
            raise NotFound("none", status=404) from None

    async def _asked(self, verb: str, resource: Resource, name: str) -> None:
        await asyncio.sleep(0)
        self.calls.append((verb, resource.plural, name))
        if (refusal := self.refuses.get((verb, resource.plural))) is not None:
            raise refusal
