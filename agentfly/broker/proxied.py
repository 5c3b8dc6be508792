"""The broker of a namespace, asked from outside the cluster: by a port of its pod, through the API server.

Guarantees:
1. It needs what a person with the role ``edit`` of the namespace has: to read the Secret of the broker's
   clients, to list pods, and to forward their ports. What is missing of that, or of a broker, is an error
   that says what to do.
2. Nothing is changed, and no token is shown.
3. NetworkPolicies are not in the way: where an API server connects from, few clusters say.
"""

import base64
import binascii
import json
from pathlib import Path
from typing import Any

from agentfly.broker import wire
from agentfly.broker.access import HEADER
from agentfly.broker.config import SERVICE
from agentfly.errors import AgentflyError
from agentfly.kube import PODS, SECRETS, Kube, KubeError, NotFound, get_from_pod
from agentfly.resources.lease import LeaseStatus, PoolStatus

USER_AGENT = "agentfly-cli/0.1"
SECRET, KEY = f"{SERVICE}-client", "client-token"
BROKER_LABEL = "agentfly.dev/component=broker"
PORT = 7080
ANSWER_S = 10.0


class ProxiedBroker:
    """What the broker of a namespace says. Arguments are those of ``kubectl``; None is its default."""

    def __init__(
        self,
        namespace: str | None = None,
        *,
        kubeconfig: Path | None = None,
        context: str | None = None,
    ) -> None:
        self._kube = Kube.connect(USER_AGENT, kubeconfig=kubeconfig, context=context)
        self._namespace = namespace

    async def pools(self) -> dict[str, PoolStatus]:
        """The counts of each pool, by name.

        Raises:
            AgentflyError: there is no broker, or it may not be asked.
        """
        found = await self._get(wire.POOLS)
        return {name: PoolStatus.model_validate(status) for name, status in found.items()}

    async def leases(self) -> list[LeaseStatus]:
        """What is held. Raises as ``pools`` does."""
        return [LeaseStatus.model_validate(lease) for lease in await self._get(wire.LEASES)]

    async def _get(self, path: str) -> Any:
        async with self._kube as kube:
            namespace = self._namespace or kube.namespace
            token = await _token(kube, namespace)
            try:
                pod = await _pod(kube, namespace)
                status, body = await get_from_pod(kube, namespace, pod, PORT, path, {HEADER: token}, ANSWER_S)
            except KubeError as error:
                raise _unanswered(namespace, error) from error
            if status != 200:
                raise _does_not_answer(namespace, f"{status} {body[:200].decode(errors='replace')}")
            return json.loads(body)


async def _token(kube: Kube, namespace: str) -> str:
    try:
        secret = await kube.get(SECRETS, SECRET, namespace)
    except NotFound:
        raise _no_broker(namespace) from None
    except KubeError as error:
        if error.status != 403:
            raise
        hint = f"grant your user get on the Secret {SECRET}, list on pods, get and create on pods/portforward"
        raise AgentflyError(
            f"namespace {namespace}: its broker may not be asked: {error.message}", hints=[hint]
        ) from None
    try:
        return base64.b64decode(secret["data"][KEY], validate=True).decode()
    except (KeyError, binascii.Error, UnicodeDecodeError):
        raise AgentflyError(
            f"namespace {namespace}: Secret {SECRET} has no {KEY}",
            hints=[
                f"delete it, and the operator makes a new one: kubectl -n {namespace} delete secret {SECRET}"
            ],
        ) from None


async def _pod(kube: Kube, namespace: str) -> str:
    found = await kube.list(PODS, namespace, labels=BROKER_LABEL, fields="status.phase=Running")
    names = [
        each["metadata"]["name"]
        for each in sorted(found, key=lambda each: str(each["metadata"]["creationTimestamp"]))
        if "deletionTimestamp" not in each["metadata"]
    ]
    if not names:
        raise _does_not_answer(namespace, "no pod of it runs")
    return str(names[-1])


def _no_broker(namespace: str) -> AgentflyError:
    return AgentflyError(
        f"namespace {namespace}: has no broker",
        hints=[
            "one comes with the first ResourcePool where the operator runs: kubectl get rpool -A",
            "name another namespace: -n NAMESPACE",
        ],
    )


def _unanswered(namespace: str, error: KubeError) -> AgentflyError:
    if error.status == 403:
        hint = f"grant your user list on pods, get and create on pods/portforward in namespace {namespace}"
        return AgentflyError(f"namespace {namespace}: {error.message}", hints=[hint])
    return _does_not_answer(namespace, error.message)


def _does_not_answer(namespace: str, why: str) -> AgentflyError:
    look = f"kubectl -n {namespace} get pods -l {BROKER_LABEL}"
    return AgentflyError(f"namespace {namespace}: its broker does not answer: {why}", hints=[look])
