"""Control groups on a file system that only looks like one."""

import os
from pathlib import Path

import pytest

from agentfly.resources.runners.sandboxd.cgroups import Cgroups, Group, Limits

LIMITS = Limits(cpu=0.5, memory_mb=64, pids=10)


def machine(tmp_path: Path, memberships: str, mounts: str) -> Path:
    """A /proc/self with these two files; ``{}`` in mounts is where the hierarchies are."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(memberships)
    (proc / "mountinfo").write_text(mounts.format(tmp_path))
    return proc


def version1(tmp_path: Path) -> Path:
    for controller in ("memory", "pids", "cpu"):
        (tmp_path / controller / "job").mkdir(parents=True)
    return machine(
        tmp_path,
        "4:memory:/job\n3:pids:/job\n2:cpu,cpuacct:/job\n1:name=systemd:/x\n0::/\n",
        "31 30 0:1 / / rw - ext4 /dev/vda rw\n"
        "32 31 0:29 / {0}/memory rw - cgroup cgroup rw,memory\n"
        "33 31 0:30 / {0}/pids rw - cgroup cgroup rw,pids\n"
        "34 31 0:31 / {0}/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        "35 31 0:32 / {0}/unified rw - cgroup2 cgroup2 rw\n",
    )


def version2(tmp_path: Path, *, own_enabled: str = "cpu memory pids", parent_enabled: str = "") -> Path:
    own = tmp_path / "all" / "slice" / "job"
    own.mkdir(parents=True)
    for folder, enabled in ((own, own_enabled), (own.parent, parent_enabled), (own.parents[1], "")):
        (folder / "cgroup.controllers").write_text("cpu memory pids io")
        (folder / "cgroup.subtree_control").write_text(enabled)
        (folder / "cgroup.procs").write_text("")
    return machine(tmp_path, "0::/slice/job\n", "32 31 0:29 / {0}/all rw - cgroup2 cgroup2 rw\n")


# 1. Where a group is made.


def test_version_1_groups_are_below_our_own(tmp_path: Path) -> None:
    found = Cgroups.find(version1(tmp_path))
    assert found.bases == {name: tmp_path / name / "job" for name in ("memory", "pids", "cpu")}
    assert (found.unified, found.missing) == (False, ())


def test_version_2_group_is_below_our_own_if_that_passes_controllers_on(tmp_path: Path) -> None:
    found = Cgroups.find(version2(tmp_path))
    assert set(found.bases.values()) == {tmp_path / "all/slice/job"}
    assert (found.unified, found.missing) == (True, ())


def test_mount_that_shows_a_part_of_the_tree_is_understood(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    proc = machine(
        tmp_path, "4:memory:/docker/abc\n", "32 31 0:29 /docker/abc {0}/memory rw - cgroup cgroup rw,memory\n"
    )
    assert Cgroups.find(proc).bases == {"memory": tmp_path / "memory"}


# 2. What cannot be written is left out.


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_controller_is_missing(tmp_path: Path) -> None:
    proc = version1(tmp_path)
    (tmp_path / "pids/job").chmod(0o555)
    assert Cgroups.find(proc).missing == ("pids",)


def test_machine_without_groups_lacks_all(tmp_path: Path) -> None:
    found = Cgroups.find(machine(tmp_path, "0::/\n", ""))
    assert found.missing == ("memory", "pids", "cpu")
    group = found.plan("x")
    found.create(group, LIMITS)
    assert (group.paths, group.oom_file, group.oom_kills(), group.remove()) == ((), None, 0, True)


# 3. and limits.


def test_planned_group_is_the_one_that_is_made(tmp_path: Path) -> None:
    found = Cgroups.find(version1(tmp_path))
    group = found.plan("agentfly-1")
    assert not any(path.exists() for path in group.paths)
    found.create(group, LIMITS)
    assert all(path.is_dir() for path in group.paths)
    values = {path.name: path.read_text() for folder in group.paths for path in folder.iterdir()}
    assert values == {
        "memory.limit_in_bytes": str(64 << 20),
        "pids.max": "30",
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "50000",
    }


def test_version_2_limits(tmp_path: Path) -> None:
    found = Cgroups.find(version2(tmp_path))
    group = found.plan("agentfly-1")
    found.create(group, LIMITS)
    (folder,) = group.paths
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "memory.max": str(64 << 20),
        "pids.max": "30",
        "cpu.max": "50000 100000",
    }


def test_smallest_share_of_a_core_is_one_the_kernel_takes(tmp_path: Path) -> None:
    found = Cgroups.find(version2(tmp_path))
    group = found.plan("g")
    found.create(group, Limits(cpu=0.001, memory_mb=1, pids=1))
    assert (group.paths[0] / "cpu.max").read_text() == "1000 100000"


def test_failed_creation_leaves_nothing(tmp_path: Path) -> None:
    found = Cgroups.find(version1(tmp_path))
    group = found.plan("g")
    group.paths[1].mkdir()  # somebody else's
    with pytest.raises(FileExistsError):
        found.create(group, LIMITS)
    assert not group.paths[0].exists()


# 4. Members and removal.


def test_process_is_added_to_every_hierarchy(tmp_path: Path) -> None:
    found = Cgroups.find(version1(tmp_path))
    group = found.plan("g")
    found.create(group, LIMITS)
    group.add(123)
    assert [(path / "cgroup.procs").read_text() for path in group.paths] == ["123"] * 3


def test_group_with_members_is_not_removed_yet(tmp_path: Path) -> None:
    busy, empty = tmp_path / "busy", tmp_path / "empty"
    for path in (busy, empty):
        path.mkdir()
    (busy / "child").mkdir()
    assert Group((busy, empty)).remove() is False
    assert not empty.exists()
    (busy / "child").rmdir()
    assert Group((busy, empty)).remove() is True
    assert Group((busy, empty)).remove() is True


@pytest.mark.parametrize("name", ["memory.events", "memory.oom_control"])
def test_kills_for_memory_are_counted(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("low 0\noom 3\noom_kill 2\n")
    group = Group((tmp_path,))
    assert (group.oom_file, group.oom_kills()) == (tmp_path / name, 2)
