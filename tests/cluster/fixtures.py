"""pytest fixtures of the test cluster, for tests/integration and tests/e2e.

    control_plane   etcd, API server, controller manager, scheduler; no node (about 6 s, once a session)
    fake_kubelet    claims a node of it for one test: pods run as far as the API shows
    node            a cluster of its own with one real node (about 15 s, once a session)
    product_node    the same cluster, with the images of the product as its sources are now
    queueing        a control plane of its own, to which tests may add Kueue (about 6 s, once a session)
    two_nodes       another cluster, with a node of each kind (about 20 s, for one module)

With AGENTFLY_TEST_KUBECONFIG all use that cluster instead, which must have the images then. Where this
machine cannot run one, tests are skipped with the part that it lacks as the reason.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster import images, product
from tests.cluster.cluster import Cluster, running
from tests.cluster.fake_kubelet import FakeKubelet
from tests.cluster.foreign import ForeignCluster
from tests.cluster.machine import Unavailable
from tests.cluster.node import Kind

OTHER = "AGENTFLY_TEST_KUBECONFIG"


@pytest.fixture(scope="session")
def control_plane() -> Iterator[Cluster | ForeignCluster]:
    """A control plane of this session: `.kubeconfig`, `.kubectl()`, `.audit()`, `.kill()`, `.restart()`."""
    with _cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def queueing() -> Iterator[Cluster | ForeignCluster]:
    """Another control plane: `.define_kueue()` and `.add_kueue()` change it for good."""
    with _cluster() as cluster:
        yield cluster


@pytest.fixture
def fake_kubelet(control_plane: Cluster | ForeignCluster) -> Iterator[FakeKubelet]:
    """One fake node for the length of a test; its pods are deleted afterwards."""
    with FakeKubelet(control_plane.kubeconfig) as kubelet:
        yield kubelet


@pytest.fixture(scope="session")
def node() -> Iterator[Cluster | ForeignCluster]:
    """A cluster with one real node of the kind containerd2, which has the images busybox and python."""
    with _cluster(["containerd2"]) as cluster:
        if isinstance(cluster, Cluster):
            cluster.import_image(images.busybox(), images.python())
        yield cluster


@pytest.fixture(scope="session")
def product_node(node: Cluster | ForeignCluster) -> Cluster | ForeignCluster:
    """The cluster of `node`, with the images agentfly/agentfly:dev and agentfly/sandboxd:dev from then on."""
    if isinstance(node, Cluster):
        with _skipping():
            node.import_image(product.agentfly_image(), product.sandboxd_image())
    return node


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster | ForeignCluster]:
    """A cluster of its own: pods of other modules must not come to a node without their images."""
    with _cluster(["containerd2", "debian"]) as cluster:
        if isinstance(cluster, Cluster):
            cluster.import_image(images.busybox(), images.python())
        yield cluster


@contextlib.contextmanager
def _cluster(nodes: Sequence[Kind] = ()) -> Iterator[Cluster | ForeignCluster]:
    if other := os.environ.get(OTHER):
        yield ForeignCluster(Path(other))
        return
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="agentfly-cluster-"))
        with _skipping():
            cluster = stack.enter_context(running(Path(folder) / "c", nodes=nodes))
        yield cluster


@contextlib.contextmanager
def _skipping() -> Iterator[None]:
    try:
        yield
    except Unavailable as error:
        pytest.skip(f"test cluster: {error.render()}")
