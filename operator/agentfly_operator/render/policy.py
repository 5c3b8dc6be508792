"""Who may talk to whom in a namespace with pools, as NetworkPolicies.

Guarantees:
1. A member reaches nothing and is reached by nobody, whatever pool it is of and from its first packet on that
   the network plug-in enforces: that policy is older than any member, and ends with the last pool.
2. A pool opens its members' one port to broker and workers of the namespace, and nothing else inwards; the
   pool of a run or job to its own workers alone: who reaches a policy's server could change its weights.
3. Only a pool whose resource asks for a network has one: what its `security.egress` names, else the public
   internet and no private, link-local or cluster address, so neither API server, nor nodes, nor metadata
   services, nor other members. DNS comes with it, unless `security.dns` says no.
4. A broker answers pods of its namespace that are no members, and the operator.

Not here: whether anybody enforces them; that is the cluster's network plug-in.
"""

from collections.abc import Sequence
from typing import Any

from agentfly.api import ResourcePool
from agentfly.api.pods import PUBLIC, Egress, Security, left_out
from agentfly_operator.config import Config
from agentfly_operator.names import (
    BROKER,
    BROKER_PORT,
    COMPONENT,
    JOB,
    MEMBERS_POLICY,
    MODEL_PORT,
    POOL,
    RUN,
    SANDBOXD_PORT,
    labels,
    pool_policy,
)

Object = dict[str, Any]

_NAMESPACE_NAME = "kubernetes.io/metadata.name"
_OWNERS = {"TrainingRun": RUN, "RolloutJob": JOB}


def members_policy(namespace: str) -> Object:
    """Every member of every pool: closed both ways."""
    spec = {"podSelector": {"matchLabels": {COMPONENT: "member"}}, "policyTypes": ["Ingress", "Egress"]}
    return _policy(MEMBERS_POLICY, namespace, labels("member"), spec)


def member_port(pool: ResourcePool) -> int | None:
    """The port that holders use; None if its members are no pods."""
    return {"Container": SANDBOXD_PORT, "ModelService": MODEL_PORT}.get(pool.spec.type)


def pool_members_policy(namespace: str, pool: ResourcePool, config: Config) -> Object | None:
    """What the members of one pool need beyond that; None if its members are no pods."""
    port = member_port(pool)
    if port is None:
        return None
    name = pool.metadata.name
    spec = {
        "podSelector": {"matchLabels": {COMPONENT: "member", POOL: name}},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": _holders(pool), "ports": [_port(port)]}],
    }
    if _has_network(pool):
        spec["egress"] = _egress(pool.spec.security or Security(), config)
    return _policy(pool_policy(name), namespace, labels("member", **{POOL: name}), spec)


def _holders(pool: ResourcePool) -> list[Object]:
    """Who uses the members of a pool."""
    for owner in pool.metadata.owner_references:
        if (mark := _OWNERS.get(owner["kind"])) is not None and owner.get("controller"):
            broker, mine = {COMPONENT: "broker"}, {COMPONENT: "worker", mark: owner["name"]}
            return [{"podSelector": {"matchLabels": each}} for each in (broker, mine)]
    return [{"podSelector": {"matchExpressions": [_is_in(COMPONENT, "In", "broker", "worker")]}}]


def broker_policy(namespace: str, config: Config) -> Object:
    """Who may connect to the broker: its own port, and those of gateways that it runs for its pools."""
    others = {"podSelector": {"matchExpressions": [_is_in(COMPONENT, "NotIn", "member")]}}
    spec = {
        "podSelector": {"matchLabels": {COMPONENT: "broker"}},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [others]}, {"from": [operator_pods(config)], "ports": [_port(BROKER_PORT)]}],
    }
    return _policy(BROKER, namespace, labels("broker"), spec)


def operator_pods(config: Config) -> Object:
    """The operator, as a peer of a rule."""
    return {
        "namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: config.namespace}},
        "podSelector": {"matchLabels": {COMPONENT: "operator"}},
    }


def _has_network(pool: ResourcePool) -> bool:
    container = pool.spec.container
    return container.network if container is not None else True  # a model service may have weights to fetch


def _egress(security: Security, config: Config) -> list[Object]:
    named = [_named(egress) for egress in security.egress or PUBLIC]
    return [_dns(config.dns_cidrs), *named] if security.dns else named


def _dns(cidrs: Sequence[str]) -> Object:
    resolver = {
        "namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: "kube-system"}},
        "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
    }
    targets = [resolver, *({"ipBlock": {"cidr": cidr}} for cidr in cidrs)]
    return {"to": targets, "ports": [_port(53, "UDP"), _port(53)]}


def _named(egress: Egress) -> Object:
    inside = left_out(egress.cidr)
    block = {"cidr": egress.cidr, **({"except": list(inside)} if inside else {})}
    rule: Object = {"to": [{"ipBlock": block}]}
    if egress.ports is not None:
        rule["ports"] = [_port(port, protocol) for port in egress.ports for protocol in ("TCP", "UDP")]
    return rule


def _is_in(key: str, operator: str, *values: str) -> Object:
    return {"key": key, "operator": operator, "values": list(values)}


def _port(number: int, protocol: str = "TCP") -> Object:
    return {"port": number, "protocol": protocol}


def _policy(name: str, namespace: str, marks: dict[str, str], spec: Object) -> Object:
    metadata = {"name": name, "namespace": namespace, "labels": marks}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}
