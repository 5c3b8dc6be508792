"""Namespaces of one test each, and clients in them."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator

from agentfly.kube import NAMESPACES, SERVICE_ACCOUNTS, Kube, KubeError, Obj


@contextlib.asynccontextmanager
async def namespace(cluster: object, agent: str = "agentfly-test/1", **labels: str) -> AsyncIterator[Kube]:
    """A client whose namespace is a new one; ``labels`` are those of Pod Security: ``enforce="baseline"``."""
    name = f"t-{secrets.token_hex(4)}"
    async with Kube.connect(agent, kubeconfig=cluster.kubeconfig) as kube:  # type: ignore[attr-defined]
        levels = {f"pod-security.kubernetes.io/{mode}": level for mode, level in labels.items()}
        await kube.create(NAMESPACES, {"metadata": {"name": name, "labels": levels}})
        try:
            async with asyncio.timeout(30):
                while True:  # without it no pod is admitted
                    with contextlib.suppress(KubeError):
                        await kube.get(SERVICE_ACCOUNTS, "default", name)
                        break
                    await asyncio.sleep(0.05)
            yield In(kube, name)
        finally:
            await kube.delete(NAMESPACES, name)


class In(Kube):
    """The same client, at home in another namespace."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self.__dict__ = kube.__dict__
        self._home = namespace

    @property
    def namespace(self) -> str:
        """The namespace that is meant where none is named."""
        return self._home


def pod(name: str, labels: dict[str, str] | None = None, **spec: object) -> Obj:
    """A pod that no scheduler looks at, unless ``spec`` says otherwise."""
    containers = [{"name": "c", "image": "none"}]
    return {
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {"schedulerName": "none", "containers": containers} | spec,
    }
