"""Kueue's own controller beside the control plane: its definitions, configuration and webhooks.

Guarantees:
1. It manages namespaces that are labelled `MANAGED`, and no webhook of it sees another one.
2. Its webhooks come after it listens: before that they would refuse every write.
3. The path at which it looks for certificates is compiled in: it gets an /etc of its own, and leaves that of
   this machine as it is.
"""

import base64
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.control_plane import Component
from tests.cluster.machine import ClusterError
from tests.cluster.pki import Authority
from tests.cluster.space import Space

MANAGED = "kueue-managed"
NAMESPACE = "kueue-system"
HEALTH = "127.0.0.1:18081"
PORT = 19443
FRAMEWORKS = ("batch/job",)
_KINDS = ("clusterqueues", "resourceflavors", "workloads", "cohorts", "jobs")
_START = (
    "mount -t tmpfs tmpfs /etc && mkdir -p /etc/kueue/metrics && "
    'cp -r "$1" /etc/kueue/metrics/certs && exec "$2" --config="$3" --zap-log-level=2'
)


def definitions(program: Path) -> Path:
    """The folder with the definitions of its kinds."""
    return program / "bases"


def component(folder: Path, program: Path, authority: Authority, kubeconfig: Path) -> Component:
    """The controller; its files are below ``folder``."""
    certificate, key = authority.server("kueue", ["127.0.0.1", "localhost"])
    files = folder / "kueue"
    certs = files / "certs"
    certs.mkdir(parents=True, exist_ok=True)
    for source, name in ((certificate, "tls.crt"), (key, "tls.key")):
        (certs / name).write_bytes(source.read_bytes())
    config = files / "config.yaml"
    config.write_text(yaml.safe_dump(_configuration(certs)))
    start = ("sh", "-c", _START, "kueue", str(certs), str(program / "kueue"), str(config))
    command = ("unshare", "--mount", "--propagation=private", *start)
    return Component("kueue", command, env={"KUBECONFIG": str(kubeconfig)})


def works(space: Space) -> bool:
    """Whether it is ready."""
    question = f"import urllib.request; urllib.request.urlopen('http://{HEALTH}/readyz', timeout=5)"
    try:
        space.run(sys.executable, "-I", "-c", question, timeout_s=15.0)
    except (ClusterError, TimeoutError):
        return False
    return True


def webhooks(program: Path, authority: Authority) -> str:
    """Its webhooks of the kinds that it manages, by address, in YAML."""
    bundle = base64.b64encode(authority.ca.read_bytes()).decode()
    found = []
    for each in yaml.safe_load_all((program / "manifests.yaml").read_text()):
        hooks = [hook for hook in each["webhooks"] if _wanted(hook)]
        for hook in hooks:
            path = hook["clientConfig"]["service"]["path"]
            hook["clientConfig"] = {"url": f"https://127.0.0.1:{PORT}{path}", "caBundle": bundle}
            hook["timeoutSeconds"] = 5
            hook["namespaceSelector"] = {"matchLabels": {MANAGED: "true"}}
        name = f"kueue-{each['metadata']['name'].split('-')[0]}"
        found.append({**each, "metadata": {"name": name}, "webhooks": hooks})
    return yaml.safe_dump_all(found)


def _wanted(hook: dict[str, Any]) -> bool:
    kinds = {kind.split("/")[0] for rule in hook["rules"] for kind in rule["resources"]}
    return bool(kinds & set(_KINDS))


def _configuration(certs: Path) -> dict[str, Any]:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": NAMESPACE,
        "health": {"healthProbeBindAddress": HEALTH},
        "metrics": {"bindAddress": "127.0.0.1:18443"},
        "webhook": {"host": "127.0.0.1", "port": PORT, "certDir": str(certs)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "clientConnection": {"qps": 200, "burst": 400},
        "featureGates": {"VisibilityOnDemand": False},
        "managedJobsNamespaceSelector": {"matchLabels": {MANAGED: "true"}},
        "integrations": {"frameworks": list(FRAMEWORKS)},
    }
