"""How members that are pods run in a cluster: security, network, placement, and Secrets by reference.

Guarantees:
1. Nothing here is read on one machine; each field says so of itself or of its block.
2. What the models accept, the API server accepts in the objects that are made of it.
3. A Secret is named, never copied: no value of one stands in an object of ours.
"""

import ipaddress
import json
import re
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from agentfly.api.base import ApiModel, Int, Rule

_DOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
OBJECT_PATTERN = f"^{_DOMAIN}$"
LABEL_KEY_PATTERN = f"^({_DOMAIN}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?$"
LABEL_PATTERN = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
SECRET_KEY_PATTERN = r"^[-._a-zA-Z0-9]+$"
CIDR_PATTERN = r"^[0-9a-f.:]+/(0|[1-9][0-9]{0,2})$"
VARIABLE_PATTERN = "^[A-Za-z_][A-Za-z0-9_]*$"
OWN_VARIABLE_PATTERN = "^(AGENTFLY_|RAY_|MASTER_|POD_NAME$|POD_IP$)"
"""Variables by which the processes of a run find each other."""
BROKER_SECRETS = ["agentfly-broker", "agentfly-broker-client"]
"""With one of them its holder is the broker, or any of its clients."""
OWN_PATTERN = "^(agentfly[.]dev/|app[.]kubernetes[.]io/managed-by$)"
"""Keys of labels and annotations that the broker writes itself."""

NOT_PUBLIC = (
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "224.0.0.0/4",
    "240.0.0.0/4",
    "::/127",
    "fc00::/7",
    "fe80::/10",
    "ff00::/8",
)
"""What no member reaches unless security.egress names it, or a part of it: the cluster, the node, the
networks around it, the metadata services of clouds. All other addresses are the public internet."""

ObjectName = Annotated[str, Field(max_length=253, pattern=OBJECT_PATTERN)]
"""Name of an object of another kind."""
LabelValue = Annotated[str, Field(max_length=63, pattern=LABEL_PATTERN)]
LabelKey = Annotated[str, Field(max_length=317, pattern=LABEL_KEY_PATTERN)]
Port = Annotated[int, Field(ge=1, le=65535)]


class SecretKey(ApiModel):
    """One key of a Secret in the namespace of the object."""

    name: ObjectName = Field(description="Name of the Secret.")
    key: str = Field(max_length=253, pattern=SECRET_KEY_PATTERN, description="Key in its data.")


class SecretSource(ApiModel):
    """Where a value is that nobody may read in a manifest."""

    secret_key_ref: SecretKey = Field(description="Key of a Secret, as {name: hub, key: token}.")


def _one_each(variables: "tuple[EnvVar, ...]") -> "tuple[EnvVar, ...]":
    names = [each.name for each in variables]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise PydanticCustomError("duplicate_items", "has {items} twice", {"items": ", ".join(twice)})
    return variables


class EnvVar(ApiModel):
    """An environment variable of core/v1: exactly one of value and valueFrom."""

    name: str = Field(max_length=256, pattern=VARIABLE_PATTERN, description="Its name, such as HF_TOKEN.")
    value: str | None = Field(
        default=None, max_length=4096, description="Its value as text. Absent: valueFrom has it."
    )
    value_from: SecretSource | None = Field(
        default=None,
        description="Key of a Secret, as {secretKeyRef: {name: hub, key: token}}. Absent: value is it.",
    )
    rules: ClassVar = (
        Rule(
            cel="has(self.value) != has(self.valueFrom)",
            holds=lambda self: (self.value is None) != (self.value_from is None),
            problem="exactly one of value and valueFrom must be set",
            hint="keep value: TEXT, or valueFrom: {secretKeyRef: {name: hub, key: token}}",
        ),
        Rule(
            cel=f"!self.name.matches('{OWN_VARIABLE_PATTERN}')",
            holds=lambda self: re.match(OWN_VARIABLE_PATTERN, self.name) is None,
            field="name",
            problem="is of a variable that agentfly sets itself",
            hint="remove it: no AGENTFLY_, RAY_, MASTER_, POD_NAME or POD_IP",
        ),
        Rule(
            cel="!has(self.valueFrom) "
            f"|| !(self.valueFrom.secretKeyRef.name in {json.dumps(BROKER_SECRETS)})",
            holds=lambda self: (
                self.value_from is None or self.value_from.secret_key_ref.name not in BROKER_SECRETS
            ),
            field="valueFrom",
            problem="names a Secret that is the broker's own",
            hint="make another Secret for what the pods need",
        ),
    )

    @property
    def secret(self) -> str | None:
        """Name of the Secret that it comes from."""
        return None if self.value_from is None else self.value_from.secret_key_ref.name


EnvVars = Annotated[
    tuple[EnvVar, ...],
    Field(
        strict=False,
        max_length=64,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    ),
    AfterValidator(_one_each),
]


def is_range(text: str) -> bool:
    """Whether a text is a range of addresses as Kubernetes writes it: 10.0.0.0/8, 2001:db8::/32."""
    try:
        network = ipaddress.ip_network(text)
    except ValueError:
        return False
    mapped = isinstance(network, ipaddress.IPv6Network) and network.network_address.ipv4_mapped is not None
    return str(network) == text and not mapped


def left_out(cidr: str) -> tuple[str, ...]:
    """What is not public in a wider range, and therefore not meant by it: of 0.0.0.0/0 all private ranges."""
    whole = ipaddress.ip_network(cidr)
    parts = {each: ipaddress.ip_network(each) for each in NOT_PUBLIC}
    return tuple(
        each
        for each, part in parts.items()
        if part.version == whole.version
        and part.prefixlen > whole.prefixlen
        and part.network_address in whole
    )


class Egress(ApiModel):
    """Addresses that commands may reach."""

    cidr: str = Field(
        max_length=43,
        pattern=CIDR_PATTERN,
        description="Range of addresses, such as 10.20.0.0/16. What is private in a wider one, such as "
        "0.0.0.0/0, is not meant by it: name it too.",
    )
    ports: tuple[Port, ...] | None = Field(
        default=None,
        strict=False,
        min_length=1,
        max_length=32,
        description="Ports, for TCP and UDP. Absent: all ports of all protocols.",
    )
    rules: ClassVar = (
        Rule(
            cel="isCIDR(self.cidr) && string(cidr(self.cidr).masked()) == self.cidr",
            holds=lambda self: is_range(self.cidr),
            field="cidr",
            problem="is no range of addresses in its shortest form",
            hint="write the first address of the range and its length, as in 10.20.0.0/16 or 10.20.1.7/32",
        ),
    )


PUBLIC = (Egress(cidr="0.0.0.0/0"), Egress(cidr="::/0"))
"""What `security.egress` means when it is absent: the public internet."""


class Security(ApiModel):
    """What a member may do in the cluster. One machine does not read this block.

    No member has a service account's token; none is reached by anybody but workers and the broker.
    """

    pod_security: Literal["Restricted", "Baseline", "Privileged"] = Field(
        default="Baseline",
        description="Pod Security Standard that members keep to. Baseline is enough to reset by overlay, "
        "Restricted for declared paths; Privileged gives each holder a process namespace of its own. "
        "Default Baseline.",
    )
    user_namespace: bool = Field(
        default=False,
        description="Whether root of a member is nobody on its node (hostUsers: false), which nodes with "
        "containerd 2 and a current kernel can do. Default false.",
    )
    runtime_class_name: ObjectName | None = Field(
        default=None, description="RuntimeClass of members, such as gvisor. Absent: that of the cluster."
    )
    egress: tuple[Egress, ...] = Field(
        default=(),
        strict=False,
        max_length=32,
        description="What members with a network reach, each as {cidr: 10.20.0.0/16, ports: [443]}, and "
        "nothing else. Absent: the public internet, 0.0.0.0/0 and ::/0, but no private, link-local or "
        "cluster address.",
    )
    dns: bool = Field(
        default=True,
        description="Whether members with a network may ask the cluster's DNS. Default true.",
    )


class Toleration(ApiModel):
    """A toleration of core/v1."""

    key: LabelKey | None = Field(default=None, description="Key of the taint. Absent: all keys.")
    operator: Literal["Exists", "Equal"] | None = Field(
        default=None, description="Exists: any value. Absent: Equal."
    )
    value: LabelValue | None = Field(default=None, description="Value of the taint. Absent: empty.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Effect of the taint. Absent: all effects."
    )
    toleration_seconds: Int | None = Field(
        default=None, ge=0, description="Seconds until a pod leaves a tainted node. Absent: it stays."
    )
    rules: ClassVar = (
        Rule(
            cel="has(self.key) || (has(self.operator) && self.operator == 'Exists')",
            holds=lambda self: self.key is not None or self.operator == "Exists",
            field="operator",
            problem="must be Exists when there is no key",
            hint="add key, or operator: Exists",
        ),
        Rule(
            cel="!has(self.value) || !has(self.operator) || self.operator != 'Exists'",
            holds=lambda self: self.value is None or self.operator != "Exists",
            field="value",
            problem="is not compared when operator is Exists",
            hint="remove value, or set operator: Equal",
        ),
        Rule(
            cel="!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            holds=lambda self: self.toleration_seconds is None or self.effect == "NoExecute",
            field="tolerationSeconds",
            problem="is for the effect NoExecute",
            hint="set effect: NoExecute",
        ),
    )


def _keys(field: str, attribute: str) -> Rule:
    return Rule(
        cel=f"self.{field}.all(key, key.matches('{LABEL_KEY_PATTERN}'))",
        holds=lambda self: all(
            re.fullmatch(LABEL_KEY_PATTERN[1:-1], key) for key in getattr(self, attribute)
        ),
        field=field,
        problem="has a key that is none of Kubernetes",
        hint="write keys as in example.com/team",
    )


def _not_own(field: str, attribute: str) -> Rule:
    return Rule(
        cel=f"self.{field}.all(key, !key.matches('{OWN_PATTERN}'))",
        holds=lambda self: not any(re.match(OWN_PATTERN, key) for key in getattr(self, attribute)),
        field=field,
        problem="has a key that agentfly writes itself",
        hint="take keys of your own domain, not agentfly.dev/ or app.kubernetes.io/managed-by",
    )


class Placement(ApiModel):
    """Where members run in the cluster. One machine does not read this block."""

    node_selector: dict[str, LabelValue] = Field(
        default={}, max_length=32, description="Labels that a node must have. Absent: none."
    )
    tolerations: tuple[Toleration, ...] = Field(
        default=(),
        strict=False,
        max_length=32,
        description="Taints of nodes that keep no member away, each as {key: gpu, operator: Exists}. "
        "Absent: none.",
    )
    priority_class_name: ObjectName | None = Field(
        default=None, description="PriorityClass of members. Absent: that of the cluster."
    )
    scheduler_name: ObjectName | None = Field(
        default=None, description="Scheduler of members. Absent: that of the cluster."
    )
    pod_labels: dict[str, LabelValue] = Field(
        default={}, max_length=32, description="Further labels of members. Absent: none."
    )
    pod_annotations: dict[str, Annotated[str, Field(max_length=4096)]] = Field(
        default={}, max_length=32, description="Further annotations of members. Absent: none."
    )
    rules: ClassVar = (
        _keys("nodeSelector", "node_selector"),
        _keys("podLabels", "pod_labels"),
        _keys("podAnnotations", "pod_annotations"),
        _not_own("podLabels", "pod_labels"),
        _not_own("podAnnotations", "pod_annotations"),
    )
