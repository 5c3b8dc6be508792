"""The contract of every runner, held by real sandboxes."""

import os
from pathlib import Path
from typing import Any

import pytest

from agentfly.resources.spec import ContainerSpec
from tests.local.machine import descendants, groups
from tests.unit.resources.runner_contract import RunnerContract

SHARED = {"etc", "dev", "disk", "trash", "sandboxes.lock"}


class TestBubblewrap(RunnerContract):
    @pytest.fixture
    def spec(self) -> ContainerSpec:
        return ContainerSpec()

    @pytest.fixture(autouse=True)
    def _folder(self, run_dir: Path) -> None:
        self.folder = run_dir

    def left(self, runner: Any) -> set[str]:
        homes = {path.name for path in self.folder.iterdir()} - SHARED
        return homes | groups(os.getpid()) | {name for name in descendants() if name in ("bwrap", "sandboxd")}
