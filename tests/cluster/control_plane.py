"""What the control plane consists of: etcd, API server, controller manager and scheduler, with their flags.

Guarantees:
1. Everything listens inside the cluster's namespace only.
2. The API server writes one audit line for each finished request that is not the control plane's own.
3. `kubernetes.default` has the API server's address as endpoint; webhooks by Service need no kube-proxy.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.pki import Authority
from tests.cluster.space import API_SERVICE, CONTROL, SERVICES

PORT = 6443
SERVER = f"https://{CONTROL}:{PORT}"
ETCD = "http://127.0.0.1:2379"
ETCD_PEER = "http://127.0.0.1:2380"

AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
omitManagedFields: true
rules:
- {level: None, users: ["system:apiserver", "system:kube-controller-manager", "system:kube-scheduler"]}
- {level: None, users: ["system:kube-proxy", "system:kube-router"]}
- {level: None, userGroups: ["system:nodes"]}
- {level: None, userGroups: ["system:serviceaccounts:kube-system"]}
- {level: None, nonResourceURLs: ["/healthz*", "/readyz*", "/livez*", "/metrics", "/openapi*", "/version"]}
- {level: Metadata}
"""


@dataclasses.dataclass(frozen=True)
class Component:
    """A program of the cluster: how it is started, and in which namespaces."""

    name: str
    command: tuple[str, ...]
    space: str = "control"
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


def components(
    folder: Path, authority: Authority, etcd: Path, kubernetes: Path, flags: tuple[str, ...] = ()
) -> list[Component]:
    """The control plane, in the order in which it starts; its files are below ``folder``.

    Args:
        etcd: the folder with etcd's program.
        kubernetes: the folder with Kubernetes' programs.
        flags: more flags of the API server; of a repeated flag the last one counts.
    """
    policy = folder / "audit-policy.yaml"
    policy.write_text(AUDIT_POLICY)
    private, public = authority.service_accounts()
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc"]
    names += ["kubernetes.default.svc.cluster.local", "localhost", "127.0.0.1", API_SERVICE, CONTROL]
    certificate, key = authority.server("apiserver", names)
    kubelet_certificate, kubelet_key = authority.client(
        "apiserver-kubelet", "kube-apiserver", "system:masters"
    )
    manager = authority.kubeconfig(folder / "kcm.kubeconfig", SERVER, "system:kube-controller-manager")
    scheduler = authority.kubeconfig(folder / "scheduler.kubeconfig", SERVER, "system:kube-scheduler")
    return [
        Component(
            "etcd",
            (
                str(etcd / "etcd"),
                f"--data-dir={folder / 'etcd'}",
                f"--listen-client-urls={ETCD}",
                f"--advertise-client-urls={ETCD}",
                f"--listen-peer-urls={ETCD_PEER}",
                f"--initial-advertise-peer-urls={ETCD_PEER}",
                f"--initial-cluster=default={ETCD_PEER}",
                "--unsafe-no-fsync",
                "--quota-backend-bytes=4294967296",
                "--log-level=warn",
            ),
        ),
        Component(
            "kube-apiserver",
            (
                str(kubernetes / "kube-apiserver"),
                f"--etcd-servers={ETCD}",
                "--bind-address=0.0.0.0",
                f"--advertise-address={CONTROL}",
                f"--secure-port={PORT}",
                f"--tls-cert-file={certificate}",
                f"--tls-private-key-file={key}",
                f"--client-ca-file={authority.ca}",
                f"--service-account-key-file={public}",
                f"--service-account-signing-key-file={private}",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-cluster-ip-range={SERVICES}",
                "--authorization-mode=Node,RBAC",
                "--enable-admission-plugins=NodeRestriction",
                "--allow-privileged=true",
                f"--kubelet-client-certificate={kubelet_certificate}",
                f"--kubelet-client-key={kubelet_key}",
                f"--kubelet-certificate-authority={authority.ca}",
                "--kubelet-preferred-address-types=InternalIP",
                "--enable-aggregator-routing=true",
                "--max-requests-inflight=800",
                "--max-mutating-requests-inflight=400",
                "--profiling=false",
                f"--audit-policy-file={policy}",
                f"--audit-log-path={folder / 'audit.log'}",
                "--audit-log-mode=blocking",
                "--audit-log-maxsize=100000",
                *flags,
            ),
        ),
        Component(
            "kube-controller-manager",
            (
                str(kubernetes / "kube-controller-manager"),
                f"--kubeconfig={manager}",
                f"--authentication-kubeconfig={manager}",
                f"--authorization-kubeconfig={manager}",
                f"--service-account-private-key-file={private}",
                f"--root-ca-file={authority.ca}",
                "--use-service-account-credentials",
                "--leader-elect=false",
                "--bind-address=127.0.0.1",
                "--kube-api-qps=200",
                "--kube-api-burst=400",
                "--concurrent-gc-syncs=20",
                "--pvclaimbinder-sync-period=1s",  # how long a claim may wait for a volume that is there
                # Half of the default: a lost node is missed in a test's time.
                "--node-monitor-grace-period=25s",
            ),
        ),
        Component(
            "kube-scheduler",
            (
                str(kubernetes / "kube-scheduler"),
                f"--kubeconfig={scheduler}",
                f"--authentication-kubeconfig={scheduler}",
                f"--authorization-kubeconfig={scheduler}",
                "--leader-elect=false",
                "--bind-address=127.0.0.1",
                "--kube-api-qps=500",
                "--kube-api-burst=1000",
            ),
        ),
    ]
