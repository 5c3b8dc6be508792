"""One pass over one namespace with pools: look, plan, make what is missing.

Guarantees:
1. Of every object is read first, and written only what the API server does not have in this form.
2. Nothing is written by a process that does not lead.
3. A namespace without living pools is left alone, and its broker is not asked any more.

Not here: what a namespace needs (`plan.namespace`).
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from agentfly.kube import (
    DEPLOYMENTS,
    NETWORK_POLICIES,
    POD_DISRUPTION_BUDGETS,
    RESOURCE_POOLS,
    ROLE_BINDINGS,
    ROLES,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    Kube,
    NotFound,
    Resource,
)
from agentfly_operator.cluster.brokers import Brokers
from agentfly_operator.cluster.metrics import Metrics
from agentfly_operator.cluster.pools import NotLeading
from agentfly_operator.cluster.secrets import BrokerSecrets
from agentfly_operator.config import Config
from agentfly_operator.plan.credentials import credentials_of
from agentfly_operator.plan.namespace import OBJECTS, NamespaceSeen, Ref, living, plan_namespace

RESYNC_S = 60.0
_ROUNDS = 3  # secrets first, then what names them; the third sees that all is there

_RESOURCES: Mapping[str, Resource] = {
    "NetworkPolicy": NETWORK_POLICIES,
    "ServiceAccount": SERVICE_ACCOUNTS,
    "Role": ROLES,
    "RoleBinding": ROLE_BINDINGS,
    "Secret": SECRETS,
    "Service": SERVICES,
    "PodDisruptionBudget": POD_DISRUPTION_BUDGETS,
    "Deployment": DEPLOYMENTS,
}


class Namespaces:
    """Passes over namespaces.

    Args:
        leads: whether this process may write.
    """

    def __init__(
        self,
        kube: Kube,
        config: Config,
        secrets: BrokerSecrets,
        brokers: Brokers,
        metrics: Metrics,
        leads: Callable[[], bool],
    ) -> None:
        self._kube = kube
        self._config = config
        self._secrets = secrets
        self._brokers = brokers
        self._metrics = metrics
        self._leads = leads

    async def run(self, namespace: str) -> float | None:
        """One pass; seconds until the next, None if there is nothing to do until a pool comes."""
        pools = await self._kube.list(RESOURCE_POOLS, namespace)
        if not living(pools):
            self._brokers.leave(namespace)
            self._secrets.forget(namespace)
            return None
        self._brokers.follow(namespace)
        credentials = credentials_of(living(pools))
        for _ in range(_ROUNDS):
            seen = NamespaceSeen(pools, await self._look(namespace), credentials)
            plan = plan_namespace(namespace, seen, self._config)
            for name in plan.make:
                self._must_lead()
                await self._secrets.make(namespace, name, plan.owners)
                self._secrets.forget(namespace)
                self._metrics.writes.labels("apply").inc()
            for manifest in plan.apply:
                self._must_lead()
                await self._kube.apply(_RESOURCES[manifest["kind"]], manifest)
                self._metrics.writes.labels("apply").inc()
            if not plan.make:
                break
        return RESYNC_S

    async def _look(self, namespace: str) -> Mapping[Ref, Mapping[str, Any]]:
        found = await asyncio.gather(*(self._get(ref, namespace) for ref in OBJECTS))
        return {ref: obj for ref, obj in zip(OBJECTS, found, strict=True) if obj is not None}

    async def _get(self, ref: Ref, namespace: str) -> dict[str, Any] | None:
        kind, name = ref
        try:
            return await self._kube.get(_RESOURCES[kind], name, namespace)
        except NotFound:
            return None

    def _must_lead(self) -> None:
        if not self._leads():
            raise NotLeading("lease: was lost, nothing is written any more")
