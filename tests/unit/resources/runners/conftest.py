import pytest

from agentfly.resources.runners.external import limits as external_limits
from tests.unit.resources.runners.misbehaving_api import KEY, OTHER, misbehaving


@pytest.fixture
async def api(monkeypatch):
    """An API that misbehaves as told, keys for it in the environment, and pauses that nobody notices."""
    monkeypatch.setattr(external_limits, "BACKOFF_S", (0.001, 0.01))
    monkeypatch.setenv("FIRST", KEY)
    monkeypatch.setenv("OTHER", OTHER)
    async with misbehaving() as server:
        yield server
