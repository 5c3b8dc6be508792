"""A cluster in miniature: an API server for pods, a scheduler, a kubelet that does what images are called.

``held``: no node has room. ``no-such``: cannot be pulled. ``crashes``: ends at once. ``slow``: takes a while
to run. ``mute``: its daemon never answers. ``stranger``: its daemon knows another key. Any other runs.
"""

import asyncio
import copy
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count

from aiohttp import web

from agentfly.kube import PODS, Informer, project_pod
from agentfly.resources.runners.kubernetes import (
    MEMBER_LABELS,
    KubernetesRunner,
    ModelServicePodRunner,
    PodCluster,
    Signer,
)
from agentfly.resources.spec import ContainerSpec
from tests.unit.kube.api_stub import status
from tests.unit.kube.object_server import ObjectServer
from tests.unit.resources.runners.kubernetes.daemons import Daemons

OWNER = {
    "apiVersion": "agentfly.dev/v1alpha1",
    "kind": "ResourcePool",
    "name": "pool",
    "uid": "pool-uid",
    "controller": True,
}
SEED = b"s" * 32
TTL = 30.0
NAME = "pool-0a1b-0"


def sandbox(image="fine", **fields):
    return ContainerSpec(runtime="kubernetes", image=image, **fields)


class PodServer(ObjectServer):
    def __init__(self, daemons):
        super().__init__()
        self.daemons = daemons
        self.create_answers = []
        self.conflicts = 0  # deletions that are refused for once
        self.requests = []
        self.lingering = False
        self.graces = []  # of deletions
        self.nodes = ["node1"]
        self._addresses = (f"127.77.{n // 250}.{n % 250 + 1}" for n in count())
        self._work = set()

    async def handle(self, request):
        self.requests.append((request.method, request.path))
        name = request.path.rpartition("/pods")[2].strip("/")
        match request.method:
            case "POST":
                return await self._create(request)
            case "DELETE":
                return await self._delete(name, await request.json())
            case "GET" if name:
                pod = self.objects.get(name)
                return web.json_response(pod) if pod else self._missing(name)
        return await super().handle(request)

    async def _create(self, request):
        pod = await request.json()
        answer = self.create_answers.pop(0) if self.create_answers else None
        if answer == "cut before":
            request.transport.abort()
            return web.Response()
        if isinstance(answer, int):
            return web.json_response(status(answer, "Forbidden", "exceeded quota: pods"), status=answer)
        name = pod["metadata"]["name"]
        if name in self.objects:
            return web.json_response(status(409, "AlreadyExists", f"pods {name} already exists"), status=409)
        self.add(pod)
        if answer == "cut after":
            request.transport.abort()
        if answer == "hang after":
            await asyncio.sleep(3600)
        return web.json_response(self.objects[name], status=201)

    async def _delete(self, name, options):
        pod = self.objects.get(name)
        if pod is None:
            return self._missing(name)
        if self.conflicts:
            self.conflicts -= 1
            return web.json_response(status(409, "Conflict", "please apply your changes again"), status=409)
        self.graces.append(options.get("gracePeriodSeconds"))
        wanted = options.get("preconditions", {}).get("uid")
        if wanted not in (None, pod["metadata"]["uid"]):
            return web.json_response(status(409, "Conflict", "the UID does not match"), status=409)
        if options.get("gracePeriodSeconds") == 0 or not pod["spec"].get("nodeName"):
            self.remove(name)
        else:
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            self.change(pod)
            if not self.lingering:
                self._later(0.01, lambda: self.remove(name, pod["metadata"]["uid"]))
        return web.json_response(pod)

    @staticmethod
    def _missing(name):
        return web.json_response(status(404, "NotFound", f"pods {name} not found"), status=404)

    # what exists

    def add(self, pod):
        self._uid += 1
        self.version += 1
        pod = copy.deepcopy(pod)
        pod["metadata"] |= {"uid": f"u{self._uid}", "resourceVersion": str(self.version)}
        pod["status"] = {"phase": "Pending"}
        self.objects[pod["metadata"]["name"]] = pod
        self._happened("ADDED", copy.deepcopy(pod))
        self._later(0.005, lambda: self.schedule(pod))
        return pod

    def change(self, pod):
        if self.objects.get(pod["metadata"]["name"]) is not pod:
            return
        self.version += 1
        pod["metadata"]["resourceVersion"] = str(self.version)
        self._happened("MODIFIED", copy.deepcopy(pod))

    def remove(self, name, uid=None):
        pod = self.objects.get(name)
        if pod is None or uid not in (None, pod["metadata"]["uid"]):
            return
        self.daemons.end(pod["status"].get("podIP"))
        self.delete(name)

    def schedule(self, pod):
        if "deletionTimestamp" in pod["metadata"]:
            return
        image = pod["spec"]["containers"][0]["image"]
        node = None if image == "held" else self.place(pod)
        if node is None:
            message = "0/1 nodes are available: 1 Insufficient cpu."
            why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            pod["status"] = {"phase": "Pending", "conditions": [why]}
            return self.change(pod)
        pod["spec"]["nodeName"] = node
        self.change(pod)
        self._later(0.5 if image == "slow" else 0.005, lambda: self.run(pod, image))
        return None

    def place(self, pod):
        """The first node that the pod may go to."""
        affinity = pod["spec"].get("affinity")
        excluded = []
        if affinity:
            terms = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            excluded = [each["values"][0] for each in terms["nodeSelectorTerms"][0]["matchFields"]]
        return next((node for node in self.nodes if node not in excluded), None)

    def run(self, pod, image):
        container = {"name": "sandbox", "image": image, "ready": False, "restartCount": 0, "lastState": {}}
        match image:
            case "no-such":
                waiting = {"reason": "ErrImagePull", "message": "rpc error: not found: no-such:latest"}
                container["state"] = {"waiting": waiting}
                pod["status"] = {"phase": "Pending", "containerStatuses": [container]}
            case "crashes":
                ended = {"exitCode": 1, "reason": "Error", "message": "first\nsandboxd: pid: must be 1\n"}
                container["state"] = {"terminated": ended}
                pod["status"] = {"phase": "Failed", "containerStatuses": [container]}
            case _:
                self._ready(pod, container, image)
        self.change(pod)

    def _ready(self, pod, container, image):
        if "deletionTimestamp" in pod["metadata"]:
            return
        address = next(self._addresses)
        daemon = self.daemons.begin(address, pod)
        daemon.mute = image == "mute"
        if image == "stranger":
            daemon.config["adminKey"] = Signer(b"x" * 32).public_key
        container |= {"ready": True, "state": {"running": {}}}
        pod["status"] = {
            "phase": "Running",
            "podIP": address,
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [container],
        }

    def fail(self, name, **facts):
        """A pod ends."""
        pod = self.objects[name]
        self.daemons.end(pod["status"].get("podIP"))
        pod["status"] |= {"phase": "Failed", **facts}
        self.change(pod)

    def _later(self, seconds, act):
        async def wait():
            await asyncio.sleep(seconds)
            act()

        task = asyncio.ensure_future(wait())
        self._work.add(task)
        task.add_done_callback(self._work.discard)


class World:
    """A cluster, and what brokers have of it. ``per_node`` and ``owner`` may be changed."""

    def __init__(self, server, daemons, kube, stack):
        self.server = server
        self.daemons = daemons
        self.kube = kube
        self.stack = stack
        self.per_node = None
        self.owner = OWNER

    async def cluster(self):
        informer = Informer(self.kube, PODS, "ns", MEMBER_LABELS, project=project_pod)
        await self.stack.enter_async_context(informer)
        await informer.synced(5)
        return PodCluster(self.kube, informer, "ns", lambda pool: self.owner, lambda pool: self.per_node)

    async def models(self):
        """The runner of models of one more broker."""
        runner = ModelServicePodRunner(await self.cluster())
        self.stack.push_async_callback(runner.close)
        return runner

    async def runner(self, seed=SEED):
        """The runner of sandboxes of one more broker."""
        runner = KubernetesRunner(await self.cluster(), Signer(seed), sandboxd_image="agentfly/sandboxd:dev")
        self.stack.push_async_callback(runner.close)
        return runner

    def pods(self):
        return set(self.server.objects)


@asynccontextmanager
async def world(monkeypatch):
    daemons = Daemons()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(daemons.serving())
        for module in ("runner", "model"):
            monkeypatch.setattr(f"agentfly.resources.runners.kubernetes.{module}.PORT", daemons.port)
        server = PodServer(daemons)
        kube = await stack.enter_async_context(server.serving(writes=True))
        async with AsyncExitStack() as inner:
            yield World(server, daemons, kube, inner)
        for task in list(server._work):
            task.cancel()
