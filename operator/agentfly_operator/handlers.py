"""What kopf is used for: to hear of objects of our kinds. Nothing else is here.

Guarantees:
1. Hearing writes nothing: no finalizer, no annotation, no status, no event of kopf's on anybody's object.
2. What kopf misses costs time and no correctness: each object has a loop that looks by itself.
3. kopf runs in a thread with a loop of its own, and ends with whoever listens.
"""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Collection
from typing import Any, cast

import aiohttp
import kopf

from agentfly.kube.access import Login
from agentfly_operator import USER_AGENT

Heard = Callable[[str, str, str], None]  # kind, namespace and name

KINDS = {"resourcepools": "ResourcePool", "trainingruns": "TrainingRun", "rolloutjobs": "RolloutJob"}

_SERVER_S = 300  # after which the server ends a watch, so that a dead one is noticed
_CLIENT_S = 330
_EXIT_S = 10.0


def registry(heard: Heard, login: Login) -> kopf.OperatorRegistry:
    """The handlers of one operator."""
    made = kopf.OperatorRegistry()

    @kopf.on.login(registry=made)
    async def log_in(**_: Any) -> kopf.AiohttpSession:
        access = await asyncio.to_thread(login.read)
        headers = {"User-Agent": USER_AGENT}
        if access.authorization:
            headers["Authorization"] = access.authorization
        connector = aiohttp.TCPConnector(limit=0, ssl=access.tls if access.tls is not None else True)
        session = aiohttp.ClientSession(connector=connector, headers=headers, proxy=access.proxy)
        return kopf.AiohttpSession(
            aiohttp_session=session, server=access.server, default_namespace=access.namespace
        )

    for plural, kind in KINDS.items():

        @kopf.on.event("agentfly.dev", "v1alpha1", plural, registry=made, param=kind)
        async def changed(namespace: str | None, name: str | None, param: Any = None, **_: Any) -> None:
            heard(param, namespace or "", name or "")

    return made


def settings() -> kopf.OperatorSettings:
    """kopf as a listener."""
    made = kopf.OperatorSettings()
    made.peering.standalone = True  # the leader is found by a Lease
    made.posting.enabled = False
    made.scanning.disabled = True  # namespaces and CRDs are not ours to list
    made.watching.server_timeout = _SERVER_S
    made.watching.client_timeout = _CLIENT_S
    made.networking.request_timeout = 30
    made.queueing.idle_timeout = 1
    made.persistence.finalizer = "agentfly.dev/finalizer"
    made.execution.max_workers = 1
    return made


async def listen(heard: Heard, login: Login, namespaces: Collection[str], ready: threading.Event) -> None:
    """Hear of objects until cancelled; returns only if kopf gives up.

    Args:
        namespaces: empty is all of them.
        ready: set when everything was listed once.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    stop: concurrent.futures.Future[None] = concurrent.futures.Future()

    def tell(kind: str, namespace: str, name: str) -> None:
        loop.call_soon_threadsafe(heard, kind, namespace, name)

    def settle(error: BaseException | None) -> None:
        if not ended.done():
            ended.set_result(None) if error is None else ended.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            asyncio.run(
                kopf.operator(
                    registry=registry(tell, login),
                    settings=settings(),
                    standalone=True,
                    # kopf's own asks who the user is: a container's need not have a name.
                    identity=cast(Any, "agentfly"),
                    clusterwide=not namespaces,
                    namespaces=tuple(namespaces),
                    ready_flag=ready,
                    stop_flag=stop,
                )
            )
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # nobody waits any more: the loop is closed
            loop.call_soon_threadsafe(settle, error)

    # A loop of its own: kopf takes signals and ends tasks of whatever loop it runs in.
    threading.Thread(target=run, name="kopf", daemon=True).start()
    try:
        await asyncio.shield(ended)
    finally:
        if not stop.done():
            stop.set_result(None)
        await asyncio.wait({ended}, timeout=_EXIT_S)
