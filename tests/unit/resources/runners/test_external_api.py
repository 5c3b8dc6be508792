"""Gateways of external APIs: the contract of runners, leases, and the engine over them."""

import os
from pathlib import Path

import pytest

from agentfly.resources.runners.external_api import ExternalAPIRunner
from agentfly.resources.spec import ExternalAPISpec
from tests.unit.resources.runner_contract import RunnerContract

SPEC = ExternalAPISpec(base_url="http://127.0.0.1:9/v1")


def listening() -> set[str]:
    """The TCP sockets on which this process listens."""
    with Path("/proc/net/tcp").open() as table:
        rows = [line.split() for line in table.readlines()[1:]]
    inodes = {f"socket:[{row[9]}]": row[1] for row in rows if row[3] == "0A"}
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue
        if target in inodes:
            found.add(inodes[target])
    return found


class TestExternalAPI(RunnerContract):
    exclusive = False

    @pytest.fixture
    def runner(self):
        self.before = listening()
        return ExternalAPIRunner()

    @pytest.fixture
    def spec(self):
        return SPEC

    def left(self, runner):
        return listening() - self.before
