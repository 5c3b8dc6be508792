"""What the integration tests share: the test cluster."""

from pathlib import Path

import pytest

from tests.cluster.fixtures import control_plane, fake_kubelet

__all__ = ["control_plane", "fake_kubelet"]

LATE = (
    r"ignore:Exception ignored in. <(socket\.socket|function _SelectorTransport)"
    ":pytest.PytestUnraisableExceptionWarning"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A connection whose other end was killed may be closed only after the loop of its test."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(LATE))
