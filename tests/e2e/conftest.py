"""What the end-to-end tests share: the test cluster."""

from pathlib import Path

import pytest

from tests.cluster.fixtures import control_plane, fake_kubelet, node, product_node, two_nodes
from tests.e2e.world import installed

__all__ = ["control_plane", "fake_kubelet", "installed", "node", "product_node", "two_nodes"]

FIRST_S = 900
"""The first test of a session waits for the cluster, and for images where the sources changed."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives the tests of this folder the time that a cluster needs, unless they say how much they need."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(FIRST_S))
