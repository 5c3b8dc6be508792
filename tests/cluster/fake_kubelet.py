"""Nodes that are only claimed: their pods run as far as the API shows, thousands of them.

The real scheduler places pods on them, so that Unschedulable is the scheduler's own word. A pod there becomes
Running and Ready with an address of 127.16.0.0/12: this machine answers on every one of them, so that a test
can listen on 0.0.0.0 and be the container of each pod.

Guarantees:
1. A pod of these nodes is Running and Ready soon after it is placed, and gone soon after it is deleted; its
   containers get what a kubelet would write: addresses, start times, container states, conditions.
2. `hold`, `fail` and `linger` act on pods by label, also on those that are there already, until `clear`.
3. It survives restarts of the API server and lists anew; the nodes' leases are renewed every 5 s.
"""

import asyncio
import contextlib
import dataclasses
import datetime
import ipaddress
import itertools
import json
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import aiohttp

from tests.cluster.api import Api
from tests.cluster.machine import ClusterError

USER_AGENT = "fake-kubelet"
ADDRESSES = ipaddress.ip_network("127.16.0.0/12")
IN_FLIGHT = 40
LEASE_S = 5.0
RETRY_S = 0.3
REQUEST_S = 30.0
START_S = 30.0
MERGE = {"Content-Type": "application/merge-patch+json"}

Effect = Literal["hold", "fail", "linger"]


@dataclasses.dataclass(frozen=True)
class Rule:
    """What happens to pods that have these labels."""

    effect: Effect
    labels: Mapping[str, str]
    reason: str = ""
    message: str = ""

    def matches(self, pod: dict[str, Any]) -> bool:
        """Whether a pod has every label."""
        labels = pod["metadata"].get("labels", {})
        return all(labels.get(key) == value for key, value in self.labels.items())


class FakeKubelet:
    """Claims nodes called ``fake-0``, ``fake-1``.. in a thread of its own, between `start` and `stop`.

    Args:
        nodes: how many.
        pods: the most pods that the scheduler may place on each.
        resources: more capacity of each node, for example ``{"nvidia.com/gpu": "8"}``.
        labels: more labels of each node.
        start_s: seconds from placed to Running.
    """

    def __init__(
        self,
        kubeconfig: Path,
        *,
        nodes: int = 1,
        pods: int = 20_000,
        resources: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        start_s: float = 0.0,
    ) -> None:
        self._api = Api(kubeconfig)
        self.nodes = tuple(f"fake-{number}" for number in range(nodes))
        capacity = {"cpu": "10000", "memory": "100Ti", "ephemeral-storage": "100Ti", "pods": str(pods)}
        self._capacity = {**capacity, **(resources or {})}
        self._labels = dict(labels or {})
        self.start_s = start_s
        self._rules: list[Rule] = []
        self._leaving = False
        self._pods: dict[str, dict[str, Any]] = {}
        self._busy: set[str] = set()
        self._addresses = itertools.islice(ADDRESSES, 1, None)
        self._address: dict[str, str] = {}
        self._up = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[Any] | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def __enter__(self) -> "FakeKubelet":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Claims the nodes; returns when the scheduler may use them.

        Raises:
            ClusterError: the API server does not take them.
        """
        self._thread = threading.Thread(target=self._run, name="fake-kubelet", daemon=True)
        self._thread.start()
        if not self._up.wait(START_S) or self._failure:
            raise ClusterError(f"fake kubelet: does not start: {self._failure!r}")

    def stop(self) -> None:
        """Deletes the nodes and their pods, and ends.

        Raises:
            ClusterError: something that it had to do went wrong.
        """
        if self._thread and self._loop and self._main and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._main.cancel)
            self._thread.join(START_S)
        if self._failure:
            raise ClusterError(f"fake kubelet: {self._failure!r}") from self._failure

    def hold(self, **labels: str) -> None:
        """Pods with these labels stay Pending, as while their image is pulled."""
        self.rule(Rule("hold", labels))

    def fail(self, reason: str, message: str = "", **labels: str) -> None:
        """Containers of pods with these labels wait with a reason, for example ``ImagePullBackOff``."""
        self.rule(Rule("fail", labels, reason, message or f"fake: {reason}"))

    def linger(self, **labels: str) -> None:
        """Deleted pods with these labels stay Terminating."""
        self.rule(Rule("linger", labels))

    def rule(self, rule: Rule) -> None:
        """Adds a rule; of several that match a pod the last one counts."""
        self._then(self._change(lambda: self._rules.append(rule)))

    def clear(self) -> None:
        """Forgets all rules: what was held starts, what lingered goes."""
        self._then(self._change(self._rules.clear))

    def set_status(self, namespace: str, name: str, status: Mapping[str, Any]) -> None:
        """Merges into a pod's status, for example ``{"phase": "Failed", "reason": "Evicted"}``."""
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/status"
        self._then(self._write("PATCH", path, {"status": dict(status)}))

    def cordon(self, unschedulable: bool = True) -> None:
        """Lets the scheduler place nothing on the nodes, or again."""
        for node in self.nodes:
            self._then(
                self._write("PATCH", f"/api/v1/nodes/{node}", {"spec": {"unschedulable": unschedulable}})
            )

    def _then(self, work: Coroutine[Any, Any, object]) -> None:
        if self._loop is None:
            work.close()
            raise ClusterError("fake kubelet: is not started")
        asyncio.run_coroutine_threadsafe(work, self._loop).result(REQUEST_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._failure = error
        finally:
            self._up.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        self._leaving = False
        self._slots = asyncio.Semaphore(IN_FLIGHT)
        self._work: set[asyncio.Task[None]] = set()
        headers = {**self._api.headers, "User-Agent": USER_AGENT}
        connector = aiohttp.TCPConnector(ssl=self._api.ssl, limit=IN_FLIGHT + 4)
        timeout = aiohttp.ClientTimeout(total=REQUEST_S)
        async with aiohttp.ClientSession(
            self._api.server, connector=connector, headers=headers, timeout=timeout
        ) as self._session:
            leases = asyncio.create_task(self._lease())
            try:
                await self._claim()
                self._up.set()
                await self._watch()
            finally:
                self._leaving = True
                leases.cancel()
                for task in self._work:
                    task.cancel()
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, ClusterError):
                    await self._leave()

    async def _claim(self) -> None:
        for node in self.nodes:
            labels = {
                "kubernetes.io/hostname": node,
                "kubernetes.io/os": "linux",
                "agentfly.test/fake": "true",
            }
            body = {"metadata": {"name": node, "labels": {**labels, **self._labels}}}
            await self._write("POST", "/api/v1/nodes", body, also=(409,))
            await self._write(
                "PATCH",
                f"/api/v1/nodes/{node}/status",
                {
                    "status": {
                        "capacity": self._capacity,
                        "allocatable": self._capacity,
                        "conditions": _NODE_READY,
                    }
                },
            )
            # The controller taints a node that was never ready; it takes the taint off at its next look.
            await self._write("PATCH", f"/api/v1/nodes/{node}", {"spec": {"taints": None}})

    async def _leave(self) -> None:
        for pod in list(self._pods.values()):
            await self._write("DELETE", f"{_path(pod)}?gracePeriodSeconds=0", also=(404, 409))
        for node in self.nodes:
            await self._write("DELETE", f"/api/v1/nodes/{node}", also=(404,))

    async def _lease(self) -> None:
        space = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        while True:
            for node in self.nodes:
                spec = {"holderIdentity": node, "leaseDurationSeconds": 20, "renewTime": _now(micro=True)}
                body = {"metadata": {"name": node}, "spec": spec}
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, ClusterError):
                    await self._write("POST", space, body, also=(404, 409))
                    await self._write("PATCH", f"{space}/{node}", {"spec": spec}, also=(404,))
            await asyncio.sleep(LEASE_S)

    async def _watch(self) -> None:
        """One streaming list after the other; each tells what is there, so that what is gone is noticed."""
        query = "watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=90.0)
        while True:
            seen: set[str] | None = set()
            try:
                async with self._session.get(f"/api/v1/pods?{query}", timeout=timeout) as response:
                    response.raise_for_status()
                    async for event in _lines(response):
                        seen = self._take(event, seen)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
                pass
            await asyncio.sleep(RETRY_S)

    def _take(self, event: dict[str, Any], seen: set[str] | None) -> set[str] | None:
        pod = event["object"]
        if event["type"] == "ERROR":
            raise ValueError(pod)
        if event["type"] == "BOOKMARK":
            if seen is not None:
                for uid in set(self._pods) - seen:
                    self._drop(uid)
            return None
        if pod["spec"].get("nodeName") not in self.nodes:
            return seen
        uid = pod["metadata"]["uid"]
        if event["type"] == "DELETED":
            self._drop(uid)
            return seen
        if seen is not None:
            seen.add(uid)
        self._pods[uid] = pod
        self._look(uid)
        return seen

    def _drop(self, uid: str) -> None:
        self._pods.pop(uid, None)
        self._address.pop(uid, None)

    def _look(self, uid: str) -> None:
        """Brings a pod one step on, unless that is being done."""
        if self._leaving or uid in self._busy or uid not in self._pods:
            return
        if (step := self._step(self._pods[uid])) is not None:
            self._busy.add(uid)
            task = asyncio.create_task(self._do(self._pods[uid], step))
            self._work.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error

    def _step(self, pod: dict[str, Any]) -> dict[str, Any] | Literal["delete"] | None:
        """What is to be done with a pod: a status to write, its deletion, or nothing."""
        rule = next((rule for rule in reversed(self._rules) if rule.matches(pod)), None)
        effect = rule.effect if rule else None
        if pod["metadata"].get("deletionTimestamp"):
            return None if effect == "linger" else "delete"
        status = pod.get("status", {})
        if status.get("phase") in ("Succeeded", "Failed"):
            return None
        if rule and effect in ("hold", "fail"):
            reason = rule.reason or "ContainerCreating"
            states = [one.get("state", {}) for one in status.get("containerStatuses", [])]
            reasons = {state.get("waiting", {}).get("reason") for state in states}
            if status.get("phase") == "Running" or reasons == {reason}:
                return None
            return _waiting(pod, reason, rule.message)
        if status.get("phase") == "Running":
            return None
        return _running(pod, self._address_of(pod["metadata"]["uid"]))

    def _address_of(self, uid: str) -> str:
        if uid not in self._address:
            self._address[uid] = str(next(self._addresses))
        return self._address[uid]

    async def _do(self, pod: dict[str, Any], step: dict[str, Any] | Literal["delete"]) -> None:
        uid, done = pod["metadata"]["uid"], False
        try:
            if step == "delete":
                body = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
                await self._write("DELETE", _path(pod), body, also=(404, 409))
                done = True
            else:
                if self.start_s and step["phase"] == "Running":
                    await asyncio.sleep(self.start_s)
                    if self._pods.get(uid) is not pod:  # what came meanwhile is looked at instead
                        return
                patch = {"metadata": {"uid": uid}, "status": step}
                await self._write("PATCH", f"{_path(pod)}/status", patch, also=(404, 409))
                done = True
        except (aiohttp.ClientError, OSError, TimeoutError, ClusterError):
            await asyncio.sleep(RETRY_S)
        finally:
            self._busy.discard(uid)
            if not done or self._pods.get(uid) is not pod:
                self._look(uid)

    async def _change(self, change: Any) -> None:
        change()
        for uid in list(self._pods):
            self._look(uid)

    async def _write(self, method: str, path: str, body: Any = None, also: tuple[int, ...] = ()) -> None:
        headers = MERGE if method == "PATCH" else None
        async with (
            self._slots,
            self._session.request(method, path, json=body, headers=headers) as response,
        ):
            text = await response.text()
            if response.status >= 300 and response.status not in also:
                raise ClusterError(f"{method} {path}: {response.status} {text}")


_NODE_READY = [
    {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "fake"},
    *(
        {"type": kind, "status": "False", "reason": f"No{kind}", "message": "fake"}
        for kind in ("MemoryPressure", "DiskPressure", "PIDPressure")
    ),
]


def _running(pod: dict[str, Any], address: str) -> dict[str, Any]:
    now = _now()
    conditions = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    return {
        "phase": "Running",
        "hostIP": "127.0.0.1",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "startTime": now,
        "qosClass": pod.get("status", {}).get("qosClass", "BestEffort"),
        "conditions": [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in conditions],
        "initContainerStatuses": [
            {
                **_container(container, pod),
                "state": {"terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": now}},
                "ready": True,
            }
            for container in pod["spec"].get("initContainers", ())
        ],
        "containerStatuses": [
            {
                **_container(container, pod),
                "state": {"running": {"startedAt": now}},
                "ready": True,
                "started": True,
            }
            for container in pod["spec"]["containers"]
        ],
    }


def _waiting(pod: dict[str, Any], reason: str, message: str) -> dict[str, Any]:
    now = _now()
    why = {"reason": "ContainersNotReady", "message": "containers with unready status"}
    waiting = {"reason": reason, **({"message": message} if message else {})}
    return {
        "phase": "Pending",
        "hostIP": "127.0.0.1",
        "startTime": now,
        "conditions": [
            {"type": "Initialized", "status": "True", "lastTransitionTime": now},
            {"type": "Ready", "status": "False", "lastTransitionTime": now, **why},
            {"type": "ContainersReady", "status": "False", "lastTransitionTime": now, **why},
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": now},
        ],
        "containerStatuses": [
            {**_container(container, pod), "state": {"waiting": waiting}, "ready": False, "started": False}
            for container in pod["spec"]["containers"]
        ],
    }


def _container(container: dict[str, Any], pod: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": container["name"],
        "image": container.get("image", ""),
        "imageID": f"fake://{container.get('image', '')}",
        "containerID": f"fake://{pod['metadata']['uid']}/{container['name']}",
        "restartCount": 0,
        "lastState": {},
    }


def _path(pod: dict[str, Any]) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def _now(*, micro: bool = False) -> str:
    now = datetime.datetime.now(datetime.UTC)
    return now.isoformat(timespec="microseconds" if micro else "seconds").replace("+00:00", "Z")


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Events of a watch, one a line, however long a line is."""
    rest = b""
    async for chunk in response.content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield json.loads(line)
