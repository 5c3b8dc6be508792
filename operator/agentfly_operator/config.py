"""What the operator is told by its environment.

Guarantees:
1. A value that cannot be used is refused at the start, with the variable, the value and a remedy.
"""

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from agentfly.errors import AgentflyError

TRAINER_IMAGE = "agentfly/trainer:dev"
INFERENCE_IMAGE = "agentfly/inference:dev"
COLOCATED_IMAGE = "agentfly/colocated:dev"
_PULL = ("Always", "IfNotPresent", "Never")


class ConfigError(AgentflyError):
    """A variable or flag of the operator."""


@dataclass(frozen=True, slots=True)
class Config:
    """What the objects of brokers, runs and jobs are rendered with, and who the operator is.

    Attributes:
        trainer_image: of trainer pods whose run names none.
        inference_image: of model servers and workers whose run or job names none.
        colocated_image: of trainer pods that serve the policy too and whose run names none.
        dns_cidrs: resolvers that are not pods of kube-system, for members with a network.
        in_process_modules: modules that InProcess pools may load in the broker; comma separated.
        broker_url: one broker for all namespaces instead of the Service of each; "" is the rule.
    """

    image: str
    sandboxd_image: str
    pull_policy: str
    namespace: str
    identity: str
    dns_cidrs: tuple[str, ...] = ()
    in_process_modules: str = ""
    broker_url: str = ""
    trainer_image: str = TRAINER_IMAGE
    inference_image: str = INFERENCE_IMAGE
    colocated_image: str = COLOCATED_IMAGE

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Config":
        """Read the variables; an empty one is as good as none.

        Raises:
            ConfigError: a value is of no use.
        """
        pull = environment.get("AGENTFLY_IMAGE_PULL_POLICY") or "IfNotPresent"
        if pull not in _PULL:
            raise ConfigError(
                f"AGENTFLY_IMAGE_PULL_POLICY: {pull!r} is no pull policy", hints=[f"set {' or '.join(_PULL)}"]
            )
        return cls(
            image=environment.get("AGENTFLY_IMAGE") or "agentfly/agentfly:dev",
            sandboxd_image=environment.get("AGENTFLY_SANDBOXD_IMAGE") or "agentfly/sandboxd:dev",
            pull_policy=pull,
            namespace=environment.get("POD_NAMESPACE") or "agentfly-system",
            identity=environment.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}",
            dns_cidrs=_cidrs(environment, "AGENTFLY_DNS_CIDRS"),
            in_process_modules=environment.get("AGENTFLY_IN_PROCESS_MODULES", ""),
            broker_url=environment.get("AGENTFLY_BROKER_URL", "").rstrip("/"),
            trainer_image=environment.get("AGENTFLY_TRAINER_IMAGE") or TRAINER_IMAGE,
            inference_image=environment.get("AGENTFLY_INFERENCE_IMAGE") or INFERENCE_IMAGE,
            colocated_image=environment.get("AGENTFLY_COLOCATED_IMAGE") or COLOCATED_IMAGE,
        )

    def broker_of(self, namespace: str) -> str:
        """Where the broker of a namespace listens."""
        return self.broker_url or f"http://agentfly-broker.{namespace}.svc:7080"


def _cidrs(environment: Mapping[str, str], name: str) -> tuple[str, ...]:
    found = [part.strip() for part in environment.get(name, "").split(",") if part.strip()]
    for each in found:
        try:
            ipaddress.ip_network(each)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}", hints=["write it as in 10.96.0.10/32"]) from None
    return tuple(found)
