"""The client on a real API server. Numbers are those of agentfly/kube/client.py."""

import asyncio
import base64
import contextlib
import json
from pathlib import Path

import pytest
import yaml

from agentfly.kube import CONFIG_MAPS, PODS, ROLE_BINDINGS, ROLES, SERVICE_ACCOUNTS, Conflict, Kube, KubeError
from agentfly.kube.access import PodLogin
from tests.integration.namespaces import namespace, pod

pytestmark = pytest.mark.timeout(180)


async def test_objects_from_creation_to_deletion(control_plane):
    async with namespace(control_plane) as kube:
        made = await kube.create(PODS, pod("a"))
        with pytest.raises(Conflict) as caught:
            await kube.create(PODS, pod("a"))
        assert caught.value.reason == "AlreadyExists"
        assert (await kube.get(PODS, "a"))["metadata"]["uid"] == made["metadata"]["uid"]
        with pytest.raises(Conflict):
            await kube.delete(PODS, "a", uid="00000000-0000-0000-0000-000000000000")
        assert await kube.delete(PODS, "a", uid=made["metadata"]["uid"], grace_s=0)
        assert not await kube.delete(PODS, "a")


async def test_what_is_applied_again_changes_nothing_and_takes_only_its_own_fields(control_plane):
    async with namespace(control_plane) as kube:
        mine = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "a"},
            "data": {"mine": "1"},
        }
        first = await kube.apply(CONFIG_MAPS, mine)
        again = await kube.apply(CONFIG_MAPS, mine)
        assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
        assert first["metadata"]["managedFields"][0]["manager"] == "agentfly"
        theirs = mine | {"data": {"mine": "2", "theirs": "x"}}
        control_plane.kubectl(
            *["apply", "--server-side", "--force-conflicts", "--field-manager=other"],
            *["-n", kube.namespace, "-f", "-"],
            stdin=json.dumps(theirs),
        )
        with pytest.raises(Conflict):
            await kube.apply(CONFIG_MAPS, mine, force=False)
        forced = await kube.apply(CONFIG_MAPS, mine)
        assert forced["data"] == {"mine": "1", "theirs": "x"}


async def test_stale_replace_is_a_conflict(control_plane):
    async with namespace(control_plane) as kube:
        made = await kube.create(CONFIG_MAPS, {"metadata": {"name": "a"}, "data": {"n": "1"}})
        await kube.replace(CONFIG_MAPS, made | {"data": {"n": "2"}})
        with pytest.raises(Conflict):
            await kube.replace(CONFIG_MAPS, made | {"data": {"n": "3"}})


async def test_status_is_a_subresource(control_plane):
    async with namespace(control_plane) as kube:
        await kube.create(PODS, pod("a"))
        patched = await kube.patch_status(PODS, "a", {"phase": "Running"})
        assert patched["status"]["phase"] == "Running"
        assert patched["spec"]["schedulerName"] == "none"


async def test_list_in_pages_has_everything_once(control_plane, monkeypatch):
    monkeypatch.setattr("agentfly.kube.client.PAGE", 7)
    async with namespace(control_plane) as kube:
        names = {f"m{n}" for n in range(30)}
        await asyncio.gather(*(kube.create(CONFIG_MAPS, {"metadata": {"name": name}}) for name in names))
        with control_plane.audit() as audit:
            found = [each["metadata"]["name"] for each in await kube.list(CONFIG_MAPS, kube.namespace)]
        assert sorted(set(found) - {"kube-root-ca.crt"}) == sorted(names)
        assert len(found) == len(set(found))
        assert audit.counts(agent="agentfly-test/1") == {("list", "configmaps"): 5}


async def test_api_server_that_dies_between_writes_loses_and_doubles_none(control_plane):
    """1, 2. Creations go on over a killed API server; each object is there once."""
    async with namespace(control_plane) as kube:
        names = [f"m{n:03}" for n in range(120)]

        async def create(name: str, after: float) -> None:
            await asyncio.sleep(after)
            with contextlib.suppress(Conflict):  # its first try was carried out, and the answer lost
                await kube.create(CONFIG_MAPS, {"metadata": {"name": name}})

        work = asyncio.gather(*(create(name, n * 0.01) for n, name in enumerate(names)))
        await asyncio.sleep(0.4)
        await asyncio.to_thread(control_plane.restart, "kube-apiserver")
        await asyncio.wait_for(work, 60)
        found = [each["metadata"]["name"] for each in await kube.list(CONFIG_MAPS, kube.namespace)]
        assert sorted(set(found) - {"kube-root-ca.crt"}) == names


async def test_cut_connections_are_made_anew(control_plane):
    async with namespace(control_plane) as kube:
        await kube.create(CONFIG_MAPS, {"metadata": {"name": "a"}})
        control_plane.cut()
        reading = asyncio.create_task(kube.get(CONFIG_MAPS, "a"))
        await asyncio.sleep(0.5)
        control_plane.mend()
        assert (await asyncio.wait_for(reading, 20))["metadata"]["name"] == "a"


async def test_pod_has_the_rights_of_its_service_account_and_no_others(control_plane, tmp_path):
    """4. A token that is replaced on disk is used as soon as the old one is refused."""
    async with namespace(control_plane) as kube:
        here = kube.namespace
        await kube.create(SERVICE_ACCOUNTS, {"metadata": {"name": "reader"}})
        rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "get"]}]
        await kube.create(ROLES, {"metadata": {"name": "reader"}, "rules": rules})
        subject = {"kind": "ServiceAccount", "name": "reader", "namespace": here}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"}
        binding = {"metadata": {"name": "reader"}, "subjects": [subject], "roleRef": role}
        await kube.create(ROLE_BINDINGS, binding)
        path = SERVICE_ACCOUNTS.path(here, "reader", "token")
        token = (await kube.request("POST", path, body={"spec": {}}))["status"]["token"]
        host, port = kube.server.removeprefix("https://").split(":")
        (tmp_path / "namespace").write_text(here)
        (tmp_path / "ca.crt").write_text(_authority(control_plane))
        (tmp_path / "token").write_text("not.a.token")
        environment = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        async with Kube("agentfly-pod/1", PodLogin(tmp_path, environment)) as inside:
            assert inside.namespace == here
            with pytest.raises(KubeError) as caught:
                await inside.list(PODS, here)
            assert caught.value.status == 401
            (tmp_path / "token").write_text(token)
            assert await inside.list(PODS, here) == []
            with pytest.raises(KubeError, match='reader" cannot') as caught:
                await inside.list(CONFIG_MAPS, here)
            assert (caught.value.status, caught.value.reason) == (403, "Forbidden")
            assert caught.value.hints


def _authority(cluster: object) -> str:
    config = yaml.safe_load(cluster.kubeconfig.read_text())  # type: ignore[attr-defined]
    found = config["clusters"][0]["cluster"]
    data = found.get("certificate-authority-data")
    if data is not None:
        return base64.b64decode(data).decode()
    return Path(found["certificate-authority"]).read_text()
