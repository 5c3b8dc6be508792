"""The informer on a real API server. Numbers are those of agentfly/kube/informer.py."""

import asyncio
import json
import signal
import subprocess
import sys

import pytest

from agentfly.kube import PODS, Informer
from agentfly.kube import informer as module
from agentfly.resources.runners.kubernetes.pod import Start, sandbox_pod
from agentfly.resources.spec import ContainerSpec, PodOptions
from tests.integration.namespaces import namespace, pod
from tests.unit.kube.object_server import until

pytestmark = pytest.mark.timeout(240)
MANY = 3000


def names(informer):
    return {each["metadata"]["name"] for each in informer.items.values()}


async def test_list_and_watch_are_one_stream(control_plane):
    """2. One request for everything, and nothing asked again while it changes."""
    async with namespace(control_plane, "agentfly-informer/1") as kube:
        await kube.create(PODS, pod("a", {"x": "y"}))
        await kube.create(PODS, pod("other"))
        with control_plane.audit() as audit:
            async with Informer(kube, PODS, kube.namespace, "x=y") as informer:
                await informer.synced()
                assert names(informer) == {"a"}
                await kube.create(PODS, pod("b", {"x": "y"}))
                await until(lambda: names(informer) == {"a", "b"})
                await kube.delete(PODS, "a", grace_s=0)
                await until(lambda: names(informer) == {"b"})
        reads = {key: n for key, n in audit.counts(agent="agentfly-informer").items() if key[0] != "create"}
        assert reads == {("watch", "pods"): 1, ("delete", "pods"): 1}


@pytest.mark.parametrize("streams", [True, False], ids=["one stream", "pages and a watch"])
async def test_nothing_that_was_deleted_while_nobody_watched_is_left(control_plane, streams):
    """1. Cut off, deleted meanwhile, the API server restarted: each deletion is told, no ghost is kept."""
    async with namespace(control_plane) as kube:
        created = [f"p{n:02}" for n in range(20)]
        await asyncio.gather(*(kube.create(PODS, pod(name)) for name in created))
        informer, told = Informer(kube, PODS, kube.namespace), []
        informer._streams = streams
        async with informer:
            await informer.synced()
            informer.subscribe(lambda kind, obj: told.append((kind, obj["metadata"]["name"])))
            control_plane.cut()
            try:
                kubectl = [str(control_plane.kubectl_path), f"--kubeconfig={control_plane.inside_kubeconfig}"]
                await asyncio.to_thread(  # type: ignore[call-arg]
                    control_plane.x, *kubectl, "delete", "pod", "-n", kube.namespace, *created[:15]
                )
                control_plane.kill("kube-apiserver")
            finally:
                control_plane.mend()
            await asyncio.to_thread(control_plane.restart, "kube-apiserver")
            await until(lambda: names(informer) == set(created[15:]), 40)
            assert sorted(told) == [("DELETED", name) for name in created[:15]]
            await kube.create(PODS, pod("later"))
            await until(lambda: "later" in names(informer))


async def test_follows_over_a_killed_api_server(control_plane):
    """3."""
    async with namespace(control_plane) as kube, Informer(kube, PODS, kube.namespace) as informer:
        await informer.synced()
        await asyncio.to_thread(control_plane.restart, "kube-apiserver")
        await kube.create(PODS, pod("after"))
        await until(lambda: names(informer) == {"after"}, 20)


async def test_api_server_that_is_frozen_is_given_up(control_plane, monkeypatch):
    """3. It accepts and says nothing: the watch ends, and goes on where it was when it is back."""
    monkeypatch.setattr(module, "SILENCE_S", 2.0)
    async with namespace(control_plane) as kube, Informer(kube, PODS, kube.namespace) as informer:
        await informer.synced()
        control_plane.signal("kube-apiserver", signal.SIGSTOP)
        try:
            await asyncio.sleep(3.0)
        finally:
            control_plane.signal("kube-apiserver", signal.SIGCONT)
        await kube.create(PODS, pod("after"))
        await until(lambda: names(informer) == {"after"}, 30)


PROGRAM = """
import asyncio, json, os, resource, sys
from pathlib import Path
from agentfly.kube import PODS, Informer, Kube, project_pod

def mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

async def main():
    config, namespace = sys.argv[1:]
    async with Kube.connect("agentfly-scale/1", kubeconfig=config) as kube:
        before, held = resource.getrusage(resource.RUSAGE_SELF), mib()
        async with Informer(kube, PODS, namespace, project=project_pod) as informer:
            await informer.synced(60)
            after = resource.getrusage(resource.RUSAGE_SELF)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            print(json.dumps({"pods": len(informer.items), "cpu_s": cpu, "mib": mib() - held}))

asyncio.run(main())
"""


async def test_thousands_of_pods_cost_little(control_plane):
    """4. CPU seconds and memory of a start, as they would be for 10,000: below 5 s and 200 MiB."""
    async with namespace(control_plane) as kube:
        for first in range(0, MANY, 500):
            await asyncio.gather(*(kube.create(PODS, _member(first + n)) for n in range(500)))
        command = [sys.executable, "-c", PROGRAM, str(control_plane.kubeconfig), kube.namespace]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=60, check=True
        )
        found = json.loads(done.stdout)
        assert found["pods"] == MANY
        assert found["cpu_s"] * 10_000 / MANY < 5.0
        assert 0 < found["mib"] * 10_000 / MANY < 200.0, found


def _member(n):
    spec = ContainerSpec(runtime="kubernetes", image="python:3.12", pod=PodOptions(scheduler="none"))
    start = Start("p", f"p-0a1b-{n}", "", {}, f"{n:016x}")
    made = sandbox_pod(start, spec, admin_key="k", sandboxd_image="s")
    del made["metadata"]["namespace"]
    del made["metadata"]["ownerReferences"]  # its pool does not exist, and the collector would notice
    return made
