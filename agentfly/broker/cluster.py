"""The broker of a namespace: its pools from the API server, its members as pods, its engine over TCP.

Guarantees:
1. Nobody gets a member before it is known which there are, and who holds each: the API server is waited for,
   and every member's daemon asked.
2. Asked to end, it does so within ``END_S``, and members and leases stay as they are for the next broker.
3. It reads ResourcePools, the pods of members, and the Secrets that pools name; it writes pods of members. A
   grant, a release, a heartbeat and a reset ask the API server nothing.
4. A Secret's value is kept by the gateway that uses it, and said to nobody.
"""

import asyncio
import base64
import binascii
import logging
import os
import signal
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from agentfly.broker.access import TokenFile
from agentfly.broker.config import BrokerConfig
from agentfly.broker.garbage import rarely_collected
from agentfly.broker.records import Records
from agentfly.broker.served import AGAIN_S, ServedPools
from agentfly.broker.server import Front, listen_tcp, make_app, serving
from agentfly.kube import (
    PODS,
    RESOURCE_POOLS,
    SECRETS,
    Informer,
    Kube,
    KubeError,
    NotFound,
    Unreachable,
    project_pod,
)
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.errors import Infra, ResourceError
from agentfly.resources.runners.base import Finder, Found, Runner
from agentfly.resources.runners.door import SharedDoor
from agentfly.resources.runners.external.api import ExternalAPIRunner
from agentfly.resources.runners.instance.runner import InProcessRunner
from agentfly.resources.runners.kubernetes import (
    MEMBER_LABELS,
    KubernetesRunner,
    ModelServicePodRunner,
    PodCluster,
    Signer,
)

logger = logging.getLogger(__name__)

USER_AGENT = "agentfly-broker/0.1"
SYNC_S = 30.0  # between two lines in the log about an API server that does not answer
END_S = 8.0  # a pod has 30 s, and whoever waits wants the next broker


async def run(config: BrokerConfig) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        AgentflyError: what it needs is missing.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(serve(config), name="agentfly broker")
    asked = False

    def end() -> None:
        nonlocal asked
        if not asked:
            asked = True
            logger.info("asked to end")
            # What takes longer is cut off: a broker that is killed leaves nothing that the next one misses.
            loop.call_later(END_S, os._exit, 0)
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    try:
        await task
    except asyncio.CancelledError:
        if not asked:
            raise


async def serve(config: BrokerConfig, *, ready: asyncio.Event | None = None) -> None:
    """Serve until cancelled. ``ready`` is set while acquires are answered."""
    ready = ready or asyncio.Event()
    token = TokenFile(config.client_token_file)
    signer = Signer(config.signing_key())
    async with AsyncExitStack() as stack:
        settled = stack.enter_context(rarely_collected())
        kube = await stack.enter_async_context(
            Kube.connect(USER_AGENT, kubeconfig=config.kubeconfig, context=config.context)
        )
        namespace = config.namespace or kube.namespace
        pods = await stack.enter_async_context(
            Informer(kube, PODS, namespace, MEMBER_LABELS, project=project_pod)
        )
        objects = await stack.enter_async_context(Informer(kube, RESOURCE_POOLS, namespace))

        door = SharedDoor(config.gateway(namespace))
        await stack.enter_async_context(serving(door.app, listen_tcp(*config.gateway_listen)))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agentfly-")))
        instances = InProcessRunner(scratch / "i", door=door, contained=True)
        stack.callback(instances.close)
        secrets = SecretReader(kube, namespace)
        cluster = PodCluster(
            kube,
            pods,
            namespace,
            owner=lambda name: pools.owner(name),  # noqa: PLW0108 -- made below
            per_node=lambda name: pools.per_node(name),  # noqa: PLW0108
        )
        sandboxes = KubernetesRunner(cluster, signer, sandboxd_image=config.sandboxd_image)
        stack.push_async_callback(sandboxes.close)
        models = ModelServicePodRunner(cluster)
        stack.push_async_callback(models.close)
        runners: list[Runner] = [sandboxes, models, instances, ExternalAPIRunner(door, secrets.read)]

        engine = ResourceEngine(runners)
        stack.push_async_callback(engine.detach)
        pools = ServedPools(engine, lambda: find_members(runners), config.modules)
        stack.push_async_callback(pools.close)
        front = Front(token.admits, ready, pools.problems, Records(config.signing_key()))
        stack.callback(ready.clear)
        await stack.enter_async_context(serving(make_app(engine, front), listen_tcp(*config.listen)))
        logger.info("namespace %s: serving at %s:%d", namespace, *config.listen)

        await all_synced(pods, objects)
        while True:
            try:
                await pools.begin(lambda: list(objects.items.values()))
                break
            except Infra as error:
                logger.warning("%s; it is tried again", error)
                await asyncio.sleep(AGAIN_S)
        stack.callback(objects.subscribe(pools.changed))
        settled()
        ready.set()
        logger.info("namespace %s: ready with %d pools", namespace, len(objects.items))
        await asyncio.Event().wait()


async def all_synced(*informers: Informer) -> None:
    """Wait for the API server to have told all, however long it takes."""
    for informer in informers:
        while True:
            try:
                await informer.synced(SYNC_S)
                break
            except Unreachable as error:
                logger.warning("%s; it is waited for", error)


async def find_members(runners: Sequence[Runner]) -> list[Found]:
    """The members that earlier brokers left, each once.

    Raises:
        Infra: it cannot be known which there are.
    """
    return [each for runner in runners if isinstance(runner, Finder) for each in await runner.find()]


class SecretReader:
    """Reads values out of Secrets of a namespace, by the API server."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self._kube = kube
        self._namespace = namespace

    async def read(self, reference: str) -> str:
        """The value under ``NAME/KEY``.

        Raises:
            AgentflyError: there is none; the message says nothing of any value.
        """
        name, _, key = reference.partition("/")
        try:
            secret = await self._kube.get(SECRETS, name, self._namespace)
        except NotFound:
            raise ResourceError(f"Secret {name}: does not exist in namespace {self._namespace}") from None
        except KubeError as error:
            raise ResourceError(f"Secret {name}: cannot be read: {error.reason or 'no answer'}") from None
        try:
            return base64.b64decode(secret.get("data", {})[key], validate=True).decode()
        except KeyError:
            raise ResourceError(f"Secret {name}: has no key {key}") from None
        except (binascii.Error, UnicodeDecodeError):
            raise ResourceError(f"Secret {name}: key {key} is not text") from None
