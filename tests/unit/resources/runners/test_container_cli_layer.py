"""What of a container is watched from outside, and that any write to it is seen."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agentfly.resources.runners.container import layer
from agentfly.resources.runners.container.layer import Tree, difference, scratch_in, stamps, watched

DOCKER = r"""
74 49 0:39 / / rw,relatime - overlay overlay rw,lowerdir=/d/l/A,upperdir=/d/a\040b/diff,workdir=/d/a/work
75 74 0:42 / /proc rw,nosuid - proc proc rw
76 74 0:43 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
77 76 0:44 / /dev/pts rw,nosuid - devpts devpts rw,gid=5
78 74 0:45 / /sys ro,nosuid - sysfs sysfs ro
79 78 0:30 / /sys/fs/cgroup rw,nosuid - tmpfs tmpfs rw
80 76 0:41 / /dev/mqueue rw,nosuid - mqueue mqueue rw
81 76 0:46 / /dev/shm rw,nosuid - tmpfs shm rw,size=65536k
82 74 0:47 / /tmp rw,nosuid - tmpfs tmpfs rw
83 74 254:0 /r/etc/hosts /etc/hosts ro,relatime - ext4 /dev/vda rw
84 74 254:0 /d/volumes/x /data rw,relatime - ext4 /dev/vda rw
85 75 0:43 /null /proc/keys rw,nosuid - tmpfs tmpfs rw
86 74 254:0 /r/o /.agentfly/owner ro,relatime - ext4 /dev/vda rw
""".strip()


# 1. What is watched.


def test_every_writable_place_is_scratch_or_watched() -> None:
    assert watched(DOCKER, ["/tmp", "/dev/shm"], "/proc/7/root") == [
        Tree("/d/a b/diff", ""),
        Tree("/proc/7/root/dev", "/dev"),
        Tree("/proc/7/root/data", "/data"),
    ]


def test_a_mount_over_another_counts() -> None:
    over = DOCKER + "\n90 74 0:99 / /data ro - ext4 /dev/vda rw"
    assert Tree("/proc/7/root/data", "/data") not in watched(over, ["/tmp", "/dev/shm"], "/proc/7/root")


@pytest.mark.parametrize(
    "root",
    [
        "74 49 0:39 / / rw - fuse.fuse-overlayfs fuse-overlayfs rw,user_id=0",
        "74 49 254:0 /vfs/dir/x / rw - ext4 /dev/vda rw",
        "74 49 0:39 / / rw - overlay overlay rw,lowerdir=a:b,upperdir=c/diff,workdir=c/work",
    ],
)
def test_a_root_whose_writes_cannot_be_told_is_an_error(root: str) -> None:
    with pytest.raises(OSError, match="does not tell where its writable layer is"):
        watched(root, [], "/proc/7/root")


# 2. Every write is found.


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "etc/deep").mkdir(parents=True)
    (tmp_path / "etc/file").write_text("x")
    (tmp_path / "link").symlink_to("/etc/passwd")
    return tmp_path


def same_time(path: Path, change: Callable[[], None]) -> None:
    before = path.stat()
    change()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES: dict[str, Callable[[Path], object]] = {
    "new": lambda root: (root / "etc/deep/new").touch(),
    "content": lambda root: (root / "etc/file").write_text("y"),
    "undone": lambda root: [(root / "etc/new").touch(), (root / "etc/new").unlink()],
    "content, its time set back": lambda root: same_time(
        root / "etc/file", lambda: (root / "etc/file").write_text("y") and None
    ),
    "mode": lambda root: (root / "etc").chmod(0o700),
    "removed": lambda root: (root / "link").unlink(),
    "renamed": lambda root: (root / "etc/deep").rename(root / "etc/other"),
    "replaced": lambda root: [(root / "link").unlink(), (root / "link").symlink_to("/etc/passwd")],
    "root replaced": lambda root: root.chmod(0o711),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_write_is_found(tree: Path, change: str) -> None:
    trees = [Tree(str(tree), "")]
    before = stamps(trees)
    assert difference(before, trees) is None
    CHANGES[change](tree)
    assert difference(before, trees) is not None


def test_place_is_named_as_the_container_knows_it(tree: Path) -> None:
    trees = [Tree(str(tree / "etc"), "/data"), Tree(str(tree), "")]
    before = stamps(trees)
    (tree / "etc/deep/new").touch()
    assert difference(before, trees) == "/data/deep/new was written"


def test_what_was_written_first_is_named_by_its_own_path(tree: Path) -> None:
    trees = [Tree(str(tree), "")]
    before = stamps(trees)
    (tree / "etc/x").touch()
    (tree / "a").touch()
    (tree / "z").touch()
    assert difference(before, trees) == "/a was written"
    (tree / "etc/x").unlink()
    (tree / "a").unlink()
    (tree / "z").unlink()
    assert difference(before, trees) == "/etc was written"


def test_one_file_can_be_watched(tree: Path) -> None:
    trees = [Tree(str(tree / "etc/file"), "/etc/resolv.conf")]
    before = stamps(trees)
    (tree / "etc/file").write_text("y")
    assert difference(before, trees) == "/etc/resolv.conf was written"


# 3, 4. Bounds.


def test_a_link_is_not_followed(tree: Path) -> None:
    (tree / "loop").symlink_to(tree)
    assert {below for _, below in stamps([Tree(str(tree), "")])} == {
        *("", "/etc", "/etc/deep", "/etc/file", "/link", "/loop")
    }


def test_too_much_at_the_start_is_an_error(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "ENTRIES_MAX", 3)
    with pytest.raises(OSError, match="more than 3 files in volumes or devices"):
        stamps([Tree(str(tree), "")])


def test_what_cannot_be_read_later_is_a_difference(tree: Path) -> None:
    trees = [Tree(str(tree), "")]
    before = stamps(trees)
    assert "gone, which cannot be read, was written" in (
        difference(before, [Tree(str(tree / "gone"), "")]) or ""
    )


# Scratch.


def test_only_folders_that_hold_nothing_become_scratch(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.containerenv").touch()
    (tmp_path / "work").mkdir()
    (tmp_path / "work/file").touch()
    (tmp_path / "link").symlink_to("/tmp")
    (tmp_path / "file").touch()
    wanted = ("/tmp", "/run", "/work", "/work/none", "/none/at/all", "/link", "/link/x", "/file", "/file/x")
    own = frozenset({".containerenv"})
    assert scratch_in(tmp_path, wanted, own) == ("/tmp", "/run", "/work/none", "/none/at/all")
