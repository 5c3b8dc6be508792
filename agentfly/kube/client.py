"""A small client of the Kubernetes API: plain dicts over kept-alive connections.

Guarantees:
1. Every request ends within its deadline, retries included.
2. An answer of 429, 500, 502, 503 or 504, and a connection that broke, are tried again, after the server's
   ``Retry-After`` where it gave one; a request that must not be carried out twice only if it was not at all.
3. At most ``WRITES`` writes are on their way at a time. Watches have connections of their own, and never keep
   a write waiting.
4. A rotated token is read again: before it is old where a pod mounts it, and whenever it is refused.

Not here: keeping a picture of what exists (``informer``), and what to do about a conflict.
"""

import asyncio
import contextlib
import itertools
import json
import random
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp

from agentfly.kube.access import Access, Login, find_login
from agentfly.kube.answers import Obj, events, parsed
from agentfly.kube.connections import connector
from agentfly.kube.errors import Gone, KubeError, NotFound, Unreachable, refused
from agentfly.kube.resources import Resource

MANAGER = "agentfly"
"""The field manager of everything that is applied."""
DEADLINE_S = 30.0
ATTEMPT_S = 15.0
"""One try: a connection over which nothing comes must not use up the deadline of the request."""
WRITES = 32
PAGE = 500
RETRIED = frozenset({429, 500, 502, 503, 504})
_PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.0)
_BROKEN = (aiohttp.ClientError, ConnectionError, TimeoutError)

Propagation = Literal["Foreground", "Background", "Orphan"]


class Kube:
    """The API server, as one identity. Use it as ``async with Kube.connect("name/version") as kube``.

    Args:
        user_agent: by which the server's audit log and metrics tell us from others.
        login: where the server is and who we are.
    """

    def __init__(self, user_agent: str, login: Login) -> None:
        self._user_agent = user_agent
        self._login = login
        self._access: Access | None = None
        self._read_at = 0.0
        self._reading = asyncio.Lock()
        self._writes = asyncio.Semaphore(WRITES)
        self._calls: aiohttp.ClientSession | None = None
        self._watches: aiohttp.ClientSession | None = None

    @classmethod
    def connect(
        cls, user_agent: str, *, kubeconfig: str | Path | None = None, context: str | None = None
    ) -> Self:
        """A client of the kubeconfig that is named, else of ``KUBECONFIG``, of the pod, or of ~/.kube/config.

        Nothing is read and no connection opened before it is entered.
        """
        return cls(user_agent, find_login(kubeconfig, context))

    async def __aenter__(self) -> Self:
        await self._renew(None)
        self._calls, self._watches = self._session(2 * WRITES), self._session(0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sessions, self._calls, self._watches = (self._calls, self._watches), None, None
        for session in sessions:
            if session is not None:
                await session.close()

    @property
    def namespace(self) -> str:
        """That of the pod, or of the kubeconfig's context."""
        return self._known().namespace

    @property
    def server(self) -> str:
        """The address of the API server."""
        return self._known().server

    async def get(
        self, resource: Resource, name: str, namespace: str | None = None, *, subresource: str = ""
    ) -> Obj:
        """One object.

        Args:
            namespace: None is the client's own.

        Raises:
            NotFound, KubeError.
        """
        return await self.request("GET", self._path(resource, namespace, name, subresource))

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: str | None = None,
        fields: str | None = None,
    ) -> list[Obj]:
        """All objects of a kind, read in pages.

        Args:
            namespace: None is all namespaces.
            labels: a selector, as ``kubectl -l`` takes it; ``fields`` likewise.

        Raises:
            KubeError.
        """
        for last in (False, False, True):
            found: list[Obj] = []
            try:
                async for page in self.pages(resource, namespace, labels=labels, fields=fields):
                    found += page["items"]
                return found
            except Gone:  # the pages that are left are of a state that the server has forgotten
                if last:
                    raise
        raise AssertionError("unreachable")

    async def pages(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: str | None = None,
        fields: str | None = None,
    ) -> AsyncIterator[Obj]:
        """The list's bodies, ``PAGE`` objects each. Arguments are those of ``list``.

        Raises:
            Gone: the rest is too old; begin anew.
            KubeError.
        """
        params = {"limit": str(PAGE)} | _selectors(labels, fields)
        while True:
            page = await self.request("GET", resource.path(namespace), params=params)
            yield page
            token = page["metadata"].get("continue")
            if not token:
                return
            params["continue"] = token

    async def create(
        self, resource: Resource, obj: Obj, namespace: str | None = None, *, dry_run: bool = False
    ) -> Obj:
        """Create an object; the answer is as the server keeps it.

        An object with a name is tried again after a broken connection. If the first try was carried out
        though, that is a ``Conflict`` with an object that is ours: who creates tells by something of its own.

        Args:
            namespace: None is that of the object, else the client's own.

        Raises:
            Conflict: there is one of this name.
            KubeError.
        """
        path = self._path(resource, namespace or obj["metadata"].get("namespace"))
        params = {"fieldManager": MANAGER} | ({"dryRun": "All"} if dry_run else {})
        return await self.request("POST", path, params=params, body=obj, repeat="name" in obj["metadata"])

    async def apply(
        self,
        resource: Resource,
        obj: Obj,
        namespace: str | None = None,
        *,
        force: bool = True,
        subresource: str = "",
        dry_run: bool = False,
    ) -> Obj:
        """Server-side apply: create the object, or make the fields that are named what they are here.

        Args:
            force: take fields from other managers; else they are a ``Conflict``.

        Raises:
            Conflict, KubeError.
        """
        meta = obj["metadata"]
        path = self._path(resource, namespace or meta.get("namespace"), meta["name"], subresource)
        params = {"fieldManager": MANAGER, "force": str(force).lower()}
        return await self.request(
            "PATCH",
            path,
            params=params | ({"dryRun": "All"} if dry_run else {}),
            body=obj,
            content_type="application/apply-patch+yaml",
        )

    async def replace(self, resource: Resource, obj: Obj, namespace: str | None = None) -> Obj:
        """Put the object in the place of what was there.

        Raises:
            Conflict: it was changed since the ``resourceVersion`` that the object names.
            NotFound, KubeError.
        """
        meta = obj["metadata"]
        path = self._path(resource, namespace or meta.get("namespace"), meta["name"])
        return await self.request("PUT", path, params={"fieldManager": MANAGER}, body=obj)

    async def patch(
        self,
        resource: Resource,
        name: str,
        body: Obj,
        namespace: str | None = None,
        *,
        subresource: str = "",
    ) -> Obj:
        """Merge a JSON merge patch into an object: None removes a field, a list replaces a list.

        Raises:
            NotFound, Conflict (only with a ``resourceVersion`` in the body), KubeError.
        """
        return await self.request(
            "PATCH",
            self._path(resource, namespace, name, subresource),
            params={"fieldManager": MANAGER},
            body=body,
            content_type="application/merge-patch+json",
        )

    async def patch_status(
        self, resource: Resource, name: str, status: Obj, namespace: str | None = None
    ) -> Obj:
        """Merge into the status of an object; see ``patch``."""
        return await self.patch(resource, name, {"status": status}, namespace, subresource="status")

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        grace_s: int | None = None,
        propagation: Propagation | None = None,
    ) -> bool:
        """Begin to delete an object. False: there is none.

        Args:
            uid: that of the object that is meant.
            grace_s: seconds that its processes have to end.

        Raises:
            Conflict: the object of this name has another ``uid``.
            KubeError.
        """
        options: Obj = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if propagation is not None:
            options["propagationPolicy"] = propagation
        try:
            await self.request("DELETE", self._path(resource, namespace, name), body=options)
        except NotFound:
            return False
        return True

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Obj | None = None,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
        deadline_s: float = DEADLINE_S,
        repeat: bool = True,
    ) -> Obj:
        """Send a request and parse its answer.

        Args:
            headers: for whoever is behind a proxy of the API server.
            repeat: it may be carried out twice.

        Raises:
            NotFound, Conflict, Gone, Unreachable, KubeError.
        """
        content = None if body is None else json.dumps(body).encode()
        sent = dict(headers or {}) | ({} if content is None else {"Content-Type": content_type})
        received = await self._fetch(method, path, params, content, sent, deadline_s, repeat)
        return parsed(received)

    @contextlib.asynccontextmanager
    async def watch(
        self, path: str, params: Mapping[str, str], *, silence_s: float
    ) -> AsyncIterator[AsyncIterator[Obj]]:
        """One watch: its events as they come, until the server ends it. It is not retried.

        Args:
            silence_s: without a byte for so long, it is dead.

        Raises:
            Gone, KubeError: it was refused. ``Unreachable``: it could not be opened, broke, or fell silent.
        """
        request, access = f"watch of {path}", await self._fresh()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ATTEMPT_S, sock_read=silence_s)
        try:
            async with self._open(self._watches).get(
                access.server + path,
                params={"watch": "1", **params},
                timeout=timeout,
                **_identity(access, {}),
            ) as answer:
                if answer.status >= 400:
                    if answer.status == 401:
                        await self._renew(access)
                    raise refused(request, answer.status, await answer.read())
                yield events(answer.content, request)
        except _BROKEN as error:
            raise Unreachable(f"kubernetes: {request} ended: {_text(error)}") from error

    @contextlib.asynccontextmanager
    async def websocket(
        self, path: str, params: Mapping[str, str], protocol: str
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """A connection to whatever a path leads to, without a deadline of its own. It is not retried.

        Raises:
            KubeError: it was refused. ``Unreachable``: it could not be opened, or broke.
        """
        request, access = f"GET {path}", await self._fresh()
        try:
            async with self._open(self._watches).ws_connect(
                access.server + path,
                params=params,
                protocols=[protocol],
                **_identity(access, {"Accept": "*/*"}),
            ) as opened:
                yield opened
        except aiohttp.WSServerHandshakeError as error:
            raise refused(request, error.status, b"") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise self._unreachable(request, error) from error

    async def _fetch(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None,
        content: bytes | None,
        headers: Mapping[str, str],
        deadline_s: float,
        repeat: bool,
    ) -> bytes:
        request, loop = f"{method} {path}", asyncio.get_running_loop()
        end, renewed = loop.time() + deadline_s, False
        for attempt in itertools.count():
            access = await self._fresh()
            try:
                # Its time runs from its turn on: what waits in line was not tried.
                async with asyncio.timeout_at(end), self._turn(method), asyncio.timeout(ATTEMPT_S):
                    status, wanted, received = await self._once(
                        access, method, path, params, content, headers
                    )
            except _BROKEN as error:
                failure: KubeError = self._unreachable(request, error)
                if not repeat and not isinstance(error, aiohttp.ClientConnectorError):
                    raise failure from error
            else:
                if status < 400:
                    return received
                failure = refused(request, status, received)
                if status == 401 and not renewed:
                    renewed = True
                    await self._renew(access)
                    continue
                if status not in RETRIED or (not repeat and status != 429):
                    raise failure
                if wanted is not None:
                    await _pause(wanted, end, failure)
                    continue
            steady = _PAUSES_S[min(attempt, len(_PAUSES_S) - 1)]
            await _pause(steady * random.uniform(0.75, 1.25), end, failure)
        raise AssertionError("unreachable")

    async def _once(
        self,
        access: Access,
        method: str,
        path: str,
        params: Mapping[str, str] | None,
        content: bytes | None,
        headers: Mapping[str, str],
    ) -> tuple[int, float | None, bytes]:
        """The status, the pause that the server asks for, and the body."""
        async with self._open(self._calls).request(
            method, access.server + path, params=params, data=content, **_identity(access, headers)
        ) as answer:
            wanted = answer.headers.get("Retry-After", "")
            return answer.status, float(wanted) if wanted.isdigit() else None, await answer.read()

    def _turn(self, method: str) -> contextlib.AbstractAsyncContextManager[None]:
        return self._writes if method != "GET" else contextlib.nullcontext()

    async def _fresh(self) -> Access:
        access = self._known()
        if asyncio.get_running_loop().time() - self._read_at >= self._login.valid_s:
            with contextlib.suppress(KubeError):  # what was read before may still do
                await self._renew(access)
        return self._known()

    async def _renew(self, refused_one: Access | None) -> None:
        """Read the access again, unless somebody did since ``refused_one`` was read."""
        async with self._reading:
            if self._access is refused_one:
                self._access = await asyncio.to_thread(self._login.read)
                self._read_at = asyncio.get_running_loop().time()

    def _session(self, connections: int) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector(connections),
            headers={"User-Agent": self._user_agent, "Accept": "application/json"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=ATTEMPT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    def _path(self, resource: Resource, namespace: str | None, name: str = "", subresource: str = "") -> str:
        if not resource.namespaced:
            return resource.path(None, name, subresource)
        return resource.path(namespace or self.namespace, name, subresource)

    def _unreachable(self, request: str, error: Exception) -> Unreachable:
        return Unreachable(
            f"kubernetes: {self.server} did not answer {request}: {_text(error)}",
            hints=["is it the right cluster, and is it up? kubectl get --raw /readyz"],
        )

    def _known(self) -> Access:
        assert self._access is not None, "enter it: async with Kube.connect(...) as kube"
        return self._access

    def _open(self, session: aiohttp.ClientSession | None) -> aiohttp.ClientSession:
        if session is None:
            raise Unreachable(f"kubernetes: the connection of {self._user_agent} was closed")
        return session


async def _pause(seconds: float, end: float, failure: KubeError) -> None:
    if asyncio.get_running_loop().time() + seconds >= end:
        raise failure
    await asyncio.sleep(seconds)


def _identity(access: Access, headers: Mapping[str, str]) -> dict[str, Any]:
    who = {"Authorization": access.authorization} if access.authorization else {}
    given: dict[str, Any] = {"headers": {**headers, **who}}
    if access.tls is not None:
        given["ssl"] = access.tls
    if access.server_name is not None:
        given["server_hostname"] = access.server_name
    if access.proxy is not None:
        given["proxy"] = access.proxy
    return given


def _selectors(labels: str | None, fields: str | None) -> dict[str, str]:
    given = {"labelSelector": labels, "fieldSelector": fields}
    return {name: value for name, value in given.items() if value}


def _text(error: Exception) -> str:
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
