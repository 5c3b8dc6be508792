"""Sections follow the guarantees of `agentfly.local.steps`."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from agentfly.api import ResourcePool
from agentfly.errors import AgentflyError
from agentfly.local import environments, steps
from agentfly.local.plane import DataPlane

CONTAINER = {"type": "Container", "container": {}, "capacity": {"min": 0, "max": 1}}
MODEL = {
    "type": "ModelService",
    "modelService": {"model": "m", "maxModelLen": 64},
    "capacity": {"min": 0, "max": 1},
}


class Engine:
    """Remembers how long a member may take to come."""

    def __init__(self) -> None:
        self.deadlines: dict[str, float] = {}

    async def acquire(self, name: str, owner: str, *, deadline: float) -> "Engine":
        self.deadlines[name] = deadline
        return self

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...


async def test_a_pool_has_the_time_that_its_server_may_take_to_start_or_its_image_to_unpack() -> None:
    packed = {**CONTAINER, "container": {"image": "tar:/root.tar"}}
    pools = [
        ResourcePool.model_validate({"metadata": {"name": name}, "spec": spec})
        for name, spec in {"box": CONTAINER, "judge": MODEL, "packed": packed}.items()
    ]
    engine = Engine()
    await steps.prove(DataPlane(engine, ""), pools, 300.0)  # type: ignore[arg-type]
    assert engine.deadlines == {"box": 60.0, "judge": 300.0, "packed": 960.0}


# 3. environments are built by a process of their own


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The processes that would build; each leaves the CUDA environment of the trainer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", "/mine")
    started: list[dict[str, Any]] = []

    async def run_to_end(name: str, argv: list[str], **options: Any) -> None:
        started.append({"name": name, "argv": argv, **options})
        make(environments.recipe("trainer", "cuda"))

    monkeypatch.setattr(steps, "run_to_end", run_to_end)
    return started


def make(recipe: environments.Recipe) -> Path:
    python = environments._home(recipe) / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    return python


async def test_an_environment_that_is_there_starts_nothing(builds: list[Any], tmp_path: Path) -> None:
    python = make(environments.recipe("trainer"))
    assert await steps.environment("trainer", 0, tmp_path / "log") == python
    assert builds == []


async def test_an_environment_is_built_by_the_command_line_with_everything_it_needs(
    builds: list[dict[str, Any]], tmp_path: Path
) -> None:
    python = await steps.environment("trainer", 2, tmp_path / "log")
    assert python == environments.find("trainer", accelerator="cuda")
    (build,) = builds
    assert build["argv"][0] == sys.executable
    assert build["argv"][1:] == ["-m", "agentfly.cli", "env", "trainer", "--accelerator", "cuda"]
    assert build["env"]["PYTHONPATH"] == f"{environments.agentfly_path()}{os.pathsep}/mine"
    assert build["env"].items() >= {"XDG_CACHE_HOME": str(tmp_path / "cache")}.items()


async def test_a_build_that_left_no_environment_is_an_error(
    builds: list[dict[str, Any]], tmp_path: Path
) -> None:
    with pytest.raises(AgentflyError, match="environment inference: was built, and is not there"):
        await steps.environment("inference", 0, tmp_path / "log")
