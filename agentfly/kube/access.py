"""Where the API server is and what proves who we are: in a pod its service account, elsewhere a kubeconfig.

Guarantees:
1. A named kubeconfig is used; else ``KUBECONFIG``; else the service account of the pod; else ~/.kube/config.
2. Each reading gives what is there now, so a rotated token or certificate is found by reading again.
3. The TLS context stays the same object while authority and certificate are the same: reading again costs no
   connections.
4. What cannot be read is told with its path and what to do.

Not here: when to read again (``client``).
"""

import math
import os
import ssl
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from agentfly.kube.errors import KubeError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class Access:
    """One reading. ``authorization`` is the header's value, "" where a certificate says who we are."""

    server: str
    namespace: str
    authorization: str = ""
    tls: ssl.SSLContext | None = None
    server_name: str | None = None
    proxy: str | None = None


class Login(ABC):
    """Reads the access; a reading may block, and may be repeated at any time."""

    valid_s: float
    """Seconds after which a reading may be out of date though nobody refused it."""

    def __init__(self) -> None:
        self._tls: tuple[object, ssl.SSLContext] | None = None

    @abstractmethod
    def read(self) -> Access:
        """What is there now.

        Raises:
            KubeError: it cannot be read.
        """

    def _context(self, authority: str, certificate: str, key: str, verify: bool) -> ssl.SSLContext:
        """The TLS context of these files ("" for none), the last one if they say what they said then."""
        said = tuple(Path(path).read_bytes() if path else b"" for path in (authority, certificate, key))
        if self._tls is None or self._tls[0] != (said, verify):
            made = ssl.create_default_context(cafile=authority or None)
            if not verify:
                made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
            if certificate:
                made.load_cert_chain(certificate, key or None)
            self._tls = (said, verify), made
        return self._tls[1]


class PodLogin(Login):
    """The service account that is mounted into the pod."""

    valid_s = 30.0

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        super().__init__()
        self._folder = folder
        self._environment = environment

    def read(self) -> Access:
        """See ``Login.read``."""
        host = self._environment["KUBERNETES_SERVICE_HOST"]
        host = f"[{host}]" if ":" in host else host
        port = self._environment.get("KUBERNETES_SERVICE_PORT", "443")
        try:
            token = (self._folder / "token").read_text().strip()
            namespace = (self._folder / "namespace").read_text().strip()
            tls = self._context(str(self._folder / "ca.crt"), "", "", True)
        except (OSError, ssl.SSLError) as error:
            raise KubeError(
                f"service account: {self._folder} cannot be used: {error}",
                hints=["the pod needs automountServiceAccountToken: true"],
            ) from error
        return Access(f"https://{host}:{port}", namespace, f"Bearer {token}", tls)


class KubeconfigLogin(Login):
    """A kubeconfig: certificates, tokens, and programs that print one."""

    valid_s = math.inf  # whoever refuses what was read says so

    def __init__(self, path: str, context: str | None) -> None:
        super().__init__()
        self._path = path
        self._name = context

    def read(self) -> Access:
        """See ``Login.read``."""
        try:
            from kubernetes.client import Configuration
            from kubernetes.config import kube_config
        except ImportError as error:
            raise KubeError(
                f"kubeconfig: {self._path} cannot be read: the package kubernetes is not installed",
                hints=['pip install "agentfly[operator]"'],
            ) from error
        found, loader = Configuration(), cast(Any, kube_config)  # the package has no types
        found.host = ""
        try:
            loader.load_kube_config(self._path, self._name, found, persist_config=False)
            contexts, current = loader.list_kube_config_contexts(self._path)
            tls = None
            if found.host.startswith("https"):
                files = (found.ssl_ca_cert or "", found.cert_file or "", found.key_file or "")
                tls = self._context(*files, bool(found.verify_ssl))
        except Exception as error:  # the package raises whatever a wrong file leads it to
            said = " ".join(str(error).split())
            raise KubeError(
                f"kubeconfig: {self._path} cannot be used: {said or type(error).__name__}",
                hints=["name another with KUBECONFIG=/path; what it says: kubectl config view"],
            ) from error
        chosen = next((each for each in contexts if each["name"] == self._name), current)
        return Access(
            server=found.host.rstrip("/"),
            namespace=str(chosen["context"].get("namespace") or "default"),
            authorization=str(found.api_key.get("BearerToken") or found.api_key.get("authorization") or ""),
            tls=tls,
            server_name=found.tls_server_name or None,
            proxy=found.proxy or None,
        )


def find_login(
    kubeconfig: str | Path | None = None,
    context: str | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    service_account: Path = SERVICE_ACCOUNT,
) -> Login:
    """Where to read the access. Nothing is read yet.

    Args:
        kubeconfig: a path, or several separated by ``:`` as in ``KUBECONFIG``.
        context: of the kubeconfig; None is its current one.
        environment: None is this process's.
    """
    environment = os.environ if environment is None else environment
    named = kubeconfig if kubeconfig is not None else environment.get("KUBECONFIG")
    if not named and context is None and environment.get("KUBERNETES_SERVICE_HOST"):
        return PodLogin(service_account, environment)
    return KubeconfigLogin(str(named or Path.home() / ".kube" / "config"), context)
