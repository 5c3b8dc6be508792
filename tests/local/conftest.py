"""What the local tests share: the real daemon, built once, and a short folder for sockets."""

import asyncio
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner, sweep

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "operator" / "sandboxd"


def _go() -> str:
    for candidate in ("go", "/usr/local/go/bin/go"):
        if found := shutil.which(candidate):
            return found
    pytest.fail("sandboxd: cannot be built: install Go 1.25 or newer (https://go.dev/dl)")


@pytest.fixture(scope="session")
def sandboxd() -> Path:
    """The daemon's binary, not older than its source."""
    target = ROOT / "build" / "sandboxd"
    newest = max(path.stat().st_mtime for path in SOURCE.rglob("*") if path.suffix in (".go", ".s", ".mod"))
    if not target.exists() or target.stat().st_mtime < newest:
        target.parent.mkdir(exist_ok=True)
        fresh = target.with_name(f"sandboxd.{os.getpid()}")
        subprocess.run(
            [_go(), "build", "-trimpath", "-ldflags", "-s -w", "-o", str(fresh), "."],
            cwd=SOURCE,
            env={**os.environ, "CGO_ENABLED": "0"},
            check=True,
        )
        fresh.rename(target)
    return target


@pytest.fixture(scope="module")
def run_dir() -> Iterator[Path]:
    """A folder for one owner of sandboxes, in a folder of its own: sockets need a short path."""
    parent = Path("/tmp") / f"af-{secrets.token_hex(4)}"
    parent.mkdir(mode=0o700)
    yield parent / "r"
    sweep(parent)
    shutil.rmtree(parent, ignore_errors=True)


@pytest.fixture(scope="module")
def runner(run_dir: Path, sandboxd: Path) -> Iterator[BubblewrapRunner]:
    """A runner that works here, or a failure that says why not. It is bound to no event loop."""
    runner = BubblewrapRunner(run_dir, sandboxd)
    if (reason := runner.check()) is not None:
        pytest.fail(reason)
    yield runner
    asyncio.run(runner.close())
    assert not run_dir.exists(), sorted(run_dir.rglob("*"))
