"""Manifests: a broker with few rights, and members that reach nothing they should not."""

import ipaddress
from typing import Any

import pytest

from agentfly.api import ResourcePool
from agentfly_operator.config import Config
from agentfly_operator.plan.wanted import read_pool
from agentfly_operator.render.broker import (
    broker_deployment,
    broker_disruption_budget,
    broker_rights,
    broker_service,
)
from agentfly_operator.render.policy import broker_policy, members_policy, pool_members_policy
from tests.unit.operator.make import CONFIG, pool


def read(**spec: Any) -> ResourcePool:
    found = read_pool(pool(**spec)).pool
    assert found is not None
    return found


def template() -> dict[str, Any]:
    found: dict[str, Any] = broker_deployment("team", CONFIG, "uid-1")["spec"]["template"]
    return found


# Broker ------------------------------------------------------------------------------------------------


def test_the_broker_runs_under_the_restricted_standard() -> None:
    spec = template()["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not any("hostPath" in volume for volume in spec["volumes"])


def test_at_no_time_two_brokers_run() -> None:
    spec = broker_deployment("team", CONFIG, "uid-1")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_the_broker_is_told_all_it_needs_and_no_secret() -> None:
    (container,) = template()["spec"]["containers"]
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert values == {
        "AGENTFLY_LISTEN": "0.0.0.0:7080",
        "AGENTFLY_GATEWAY_LISTEN": "0.0.0.0:7081",
        "AGENTFLY_SIGNING_KEY_FILE": "/etc/agentfly/broker/signing-key",
        "AGENTFLY_CLIENT_TOKEN_FILE": "/etc/agentfly/client/client-token",
        "AGENTFLY_SANDBOXD_IMAGE": "registry.example/sandboxd:1",
        "AGENTFLY_LOG_FORMAT": "json",
        "AGENTFLY_NAMESPACE": None,
    }
    assert container["command"] == ["agentfly", "broker"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/healthz?ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"


def test_service_and_budget_find_the_broker() -> None:
    labels = template()["metadata"]["labels"]
    service, budget = broker_service("team"), broker_disruption_budget("team")
    assert service["spec"]["clusterIP"] == "None"
    assert {each["name"]: each["port"] for each in service["spec"]["ports"]} == {
        "http": 7080,
        "gateway": 7081,
    }
    assert service["spec"]["selector"].items() <= labels.items()
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert budget["spec"]["maxUnavailable"] == 1


def test_rights_end_at_the_namespace_and_are_few() -> None:
    account, role, binding = broker_rights("team")
    assert account["kind"] == "ServiceAccount"
    assert {(rule["resources"][0], verb) for rule in role["rules"] for verb in rule["verbs"]} == {
        *(("pods", verb) for verb in ("create", "delete", "get", "list", "watch")),
        ("pods/log", "get"),
        *(("resourcepools", verb) for verb in ("get", "list", "watch")),
    }
    assert binding["roleRef"]["kind"] == "Role"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "agentfly-broker", "namespace": "team"}]


# Members -----------------------------------------------------------------------------------------------


def test_every_member_is_closed_both_ways() -> None:
    spec = members_policy("team")["spec"]
    assert spec == {
        "podSelector": {"matchLabels": {"agentfly.dev/component": "member"}},
        "policyTypes": ["Ingress", "Egress"],
    }


def test_a_pool_opens_one_port_to_broker_and_workers() -> None:
    policy = pool_members_policy("team", read(), CONFIG)
    assert policy is not None
    assert policy["metadata"]["name"] == "agentfly-pool-shell"
    who = {"key": "agentfly.dev/component", "operator": "In", "values": ["broker", "worker"]}
    assert policy["spec"]["ingress"] == [
        {
            "from": [{"podSelector": {"matchExpressions": [who]}}],
            "ports": [{"port": 7070, "protocol": "TCP"}],
        }
    ]
    assert "egress" not in policy["spec"]
    assert policy["spec"]["podSelector"]["matchLabels"]["agentfly.dev/pool"] == "shell"


def egress(policy: dict[str, Any] | None) -> list[dict[str, Any]]:
    assert policy is not None
    found: list[dict[str, Any]] = policy["spec"]["egress"]
    return found


def is_open(rules: list[dict[str, Any]], address: str) -> bool:
    """Whether one of the rules lets packets to an address pass."""
    at = ipaddress.ip_address(address)
    blocks = [target["ipBlock"] for rule in rules for target in rule["to"]]
    return any(
        at in ipaddress.ip_network(block["cidr"])
        and not any(at in ipaddress.ip_network(inside) for inside in block.get("except", ()))
        for block in blocks
    )


@pytest.mark.parametrize(
    ("address", "reached"),
    [
        ("93.184.216.34", True), ("2606:4700::1111", True), ("10.96.0.1", False), ("172.20.0.1", False),
        ("192.168.1.1", False), ("169.254.169.254", False), ("100.64.0.1", False), ("127.0.0.1", False),
        ("fd00::1", False), ("fe80::1", False), ("::1", False),
    ],
)  # fmt: skip
def test_with_a_network_the_public_internet_is_reached_and_nothing_inside(
    address: str, reached: bool
) -> None:
    policy = pool_members_policy("team", read(container={"image": "a", "network": True}), CONFIG)
    _, *public = egress(policy)
    assert all("ports" not in rule for rule in public)
    assert is_open(public, address) is reached


def test_dns_comes_with_the_network_unless_it_is_declined() -> None:
    config = Config("i", "s", "Never", "agentfly-system", "me", dns_cidrs=("10.96.0.10/32",))
    dns, *public = egress(
        pool_members_policy("team", read(container={"image": "a", "network": True}), config)
    )
    assert dns["to"][0]["podSelector"] == {"matchLabels": {"k8s-app": "kube-dns"}}
    assert dns["to"][1] == {"ipBlock": {"cidr": "10.96.0.10/32"}}
    assert dns["ports"] == [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]
    quiet = read(container={"image": "a", "network": True}, security={"dns": False})
    assert egress(pool_members_policy("team", quiet, config)) == public


def test_named_addresses_are_reached_and_no_others() -> None:
    named = {"dns": False, "egress": [{"cidr": "10.20.0.0/16", "ports": [443]}]}
    policy = pool_members_policy(
        "team", read(container={"image": "a", "network": True}, security=named), CONFIG
    )
    assert egress(policy) == [
        {
            "to": [{"ipBlock": {"cidr": "10.20.0.0/16"}}],
            "ports": [{"port": 443, "protocol": "TCP"}, {"port": 443, "protocol": "UDP"}],
        }
    ]


@pytest.mark.parametrize(
    ("address", "reached"),
    [("93.184.216.34", True), ("10.20.3.4", True), ("10.21.0.1", False), ("169.254.169.254", False)],
)
def test_a_wide_range_does_not_mean_the_private_ones_in_it(address: str, reached: bool) -> None:
    named = {"dns": False, "egress": [{"cidr": "0.0.0.0/0"}, {"cidr": "10.20.0.0/16"}]}
    pool = read(container={"image": "a", "network": True}, security=named)
    assert is_open(egress(pool_members_policy("team", pool, CONFIG)), address) is reached


def test_members_that_are_no_pods_need_no_policy() -> None:
    api = {"baseUrl": "https://judge.example/v1"}
    judge = read(type="ExternalAPI", scope="Global", externalAPI=api, container=None, capacity={"max": 1})
    assert pool_members_policy("team", judge, CONFIG) is None


def test_a_broker_answers_its_namespace_without_members_and_the_operator() -> None:
    spec = broker_policy("team", CONFIG)["spec"]
    namespace, outside = spec["ingress"]
    assert spec["policyTypes"] == ["Ingress"]
    assert namespace["from"] == [
        {
            "podSelector": {
                "matchExpressions": [
                    {"key": "agentfly.dev/component", "operator": "NotIn", "values": ["member"]}
                ]
            }
        }
    ]
    (operator,) = outside["from"]
    assert operator["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": CONFIG.namespace}
    assert operator["podSelector"]["matchLabels"] == {"agentfly.dev/component": "operator"}
    assert outside["ports"] == [{"port": 7080, "protocol": "TCP"}]
