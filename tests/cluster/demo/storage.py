"""What the administrator of a cluster has: storage. Here it is a folder of this machine, with environments.

Guarantees:
1. A claim's volume is the same folder on every node, with this machine's environments mounted into it,
   read-only: what pods leave there can be read here, but for the environments.
2. Deleting a claim deletes nothing that is on it.
"""

from collections.abc import Mapping
from pathlib import Path

import yaml

from agentfly.local import environments
from tests.cluster.cluster import Cluster
from tests.cluster.demo import image
from tests.cluster.machine import Unavailable


def environment(role: image.Role) -> Path:
    """The folder of an environment of this machine; it is built if need be.

    Raises:
        Unavailable: it has another Python than the images.
    """
    home = environments.build(role).parents[1]
    if not (home / "lib" / f"python{image.PYTHON}").is_dir():
        raise Unavailable(
            f"{role} environment: {home} is not of Python {image.PYTHON}, which the images have",
            hints=[f"rm -r .venv; make setup PYTHON=python{image.PYTHON}"],
        )
    return home


def folder(cluster: Cluster, namespace: str, claim: str) -> Path:
    """Where a claim's files are on this machine."""
    return cluster.folder / "claims" / f"{namespace}.{claim}"


def provide(cluster: Cluster, namespace: str, claim: str, homes: Mapping[image.Role, Path]) -> Path:
    """Makes the volume that a claim will be bound to; its folder.

    Args:
        homes: environments that the pods of the claim find on it.
    """
    top = folder(cluster, namespace, claim)
    top.mkdir(parents=True, exist_ok=True)
    top.chmod(0o1777)
    for role, home in homes.items():
        target = top / image.inside(role)
        target.mkdir(parents=True, exist_ok=True)
        for node in cluster.nodes():
            for words in (("--bind", str(home)), ("-o", "remount,bind,ro")):
                cluster.x("mount", *words, str(target), where=node.name)
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{namespace}-{claim}"},
        "spec": {
            "capacity": {"storage": "10Gi"},
            "accessModes": ["ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": str(top)},
            "claimRef": {"namespace": namespace, "name": claim},
        },
    }
    cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(volume))
    return top


def withdraw(cluster: Cluster, namespace: str, claim: str) -> None:
    """Takes the volume of a claim away, once that is gone; its folder stays as long as the cluster."""
    cluster.kubectl("delete", "pv", f"{namespace}-{claim}", "--ignore-not-found", "--wait=false")
