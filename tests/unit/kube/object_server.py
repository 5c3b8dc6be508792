"""An API server that keeps objects of one kind: lists, pages, watches, and the faults between them."""

import asyncio
import json
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from agentfly.kube.client import Kube
from tests.unit.kube.api_stub import StubLogin, status


class ObjectServer:
    def __init__(self, *, streams=True):
        self.streams = streams
        self.objects = {}
        self.version = 100
        self.floor = 0
        self.log = []
        self.queries = []
        self.refusals = []
        self.page_size = 2
        self.stall_initial = False
        self.cut_in_list_after = None
        self._watches = {}
        self._uid = 0
        self.url = ""

    # what exists

    def put(self, name, **spec):
        self.version += 1
        known = self.objects.get(name)
        if known is None:
            self._uid += 1
        uid = known["metadata"]["uid"] if known else f"u{self._uid}"
        meta = {"name": name, "namespace": "ns", "uid": uid, "resourceVersion": str(self.version)}
        obj = {"metadata": meta, "spec": spec}
        self.objects[name] = obj
        self._happened("MODIFIED" if known else "ADDED", obj)
        return uid

    def delete(self, name):
        obj = self.objects.pop(name)
        self.version += 1
        gone = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self.version)}}
        self._happened("DELETED", gone)

    def bookmark(self):
        self.version += 1
        self._send({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self.version)}}})

    def error(self, code, reason):
        self._send({"type": "ERROR", "object": status(code, reason, "in the stream")})

    def forget(self):
        """Nothing before now can be watched."""
        self.floor = self.version

    def cut(self):
        for transport in list(self._watches.values()):
            if transport is not None:
                transport.abort()

    @property
    def watching(self):
        return len(self._watches)

    def watches(self):
        return [query for query in self.queries if "watch" in query]

    def _happened(self, kind, obj):
        self.log.append((self.version, kind, obj))
        self._send({"type": kind, "object": obj})

    def _send(self, event):
        for queue in self._watches:
            queue.put_nowait(event)

    # how it answers

    async def handle(self, request):
        query = dict(request.query)
        self.queries.append(query)
        if self.refusals:
            code = self.refusals.pop(0)
            return web.json_response(status(code, "No", f"refused with {code}"), status=code)
        if "watch" not in query:
            return self._page(query)
        initial = "sendInitialEvents" in query
        if initial and not self.streams:
            problem = status(422, "Invalid", "sendInitialEvents: Forbidden")
            return web.json_response(problem, status=422)
        if not initial and int(query["resourceVersion"]) < self.floor:
            return web.json_response(status(410, "Expired", "too old resource version"), status=410)
        return await self._watch(request, query, initial)

    def _page(self, query):
        begin = int(query.get("continue", "0"))
        names = sorted(self.objects)
        items = [self.objects[name] for name in names[begin : begin + self.page_size]]
        more = begin + self.page_size < len(names)
        meta = {"resourceVersion": str(self.version), "continue": str(begin + self.page_size) if more else ""}
        return web.json_response({"metadata": meta, "items": items})

    async def _watch(self, request, query, initial):
        queue = asyncio.Queue()
        if initial:
            for count, obj in enumerate(self.objects.values()):
                if count == self.cut_in_list_after:
                    self.cut_in_list_after = None
                    queue.put_nowait(None)
                queue.put_nowait({"type": "ADDED", "object": obj})
            if not self.stall_initial:
                meta = {
                    "resourceVersion": str(self.version),
                    "annotations": {"k8s.io/initial-events-end": "true"},
                }
                queue.put_nowait({"type": "BOOKMARK", "object": {"metadata": meta}})
        else:
            for version, kind, obj in self.log:
                if version > int(query["resourceVersion"]):
                    queue.put_nowait({"type": kind, "object": obj})
        self._watches[queue] = request.transport
        answer = web.StreamResponse()
        try:
            await answer.prepare(request)
            while True:
                event = await queue.get()
                if event is None:
                    request.transport.abort()
                    return answer
                await answer.write(json.dumps(event).encode() + b"\n")
                if event["type"] == "ERROR":
                    return answer
        except ConnectionError:
            return answer
        finally:
            self._watches.pop(queue, None)

    @asynccontextmanager
    async def serving(self, *, writes=False):
        app = web.Application()
        app.router.add_route("*" if writes else "GET", "/api/v1/{tail:.*}", self.handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = site._server.sockets[0].getsockname()[:2]
            self.url = f"http://{host}:{port}"
            async with Kube("agentfly-test/1", StubLogin(self.url)) as kube:
                yield kube
        finally:
            with suppress(TimeoutError):
                await runner.cleanup()


async def until(condition, seconds=5.0):
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 -- anything may make it true
            await asyncio.sleep(0.005)
