"""What a namespace needs so that its pools can be served, and what of it is missing.

Guarantees:
1. A namespace has a broker and its surroundings as long as it has a pool that is not being deleted; with none
   of these nothing is applied, whatever is still there: it is the garbage collector's.
2. Every object is owned by all pools that live, and by them alone: it goes with the last one, whether or not
   an operator is there to see it.
3. A secret is made when it is absent and never changed. One that was deleted is made anew; the broker then
   restarts with it.
4. What the API server has already is not applied again.
5. Members are walled in before there is a broker that could start one: policies come first.
6. The broker may read the secrets that pools take credentials from, and no others. That comes last: where the
   operator may not grant it, all else works.

Not here: the manifests (`render`), what is in the secrets (`cluster.secrets`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentfly.errors import AgentflyError
from agentfly_operator.config import Config
from agentfly_operator.names import BROKER, CLIENT_SECRET, CLIENT_TOKEN, CREDENTIALS, SIGNING_KEY, owner_of
from agentfly_operator.plan.drift import covers
from agentfly_operator.render.broker import (
    broker_deployment,
    broker_disruption_budget,
    broker_rights,
    broker_secret,
    broker_service,
    credential_rights,
)
from agentfly_operator.render.policy import broker_policy, members_policy

Object = dict[str, Any]
Ref = tuple[str, str]  # kind and name of an object in the namespace

SECRETS = {BROKER: SIGNING_KEY, CLIENT_SECRET: CLIENT_TOKEN}
"""The secrets of a broker, each with the key that must be in it."""

_FIRST = tuple(("NetworkPolicy", name) for name in ("agentfly-members", BROKER))
_RIGHTS = tuple((kind, BROKER) for kind in ("ServiceAccount", "Role", "RoleBinding"))
_REST = tuple((kind, BROKER) for kind in ("Service", "PodDisruptionBudget", "Deployment"))
_CREDENTIALS = tuple((kind, CREDENTIALS) for kind in ("Role", "RoleBinding"))
OBJECTS: tuple[Ref, ...] = (*_FIRST, *_RIGHTS, *(("Secret", name) for name in SECRETS), *_REST, *_CREDENTIALS)
"""All that is planned here, in the order in which it is applied."""


@dataclass(frozen=True, slots=True)
class NamespaceSeen:
    """A namespace now.

    Attributes:
        pools: its ResourcePools as the API server returned them, those that are being deleted too.
        objects: those of ``OBJECTS`` that exist.
        credentials: names of the secrets that pools take credentials from.
    """

    pools: Sequence[Mapping[str, Any]]
    objects: Mapping[Ref, Mapping[str, Any]] = field(default_factory=dict)
    credentials: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class NamespacePlan:
    """What to do, in order.

    Attributes:
        make: secrets that have to be made; look and plan again after that.
        apply: manifests that the API server does not have in this form.
        owners: for the objects that are made.
    """

    make: tuple[str, ...] = ()
    apply: tuple[Object, ...] = ()
    owners: tuple[Object, ...] = ()


def living(pools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The pools that are not being deleted, by name."""
    kept = [pool for pool in pools if "deletionTimestamp" not in pool["metadata"]]
    return sorted(kept, key=lambda pool: str(pool["metadata"]["name"]))


def plan_namespace(namespace: str, seen: NamespaceSeen, config: Config) -> NamespacePlan:
    """What is missing in a namespace.

    Raises:
        AgentflyError: a secret of ours is there without what has to be in it.
    """
    owners = tuple(owner_of(pool) for pool in living(seen.pools))
    if not owners:
        return NamespacePlan()
    missing = tuple(name for name in SECRETS if ("Secret", name) not in seen.objects)
    wanted: list[Object] = [
        members_policy(namespace),
        broker_policy(namespace, config),
        *broker_rights(namespace),
        *(_kept_secret(namespace, name, seen) for name in SECRETS if name not in missing),
        broker_service(namespace),
        broker_disruption_budget(namespace),
    ]
    if not missing:
        key = seen.objects["Secret", BROKER]
        wanted.append(broker_deployment(namespace, config, str(key["metadata"]["uid"])))
    if seen.credentials or _CREDENTIALS[0] in seen.objects:
        wanted += credential_rights(namespace, seen.credentials)
    owned = [owned_by(manifest, owners) for manifest in wanted]
    return NamespacePlan(
        make=missing,
        apply=tuple(each for each in owned if not covers(seen.objects.get(ref_of(each)), each)),
        owners=owners,
    )


def ref_of(manifest: Mapping[str, Any]) -> Ref:
    """Kind and name."""
    return str(manifest["kind"]), str(manifest["metadata"]["name"])


def owned_by(manifest: Object, owners: Sequence[Object]) -> Object:
    """The manifest with these owners."""
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": list(owners)}}


def _kept_secret(namespace: str, name: str, seen: NamespaceSeen) -> Object:
    data = dict(seen.objects["Secret", name].get("data") or {})
    key = SECRETS[name]
    if not data.get(key):
        raise AgentflyError(
            f"secret {namespace}/{name}: has no key {key}",
            hints=[f"kubectl -n {namespace} delete secret {name}, and it is made anew"],
        )
    return broker_secret(namespace, name, data)
