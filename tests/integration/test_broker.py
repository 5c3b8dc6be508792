"""The broker of a namespace on a real API server. Numbers are those of agentfly/broker/cluster.py."""

import asyncio
import base64
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentfly.broker import wire
from agentfly.kube import SECRETS, SERVICES
from agentfly.resources.errors import PoolNotFound
from tests.integration.brokers import Rig, events_in, pool, rig
from tests.unit.resources.runners.misbehaving_api import CHAT, KEY, misbehaving

pytestmark = pytest.mark.timeout(180)
DEADLINE = 30.0


async def ask(base_url: str, token: str) -> int:
    """The status of a prompt's answer; 0 if nobody answers."""
    headers = {"Authorization": f"Bearer {token}"}
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{base_url}/chat/completions", json=CHAT, headers=headers) as answer,
        ):
            return answer.status
    except aiohttp.ClientError:
        return 0


async def hold(made: Rig, *owners: str) -> tuple[Any, list[Any]]:
    client = made.client()
    return client, [await client.acquire("shell", owner, deadline=DEADLINE) for owner in owners]


async def test_pool_of_the_namespace_is_served(control_plane: Any, fake_kubelet: Any, tmp_path: Path) -> None:
    async with rig(control_plane, tmp_path, pool(capacity={"min": 2, "max": 3})) as made:
        await made.start()
        await made.counts(ready=2)
        async with made.client() as client:
            lease = await client.acquire("shell", "a", deadline=DEADLINE)
            assert lease.info.address.startswith("http://127.")
            assert made.daemons.of(lease.info.member_id).owner == "a"
        await made.counts(leased=0)
        owners = {
            (owner["kind"], owner["name"])
            for each in (await made.pods()).values()
            for owner in each["metadata"]["ownerReferences"]
        }
        assert owners == {("ResourcePool", "shell")}
        assert (await made.get(wire.POOLS, token=""))[0] == 401
        assert all({"time", "level", "message"} <= set(line) for line in events_in(made.log))


# 1, 2. A broker ends, or is killed, and another one goes on.


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_leases_outlive_a_broker_however_it_ends(
    control_plane: Any, fake_kubelet: Any, tmp_path: Path, number: signal.Signals
) -> None:
    async with rig(control_plane, tmp_path, pool(capacity={"min": 3, "max": 3})) as made:
        await made.start()
        await made.counts(ready=3)
        client, leases = await hold(made, "a", "b")
        before = await made.pods()
        assert await made.end(number) < 10.0
        await asyncio.sleep(1.0)
        assert set(await made.pods()) == set(before)
        again = asyncio.create_task(client.acquire("shell", "a", deadline=DEADLINE))
        third = asyncio.create_task(client.acquire("shell", "c", deadline=DEADLINE))
        await made.start()
        assert (await again) is leases[0], "the owner's own lease, under its old id"
        assert (await third).info.member_id not in {lease.info.member_id for lease in leases}
        await made.counts(leased=3, ready=0)
        _, shown = await made.get(wire.LEASES)
        assert {lease.info.lease_id for lease in leases} <= {lease["lease_id"] for lease in shown}
        assert not any(lease.lost for lease in leases)
        assert {name: pod["metadata"]["uid"] for name, pod in (await made.pods()).items()} == {
            name: pod["metadata"]["uid"] for name, pod in before.items()
        }
        for lease in leases:
            await lease.release()
        await made.counts(leased=1, ready=2)
        await client.close()


async def test_lease_that_ended_while_no_broker_ran_is_lost_and_its_member_cleaned(
    control_plane: Any, fake_kubelet: Any, tmp_path: Path
) -> None:
    made_pool = pool(capacity={"min": 1, "max": 1}, lease={"ttlSeconds": 3})
    async with rig(control_plane, tmp_path, made_pool) as made:
        await made.start()
        client, (lease,) = await hold(made, "a")
        await made.end(signal.SIGKILL)
        await asyncio.sleep(4.0)
        assert lease.lost
        await made.start()
        await made.counts(ready=1, leased=0)
        other = await client.acquire("shell", "b", deadline=DEADLINE)
        assert other.info.incarnation > lease.info.incarnation
        await client.close()


async def test_broker_that_is_asked_to_end_while_members_start_does_so_in_time(
    control_plane: Any, fake_kubelet: Any, tmp_path: Path
) -> None:
    async with rig(control_plane, tmp_path, pool(capacity={"min": 4, "max": 4})) as made:
        fake_kubelet.hold(**{"agentfly.dev/pool": "shell"})
        fake_kubelet.linger(**{"agentfly.dev/pool": "shell"})
        await made.start()
        await made.counts(starting=4)
        assert await made.end() < 10.0
        fake_kubelet.clear()
        await made.start()
        await made.counts(ready=4, starting=0)

        async def four() -> bool:
            return len(await made.pods()) == 4

        await made.until("none of the earlier starts is left", four)


async def test_lease_of_an_external_api_outlives_the_broker_with_its_address_and_token(
    control_plane: Any, fake_kubelet: Any, tmp_path: Path
) -> None:
    judge = pool(
        "judge",
        type="ExternalAPI",
        scope="Global",
        capacity={"max": 1},
        lease={"ttlSeconds": 45},
        externalAPI={"baseUrl": "URL", "credentials": [{"secretKeyRef": {"name": "judge", "key": "key"}}]},
    )
    del judge["spec"]["container"]
    async with misbehaving() as api, rig(control_plane, tmp_path) as made:
        judge["spec"]["externalAPI"]["baseUrl"] = api.url
        data = {"key": base64.b64encode(KEY.encode()).decode()}
        meta = {"name": "judge", "namespace": made.namespace}
        await made.kube.create(
            SECRETS, {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data}
        )
        await made.apply(judge)
        await made.start()
        client = made.client()
        lease = await client.acquire("judge", "a", deadline=DEADLINE)
        before = lease.info
        assert await ask(lease.base_url, before.token) == 200
        with control_plane.audit() as audit:
            for _ in range(5):
                assert await ask(lease.base_url, before.token) == 200
        assert audit.counts(agent="agentfly-broker") in ({}, {("watch", "pods"): 1})
        await made.end(signal.SIGKILL)
        await made.start()

        async def served() -> bool:
            return await ask(lease.base_url, lease.info.token) == 200

        await made.until("the lease is good again", served, 40.0)
        assert (lease.lost, lease.info) == (False, before)
        assert await client.acquire("judge", "a", deadline=DEADLINE) is lease
        assert set(api.keys) == {KEY}
        shown = [await made.get(wire.POOLS), await made.get(wire.LEASES), made.log.read_text()]
        assert KEY not in str(shown)
        assert before.token not in str(shown)
        await client.close()


# 3. What is asked of the API server.


async def test_warm_acquires_ask_the_api_server_nothing(
    control_plane: Any, fake_kubelet: Any, tmp_path: Path
) -> None:
    async with rig(control_plane, tmp_path, pool(capacity={"min": 4, "max": 4})) as made:
        with control_plane.audit() as audit:
            await made.start()
            await made.counts(ready=4)
        assert audit.writes(agent="agentfly-broker") == {("create", "pods"): 4}, "the count counts"
        async with made.client() as client:
            with control_plane.audit() as audit:
                for number in range(100):
                    async with await client.acquire("shell", f"o{number}", deadline=DEADLINE):
                        pass
                await made.counts(ready=4)
            counts = audit.counts(agent="agentfly-broker")
            assert {key: n for key, n in counts.items() if key[0] != "watch"} == {}
            assert (await made.pool())["resets"] >= 96


# Pools come, change and go.


async def test_pools_follow_their_objects(control_plane: Any, fake_kubelet: Any, tmp_path: Path) -> None:
    async with rig(control_plane, tmp_path) as made:
        await made.start()
        assert await made.get(wire.POOLS) == (200, {})
        await made.apply(pool(capacity={"min": 1, "max": 2}))
        await made.counts(ready=1, max=2)
        await made.apply(pool(capacity={"min": 3, "max": 5}))
        await made.counts(ready=3, max=5)
        client, (lease,) = await hold(made, "a")
        await made.apply(pool(capacity={"min": 3, "max": 5}, container={"cpu": 2}))

        async def rolled() -> bool:
            pods = await made.pods()
            specs = {pod["metadata"]["labels"]["agentfly.dev/spec"] for name, pod in pods.items()}
            return lease.info.member_id in pods and len(pods) >= 3 and len(specs) == 2

        await made.until("idle members are rolled, and the leased one stays", rolled)
        assert not lease.lost
        await lease.release()

        async def one_spec() -> bool:
            pods = await made.pods()
            return lease.info.member_id not in pods and len(pods) == 3

        await made.until("the leased one follows at its release", one_spec)
        control_plane.kubectl("-n", made.namespace, "delete", "resourcepool", "shell", "--wait=false")

        async def gone() -> bool:
            return not await made.pods() and not await made.pool()

        await made.until("nothing is left of a deleted pool", gone)
        with pytest.raises(PoolNotFound):
            await client.acquire("shell", "b", deadline=1)
        await client.close()


@pytest.mark.parametrize("cascade", ["foreground", "background", "orphan"])
async def test_deleted_pool_gets_no_new_member_and_leaves_none(
    control_plane: Any, fake_kubelet: Any, tmp_path: Path, cascade: str
) -> None:
    async with rig(control_plane, tmp_path, pool(capacity={"min": 3, "max": 3})) as made:
        await made.start()
        await made.counts(ready=3)
        with control_plane.audit() as audit:
            control_plane.kubectl(
                *("-n", made.namespace, "delete", "resourcepool", "shell"),
                *(f"--cascade={cascade}", "--timeout=30s"),
            )

            async def gone() -> bool:
                return not await made.pods() and not await made.pool()

            await made.until("nothing is left", gone)
        assert ("create", "pods") not in audit.writes(agent="agentfly-broker")


async def test_pool_that_cannot_be_served_is_shown_with_its_problem(
    control_plane: Any, fake_kubelet: Any, tmp_path: Path
) -> None:
    wrong = pool("game", type="InProcess", inProcess={"entrypoint": "os:system"}, capacity={"max": 1})
    del wrong["spec"]["container"]
    async with rig(control_plane, tmp_path, wrong) as made:
        await made.start()
        found = await made.pool("game")
        assert found["reason"] == "InvalidSpec"
        assert "AGENTFLY_IN_PROCESS_MODULES" in found["problems"][0]


async def test_command_line_finds_the_broker_by_the_proxy_of_its_service(
    control_plane: Any, fake_kubelet: Any, tmp_path: Path
) -> None:
    async with rig(control_plane, tmp_path) as made:
        command = [sys.executable, "-m", "agentfly.cli", "pools", "-n", made.namespace]
        command += ["--kubeconfig", str(control_plane.kubeconfig)]
        said = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        assert (said.returncode, said.stdout) == (2, "")
        assert f"namespace {made.namespace}: has no broker" in said.stderr
        meta = {"name": "agentfly-broker", "namespace": made.namespace}
        ports = [{"name": "http", "port": 7080}]
        spec = {"clusterIP": "None", "ports": ports, "selector": {"no": "pod"}}
        await made.kube.create(
            SERVICES, {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec}
        )
        secret = {"name": "agentfly-broker-client", "namespace": made.namespace}
        data = {"client-token": base64.b64encode(b"t").decode()}
        await made.kube.create(
            SECRETS, {"apiVersion": "v1", "kind": "Secret", "metadata": secret, "data": data}
        )
        said = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        assert (said.returncode, said.stdout) == (2, "")
        # A Service that the path does not name would be a 404, and so no broker.
        assert "its broker does not answer" in said.stderr


# The API server goes away.


async def test_holders_notice_nothing_of_an_api_server_that_restarts(
    control_plane: Any, fake_kubelet: Any, tmp_path: Path
) -> None:
    async with rig(control_plane, tmp_path, pool(capacity={"min": 2, "max": 4})) as made:
        await made.start()
        await made.counts(ready=2)
        client, (lease,) = await hold(made, "a")
        control_plane.kill("kube-apiserver")
        other = await client.acquire("shell", "b", deadline=5)
        await other.release()
        assert await client.heartbeat([lease.info.lease_id]) == {lease.info.lease_id: True}
        control_plane.restart("kube-apiserver")
        await made.apply(pool(capacity={"min": 4, "max": 4}))
        await made.counts(max=4, leased=1, ready=3)
        assert not lease.lost
        await client.close()


async def test_pods_that_vanish_while_the_watch_is_cut_are_replaced(
    control_plane: Any, fake_kubelet: Any, tmp_path: Path
) -> None:
    async with rig(control_plane, tmp_path, pool(capacity={"min": 2, "max": 2})) as made:
        await made.start()
        await made.counts(ready=2)
        before = set(await made.pods())
        control_plane.cut()
        await asyncio.sleep(0.5)
        control_plane.mend()
        victim = sorted(before)[0]
        control_plane.kubectl("-n", made.namespace, "delete", "pod", victim, "--wait=false")

        async def replaced() -> bool:
            pods = set(await made.pods())
            return len(pods) == 2 and victim not in pods

        await made.until("the one that vanished was replaced", replaced, 60.0)
        await made.counts(ready=2)


async def test_broker_that_starts_before_the_api_server_waits_for_it(
    control_plane: Any, fake_kubelet: Any, tmp_path: Path
) -> None:
    async with rig(control_plane, tmp_path, pool(capacity={"min": 1, "max": 1})) as made:
        control_plane.kill("kube-apiserver")
        await made.start(ready=False)

        async def live() -> bool:
            return (await made.get(wire.HEALTH))[0] == 200

        await made.until("it answers", live)
        assert await made.get(wire.HEALTH) == (200, {"live": True, "ready": False})
        control_plane.restart("kube-apiserver")
        await made.until("it is ready", made.ready, 60.0)
        await made.counts(ready=1)
