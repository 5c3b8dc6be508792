"""The broker of a namespace as Kubernetes objects.

Guarantees:
1. It runs as nobody, without privileges, on a read-only root, under the restricted pod security standard.
2. Its rights end at its namespace: pods, the pools to read, and the secrets that pools name, each by name.
3. At no time two brokers run: they would both count the same members.
4. A drained node takes it along at once: leases are recovered from the sandboxes.
5. Quantities stand in the API server's own form, so that what was applied compares equal to what is stored.

Not here: who may connect to it (`render.policy`), what is in its secrets (nowhere but in the API server).
"""

from collections.abc import Sequence
from typing import Any

from agentfly_operator.config import Config
from agentfly_operator.names import (
    BROKER,
    BROKER_PORT,
    CLIENT_SECRET,
    COMPONENT,
    CREDENTIALS,
    GATEWAY_PORT,
    labels,
)

Object = dict[str, Any]

SIGNING_KEY_UID = "agentfly.dev/signing-key-uid"  # another key is another pod: the broker reads it once
NOBODY = 65532
_KEY_FOLDER = "/etc/agentfly/broker"
_CLIENT_FOLDER = "/etc/agentfly/client"
_READ_BY_GROUP = 0o440
_PORTS = {"http": BROKER_PORT, "gateway": GATEWAY_PORT}


def broker_rights(namespace: str) -> tuple[Object, ...]:
    """ServiceAccount, Role and RoleBinding."""
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "delete", "get", "list", "watch"]},
        {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
        {"apiGroups": ["agentfly.dev"], "resources": ["resourcepools"], "verbs": ["get", "list", "watch"]},
    ]
    account = _object("v1", "ServiceAccount", namespace, automountServiceAccountToken=False)
    return account, *_granted(namespace, BROKER, rules)


def credential_rights(namespace: str, secrets: Sequence[str]) -> tuple[Object, ...]:
    """Role and RoleBinding of their own: an operator that may not grant them still runs brokers.

    Args:
        secrets: names of the secrets that pools of the namespace take credentials from.
    """
    read = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"], "resourceNames": sorted(secrets)}
    return _granted(namespace, CREDENTIALS, [read] if secrets else [])


def _granted(namespace: str, name: str, rules: list[Object]) -> tuple[Object, Object]:
    rbac = "rbac.authorization.k8s.io"
    role = _object(f"{rbac}/v1", "Role", namespace, name, rules=rules)
    binding = _object(
        f"{rbac}/v1",
        "RoleBinding",
        namespace,
        name,
        roleRef={"apiGroup": rbac, "kind": "Role", "name": name},
        subjects=[{"kind": "ServiceAccount", "name": BROKER, "namespace": namespace}],
    )
    return role, binding


def broker_service(namespace: str) -> Object:
    """Headless: one broker needs no virtual address, and a name that resolves to its pod costs no proxy."""
    ports = [
        {"name": name, "port": port, "targetPort": name, "protocol": "TCP"} for name, port in _PORTS.items()
    ]
    spec = {"clusterIP": "None", "selector": {COMPONENT: "broker"}, "ports": ports}
    return _object("v1", "Service", namespace, spec=spec)


def broker_disruption_budget(namespace: str) -> Object:
    """One at a time and never in the way of a drain."""
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": {COMPONENT: "broker"}},
    }
    return _object("policy/v1", "PodDisruptionBudget", namespace, spec=spec)


def broker_secret(namespace: str, name: str, data: dict[str, str]) -> Object:
    """A secret; ``data`` in base64. The one with the signing key nobody can change, only replace."""
    # Nodes do not look again at one that is immutable: pods would keep a client token that was replaced.
    immutable = {"immutable": True} if name == BROKER else {}
    return {**_object("v1", "Secret", namespace, name), "type": "Opaque", **immutable, "data": data}


def broker_deployment(namespace: str, config: Config, signing_key_uid: str) -> Object:
    """The broker itself.

    Args:
        signing_key_uid: uid of the Secret with its key.
    """
    spec = {
        "replicas": 1,
        "revisionHistoryLimit": 2,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": {COMPONENT: "broker"}},
        "template": {
            "metadata": {"labels": labels("broker"), "annotations": {SIGNING_KEY_UID: signing_key_uid}},
            "spec": {
                "serviceAccountName": BROKER,
                "automountServiceAccountToken": True,
                "enableServiceLinks": False,
                "terminationGracePeriodSeconds": 30,
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": NOBODY,
                    "runAsGroup": NOBODY,
                    "fsGroup": NOBODY,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [_container(config)],
                "volumes": [
                    {"name": "key", "secret": {"secretName": BROKER, "defaultMode": _READ_BY_GROUP}},
                    {
                        "name": "client",
                        "secret": {"secretName": CLIENT_SECRET, "defaultMode": _READ_BY_GROUP},
                    },
                    {"name": "tmp", "emptyDir": {}},
                ],
            },
        },
    }
    return _object("apps/v1", "Deployment", namespace, spec=spec)


def _container(config: Config) -> Object:
    values = {
        "AGENTFLY_LISTEN": f"0.0.0.0:{BROKER_PORT}",
        "AGENTFLY_GATEWAY_LISTEN": f"0.0.0.0:{GATEWAY_PORT}",
        "AGENTFLY_SIGNING_KEY_FILE": f"{_KEY_FOLDER}/signing-key",
        "AGENTFLY_CLIENT_TOKEN_FILE": f"{_CLIENT_FOLDER}/client-token",
        "AGENTFLY_SANDBOXD_IMAGE": config.sandboxd_image,
        "AGENTFLY_LOG_FORMAT": "json",
        "AGENTFLY_IN_PROCESS_MODULES": config.in_process_modules,
    }
    namespace = {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}
    return {
        "name": "broker",
        "image": config.image,
        "imagePullPolicy": config.pull_policy,
        "command": ["agentfly", "broker"],
        "env": [
            *({"name": name, "value": value} for name, value in values.items() if value),
            {"name": "AGENTFLY_NAMESPACE", "valueFrom": namespace},
        ],
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in _PORTS.items()],
        # Live while its loop answers, ready when it knows its members again: a slow recovery is no death.
        "livenessProbe": _probe("/healthz", period=10, failures=6),
        "readinessProbe": _probe("/healthz?ready", period=2, failures=3),
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "key", "mountPath": _KEY_FOLDER, "readOnly": True},
            {"name": "client", "mountPath": _CLIENT_FOLDER, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }


def _probe(path: str, *, period: int, failures: int) -> Object:
    request = {"path": path, "port": "http", "scheme": "HTTP"}
    return {"httpGet": request, "periodSeconds": period, "timeoutSeconds": 5, "failureThreshold": failures}


def _object(api_version: str, kind: str, namespace: str, name: str = BROKER, **content: Any) -> Object:
    metadata = {"name": name, "namespace": namespace, "labels": labels("broker")}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **content}
