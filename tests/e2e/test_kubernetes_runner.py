"""Sandboxes in real pods: what `agentfly.resources.runners.kubernetes` promises, on the real node."""

import json
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.api import wait

pytestmark = pytest.mark.timeout(300)
IMAGE = "agentfly-test/python:dev"
REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("security", ["baseline", "restricted"])
def test_life_of_a_sandbox(product_node, security):
    namespace = f"t-{secrets.token_hex(4)}"
    labels = {"pod-security.kubernetes.io/enforce": security}
    product_node.api.create("/api/v1/namespaces", {"metadata": {"name": namespace, "labels": labels}})
    try:
        root = f"/api/v1/namespaces/{namespace}"
        wait("config map", lambda: product_node.api.exists(f"{root}/configmaps/kube-root-ca.crt"), 30.0)
        wait("service account", lambda: product_node.api.exists(f"{root}/serviceaccounts/default"), 30.0)
        command = [*product_node.enter("control"), sys.executable, "-m", "tests.e2e.life_in_a_pod"]
        command += [str(product_node.inside_kubeconfig), namespace, IMAGE, security]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=200, check=False, cwd=REPOSITORY
        )
        assert done.returncode == 0, done.stderr[-4000:]
        told = json.loads(done.stdout.splitlines()[-1])
    finally:
        product_node.api.call("DELETE", f"/api/v1/namespaces/{namespace}")
    assert told["pristine"] == ["$(HOME) hi\n0\n"]
    assert told["old_token"] == "lost"
    assert told["found"] == ["pool", "pool-0a1b-0", "leased", "the note"]
    assert told["exec_after"] == "still here\n"
    assert "no/such:1" in told["no_image"]
    assert "Deleted" in told["deleted"]
    assert told["left"] == []
    assert told["method"] == {"baseline": "overlay-shared-pid", "restricted": "scratch"}[security]
    assert told["same_pod"]
    assert told["reset_p50_ms"] / 1000 * 10 < told["start_s"]
