"""Sequences of operations for ``leave.py``, as strategies of hypothesis."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", "cat", "passwd", ".hidden", "x/y", "workspace"])
TEXTS = st.sampled_from(["", "#!/bin/sh\nexit 3\n", "x" * 5000])
MODES = st.sampled_from([0, 0o111, 0o644, 0o700, 0o755, 0o1777, 0o4755, 0o2755])
ONE_PATH = ["truncate", "mkdir", "remove", "undo", "fifo", "device", "umount", "mount"]
ONE_FOLDER = ["odd_names", "deep", "many", "closed_folder", "writer", "held"]
ONE_NUMBER = [
    *("background", "daemon", "respawn", "tcp", "connected", "shm", "msg", "sem", "priority", "affinity"),
    *("of_the_daemon", "sysctl", "namespaces", "stop"),
]
ONE_NAME = ["abstract", "mqueue", "key", "host_name"]


def sequences(folders: Sequence[str], files: Sequence[str]) -> st.SearchStrategy[list[Any]]:
    """One to five operations on these folders, these files, and new files in the folders."""
    inside = st.builds(lambda folder, name: f"{folder.rstrip('/')}/{name}", st.sampled_from(folders), NAMES)
    known, some = st.sampled_from(folders), st.sampled_from(files) | inside
    paths = known | some
    operations = st.one_of(
        st.tuples(st.sampled_from(["write", "append"]), some, TEXTS),
        st.tuples(st.sampled_from(["store", "store_and_hide"]), some, st.just("!")),
        st.tuples(st.sampled_from(["rename", "replace_by_link", "symlink", "link"]), paths, paths),
        st.tuples(st.sampled_from(ONE_PATH), paths),
        st.tuples(st.sampled_from(ONE_FOLDER), known),
        st.tuples(st.just("chmod"), paths, MODES),
        st.tuples(st.just("chown"), paths, st.sampled_from([0, 1000, 65534])),
        st.tuples(st.just("xattr"), paths, st.just("left")),
        st.tuples(st.just("times"), paths, st.sampled_from([12345, 2_000_000_000])),
        st.tuples(st.just("flags"), paths, st.sampled_from([0x10, 0x20, 0x40, 0x80])),
        st.tuples(st.just("unix"), inside),
        st.tuples(st.just("terminal"), st.sampled_from([0, 0o666])),
        st.tuples(st.just("limit"), st.sampled_from([64, 1000, 1_000_000])),
        st.tuples(st.just("clock"), st.just(1_000_000_000)),
        st.tuples(st.sampled_from(ONE_NUMBER), st.integers(1, 5)),
        st.tuples(st.sampled_from(ONE_NAME), st.sampled_from(["left", "other"])),
    )
    return st.lists(operations, min_size=1, max_size=5)
