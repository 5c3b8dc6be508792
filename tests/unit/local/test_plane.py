"""Sections follow the guarantees of `agentfly.local.plane`; the real one is in tests/local."""

import os
import subprocess
import sys
import time
from pathlib import Path

from agentfly.local.plane import owned_folder, sweep_dead


def age(folder: Path) -> None:
    """Make it older than any folder that is being made."""
    long_ago = time.time() - 3600
    os.utime(folder, (long_ago, long_ago))


# 1. leaving the block removes what it had on disk


def test_a_folder_goes_with_its_block(tmp_path: Path) -> None:
    with owned_folder(tmp_path) as folder:
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_what_was_left_in_a_folder_is_for_the_next_sweep(tmp_path: Path) -> None:
    with owned_folder(tmp_path) as folder:
        (folder / "left").touch()
    assert folder.exists()
    age(folder)
    sweep_dead(tmp_path)
    assert list(tmp_path.iterdir()) == []


# 2. what a killed one left is swept


def test_the_folder_of_a_killed_process_without_sandboxes_is_swept(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, sys; from agentfly.local.plane import owned_folder\n"
        "with owned_folder(pathlib.Path(sys.argv[1])) as folder:\n"
        "    (folder / 'broker').touch(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=60)
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("p")
    sweep_dead(tmp_path)
    assert not folder.exists()


def test_a_folder_that_is_being_made_is_swept_only_when_it_is_old(tmp_path: Path) -> None:
    folder = tmp_path / "0a1b2c3d"
    folder.mkdir()
    sweep_dead(tmp_path)
    assert folder.exists()
    age(folder)
    sweep_dead(tmp_path)
    assert not folder.exists()


def test_the_folder_of_a_living_process_is_left_alone_however_old(tmp_path: Path) -> None:
    (tmp_path / "no folder").touch()
    with owned_folder(tmp_path) as folder:
        age(folder)
        sweep_dead(tmp_path)
        assert folder.exists()
