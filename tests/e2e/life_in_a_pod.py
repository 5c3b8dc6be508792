"""The life of sandboxes on a real node, told as JSON. It runs inside the cluster's network.

python -m tests.e2e.life_in_a_pod KUBECONFIG NAMESPACE IMAGE SECURITY
"""

import asyncio
import json
import statistics
import sys
import time

from agentfly.kube import CONFIG_MAPS, PODS, Informer, Kube, project_pod
from agentfly.resources.errors import LeaseLost, StartFailed
from agentfly.resources.runners.kubernetes import MEMBER_LABELS, KubernetesRunner, PodCluster, Signer
from agentfly.resources.spec import ContainerSpec, PodOptions
from agentfly.sandbox import SandboxClient, SandboxLeaseLost

RESETS = 5


async def life(config, namespace, image, security):
    told = {}
    async with Kube.connect("agentfly-test/1", kubeconfig=config) as kube:
        found = await kube.get(CONFIG_MAPS, "kube-root-ca.crt", namespace)
        owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "kube-root-ca.crt", "controller": True}
        owner["uid"] = found["metadata"]["uid"]
        informer = Informer(kube, PODS, namespace, MEMBER_LABELS, project=project_pod)
        async with informer:
            await informer.synced()
            cluster = PodCluster(kube, informer, namespace, lambda pool: owner)

            def broker():
                return KubernetesRunner(cluster, Signer(b"k" * 32), sandboxd_image="agentfly/sandboxd:dev")

            options = PodOptions(security=security, pull_policy="Never")
            spec = ContainerSpec(
                runtime="kubernetes",
                image=image,
                pod=options,
                env={"GREETING": "$(HOME) hi"},
                memory_mb=256,
                cpu=0.2,
            )
            runner = broker()
            began = time.monotonic()
            member = await runner.start(spec, "pool-0a1b-0")
            told |= {"start_s": time.monotonic() - began, "method": member.reset_method}
            try:
                resets, member = await lease_and_reset(runner, member)
                told |= resets
                told |= await found_again(runner, broker(), member)
                told |= await refused(runner, spec)
            finally:
                began = time.monotonic()
                await runner.stop(member)
                told["stop_s"] = time.monotonic() - began
            told["left"] = [each["metadata"]["name"] for each in await kube.list(PODS, namespace)]
            await runner.close()
    return told


async def lease_and_reset(runner, member):
    told, took, pristine = {}, [], []
    for n in range(RESETS):
        await runner.lease(member, f"owner-{n}", 0, f"t{n}", 30, f"note-{n}")
        async with SandboxClient(member.address, f"t{n}") as sandbox:
            result = await sandbox.exec("echo $GREETING; ls; test ! -e /tmp/mark; echo $?")
            pristine.append(result.stdout)
            await sandbox.exec("touch /tmp/mark mark; (setsid sleep 600 &) ; echo done")
        began = time.monotonic()
        again = await runner.reset(member)
        took.append(time.monotonic() - began)
        assert again is not None, "the daemon could not clean its sandbox"
        assert again.incarnation == member.incarnation + 1
        told["same_pod"] = again.handle is member.handle
        member = again
    async with SandboxClient(member.address, "t0") as old:
        try:
            await old.exec("true")
            told["old_token"] = "accepted"
        except SandboxLeaseLost:
            told["old_token"] = "lost"
    told |= {"pristine": sorted(set(pristine)), "reset_p50_ms": 1000 * statistics.median(took)}
    return told, member


async def found_again(runner, later, member):
    await runner.lease(member, "owner", 7, "kept", 30, "the note")
    found = await later.find()
    [one] = found
    async with SandboxClient(one.member.address, "kept") as sandbox:
        said = (await sandbox.exec("echo still here")).stdout
    await later.lease(one.member, "owner", 7, "kept", 30, "the note")
    await later.close()
    return {"found": [one.pool, one.member.id, one.state, one.note], "exec_after": said}


async def refused(runner, spec):
    told = {}
    try:
        await runner.start(spec.model_copy(update={"image": "no/such:1"}), "pool-0a1b-1")
    except StartFailed as error:
        told["no_image"] = error.reason
    dying = await runner.start(spec, "pool-0a1b-2")
    await runner.lease(dying, "owner", 0, "t", 30)
    kube = runner._lives._cluster.kube
    await kube.delete(PODS, dying.id, runner._lives._cluster.namespace, grace_s=1)
    for _ in range(100):
        try:
            await runner.lease(dying, "owner", 0, "t", 30)
        except LeaseLost as error:
            told["deleted"] = str(error)
            break
        await asyncio.sleep(0.1)
    await runner.stop(dying)
    return told


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(asyncio.wait_for(life(*sys.argv[1:]), 150))) + "\n")
