"""A cluster that was there before: its API can be used, its processes cannot.

Guarantees:
1. A test that needs more than the API is skipped, with what it needs as the reason.
"""

from pathlib import Path
from typing import NoReturn

import pytest

from tests.cluster.api import Api
from tests.cluster.cluster import kubectl
from tests.cluster.machine import tool


class ForeignCluster:
    """The cluster of a kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig

    @property
    def api(self) -> Api:
        """The API server as the user of the kubeconfig."""
        return Api(self.kubeconfig)

    def kubectl(
        self, *args: str, stdin: str | None = None, check: bool = True, timeout_s: float = 60.0
    ) -> str:
        """What kubectl prints."""
        program = tool("kubectl", "install kubectl")
        return kubectl(program, self.kubeconfig, args, stdin, check, timeout_s)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        pytest.skip(f"{name}: needs a cluster of tests/cluster, and AGENTFLY_TEST_KUBECONFIG names another")
