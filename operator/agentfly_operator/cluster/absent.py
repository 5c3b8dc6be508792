"""Which objects that specs name are not there.

Guarantees:
1. An object that is missing is looked for every `MISSING_S` seconds, one that was found every `FOUND_S`.
2. What cannot be looked up counts as there: who may not read a claim must not stall a run that can use it.
   That holds for Secrets where the operator was not given the right to read them.
3. Pools are known without a request.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping

from agentfly.kube import (
    CONFIG_MAPS,
    LOCAL_QUEUES,
    PERSISTENT_VOLUME_CLAIMS,
    SECRETS,
    Kube,
    KubeError,
    NotFound,
    Resource,
)
from agentfly_operator.cluster.children import Children

logger = logging.getLogger(__name__)

MISSING_S = 5.0
FOUND_S = 60.0
_KEPT = 10_000
_RESOURCES: Mapping[str, Resource] = {
    "ConfigMap": CONFIG_MAPS,
    "LocalQueue": LOCAL_QUEUES,
    "PersistentVolumeClaim": PERSISTENT_VOLUME_CLAIMS,
    "Secret": SECRETS,
}

Ref = tuple[str, str]  # kind and name


class Absent:
    """Looks for what specs name."""

    def __init__(self, kube: Kube, children: Children) -> None:
        self._kube = kube
        self._children = children
        self._found: dict[tuple[str, Ref], tuple[bool, float]] = {}

    async def of(self, namespace: str, refs: Iterable[Ref]) -> tuple[str, ...]:
        """Those that are not there, each as kind and name, in the order given."""
        return tuple([f"{ref[0]} {ref[1]}" for ref in refs if not await self._there(namespace, ref)])

    async def _there(self, namespace: str, ref: Ref) -> bool:
        kind, name = ref
        if kind == "ResourcePool":
            return self._children.pool(namespace, name) is not None
        now = asyncio.get_running_loop().time()
        found, until = self._found.get((namespace, ref), (True, now))
        if now < until:
            return found
        try:
            await self._kube.get(_RESOURCES[kind], name, namespace)
            found = True
        except NotFound:
            found = False
        except KubeError as error:
            logger.info("%s %s/%s cannot be looked up: %s", kind, namespace, name, error)
        if len(self._found) >= _KEPT:
            self._found = {key: known for key, known in self._found.items() if known[1] > now}
        self._found[namespace, ref] = found, now + (FOUND_S if found else MISSING_S)
        return found
