"""Modes of files in /proc, on a folder in its place."""

import os
from pathlib import Path

import pytest

from agentfly.resources.runners.sandboxd.kernel_files import changed, put_back, read


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    root = tmp_path / "proc"
    for name in ("meminfo", "tty/driver/serial", "7/status", "net/dev", "sys/kernel/hostname"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch(0o444)
    (root / "self").symlink_to("7")
    return root


# 1, 2. Found and undone.


def test_change_is_named_and_undone(proc: Path) -> None:
    before = read(proc)
    assert changed(before, proc, proc) is None
    (proc / "meminfo").chmod(0o640)
    assert changed(before, proc, proc) == "/proc/meminfo was changed, for the whole machine"
    assert (proc / "meminfo").stat().st_mode & 0o7777 == 0o444
    assert changed(before, proc, proc) is None


def test_folders_below_are_looked_at(proc: Path) -> None:
    before = read(proc)
    (proc / "tty/driver").chmod(0o700)
    assert changed(before, proc, proc) == "/proc/tty/driver was changed, for the whole machine"


def test_change_that_cannot_be_undone_is_told_all_the_same(proc: Path, tmp_path: Path) -> None:
    before = read(proc)
    (proc / "meminfo").chmod(0o640)
    assert changed(before, proc, tmp_path / "elsewhere") is not None


def test_everything_can_be_put_back_without_asking(proc: Path) -> None:
    before = read(proc)
    (proc / "meminfo").chmod(0o640)
    put_back(before, proc)
    assert read(proc) == before


def test_a_proc_that_is_gone_is_told(proc: Path, tmp_path: Path) -> None:
    assert "cannot be read" in (changed(read(proc), tmp_path / "gone", proc) or "")


# 3. Only what is shared.


def test_processes_networks_and_links_are_left_out(proc: Path) -> None:
    assert set(read(proc)) == {"meminfo", "tty", "tty/driver", "tty/driver/serial"}


def test_a_file_of_the_kernel_that_goes_is_no_change(proc: Path) -> None:
    before = read(proc)
    (proc / "meminfo").unlink()
    assert changed(before, proc, proc) is None


def test_real_proc_is_read_and_unchanged() -> None:
    before = read(Path("/proc"))
    assert ("meminfo" in before) == (not os.statvfs("/proc").f_flag & os.ST_RDONLY)
    assert changed(before, Path("/proc")) is None
