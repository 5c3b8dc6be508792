"""Layers applied to a folder; the numbers are those of the module's guarantees."""

import os
import stat
import tarfile
from pathlib import Path

import pytest

from agentfly.resources.errors import ResourceError
from agentfly.resources.images.stream import Budget, Stream
from agentfly.resources.images.tree import Tree
from tests.unit.resources.images.archives import entry, file, folder, hard, hide, link, opaque, tar


class Reading:
    """Bytes as a reader."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, size: int, /) -> bytes:
        data, self._data = self._data[:size], self._data[size:]
        return data


def apply(root: Path, *layers: bytes, limit: int = 1 << 24) -> Path:
    root.mkdir(exist_ok=True)
    budget = Budget(limit, lambda: None)
    tree = Tree(str(root), budget)
    for number, layer in enumerate(layers, start=1):
        tree.apply(f"layer {number}", Stream(Reading(layer), budget))
    return root


def listing(root: Path) -> dict[str, object]:
    """Path -> content of files, target of links, None for folders."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        else:
            found[name] = path.read_text() if path.is_file() else None
    return found


# 1. what layers mean


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([[file("a/b", "1")], [file("a/c", "2")]], {"a": None, "a/b": "1", "a/c": "2"}),
        ([[file("a", "1")], [file("a", "2")]], {"a": "2"}),
        ([[file("a", "1"), file("a", "2")]], {"a": "2"}),
        ([[file("a/b", "1")], [file("a", "2")]], {"a": "2"}),
        ([[file("a", "1")], [folder("a"), file("a/b", "2")]], {"a": None, "a/b": "2"}),
        ([[link("a", "b")], [file("a", "2")]], {"a": "2"}),
        ([[file("a/b", "1"), file("a/c", "2")], [hide("a/b")]], {"a": None, "a/c": "2"}),
        ([[file("a/b/c", "1")], [hide("a")]], {}),
        ([[link("a", "b"), file("b", "1")], [hide("a")]], {"b": "1"}),
        ([[file("a", "1")], [hide("no"), hide("no/where"), hide("a/b")]], {"a": "1"}),
        ([[file("a/b", "1"), file("a/c", "2")], [opaque("a"), file("a/d", "3")]], {"a": None, "a/d": "3"}),
        ([[file("a/b", "1"), file("a/c", "2")], [file("a/d", "3"), opaque("a")]], {"a": None, "a/d": "3"}),
        ([[file("a/b/c", "1")], [file("a/b/d", "2"), opaque("a")]], {"a": None, "a/b": None, "a/b/d": "2"}),
        ([[file("a", "1")], [opaque("."), file("b", "2")]], {"b": "2"}),
        ([[file("a/b", "1")], [hide("a"), file("a/c", "2")]], {"a": None, "a/c": "2"}),
        ([[file("a/b", "1")], [file("a/c", "2"), hide("a")]], {"a": None, "a/c": "2"}),
        ([[file("a", "1")], [file("a", "2"), hide("a")]], {"a": "2"}),
        ([[file("a", "1")], [hide("a")], [file("a", "3")]], {"a": "3"}),
        ([[file(".wh..wh.plnk/1.2", "x"), file(".wh..wh.aufs"), file("a", "1")]], {"a": "1"}),
        ([[file("./a/./b", "1"), file("//a//c", "2")]], {"a": None, "a/b": "1", "a/c": "2"}),
        ([[folder("./"), folder("a/")]], {"a": None}),
    ],
)
def test_layers_merge_replace_and_hide(tmp_path, layers, expected):
    assert listing(apply(tmp_path / "root", *(tar(*layer) for layer in layers))) == expected


def test_names_go_through_the_links_of_the_image(tmp_path):
    lower = tar(
        folder("usr/lib"), link("lib", "usr/lib"), link("usr/absolute", "/opt"), link("new", "made/here")
    )
    upper = tar(file("lib/a", "1"), file("usr/absolute/b", "2"), file("new/c", "3"), hard("d", "lib/a"))
    expected = {
        **{"lib": "-> usr/lib", "new": "-> made/here", "made": None, "made/here": None, "made/here/c": "3"},
        **{"d": "1", "opt": None, "opt/b": "2"},
        **{"usr": None, "usr/absolute": "-> /opt", "usr/lib": None, "usr/lib/a": "1"},
    }
    assert listing(apply(tmp_path / "root", lower, upper)) == expected
    third = tar(hide("lib/a"), hide("usr/absolute/b"), folder("lib"), file("lib/e", "4"))
    del expected["usr/lib/a"], expected["opt/b"]
    assert listing(apply(tmp_path / "root", third)) == {**expected, "lib": None, "lib/e": "4"}


def test_whiteout_of_a_whole_folder_drops_its_mode_too(tmp_path):
    root = apply(tmp_path / "root", tar(folder("a", 0o700)), tar(hide("a"), file("a/b")))
    assert stat.S_IMODE((root / "a").stat().st_mode) == 0o755
    root = apply(tmp_path / "other", tar(folder("a", 0o700)), tar(file("a/b"), hide("a")))
    assert stat.S_IMODE((root / "a").stat().st_mode) == 0o755


def test_sparse_files_keep_their_holes(tmp_path):
    source = tmp_path / "sparse"
    with source.open("wb") as out:
        out.write(b"start")
        out.seek(8 << 20)
        out.write(b"end")
    for format in ("gnu", "posix"):
        archive = tmp_path / f"{format}.tar"
        assert os.system(f"tar -S --format={format} -C {tmp_path} -cf {archive} sparse") == 0
        assert archive.stat().st_size < 1 << 20
        made = apply(tmp_path / format, archive.read_bytes()) / "sparse"
        assert made.read_bytes() == source.read_bytes()
        assert made.stat().st_blocks * 512 < 1 << 20


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_tar_format_is_read(tmp_path, format):
    long = "x" * 90 + "/" + "y" * (60 if format == tarfile.USTAR_FORMAT else 200)
    assert (apply(tmp_path / "root", tar(file(long, "1"), format=format)) / long).read_text() == "1"


def test_names_are_bytes(tmp_path):
    name = os.fsdecode(b"\xff\xe9 \n\t")
    assert (apply(tmp_path / "root", tar(file(name, "1"))) / name).read_text() == "1"


# 3. hard links


def test_replaced_file_is_a_new_file(tmp_path):
    root = apply(tmp_path / "root", tar(file("a", "old"), hard("b", "a")), tar(file("a", "new")))
    assert listing(root) == {"a": "new", "b": "old"}


def test_hard_links_across_layers_are_one_file(tmp_path):
    root = apply(tmp_path / "root", tar(file("a", "1"), link("s", "a")), tar(hard("b", "/a"), hard("t", "s")))
    assert (root / "a").samefile(root / "b")
    assert (root / "t").is_symlink()
    assert listing(apply(root, tar(hard("a", "a"))))["a"] == "1"


# 4. owners, modes, times


def test_modes_are_kept_and_all_belongs_to_the_user(tmp_path):
    modes = {"setuid": 0o4755, "setgid": 0o2755, "closed": 0o000, "plain": 0o640}
    entries = [file(name, mode=mode, uid=12345, gid=54321, mtime=1_000_000) for name, mode in modes.items()]
    root = apply(
        tmp_path / "root", tar(*entries, folder("shut", 0o1011), file("shut/in", "1"), folder("s", 0o2770))
    )
    for name, mode in modes.items():
        found = (root / name).stat()
        assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (
            mode | 0o600,
            os.getuid(),
            os.getgid(),
        )
        assert found.st_mtime == 1_000_000
    assert stat.S_IMODE((root / "shut").stat().st_mode) == 0o1711
    assert stat.S_IMODE((root / "s").stat().st_mode) == 0o2770
    assert stat.S_IMODE((root / "setuid").stat().st_mode) == 0o4755


def test_umask_changes_no_mode(tmp_path):
    before = os.umask(0o077)
    try:
        root = apply(
            tmp_path / "root", tar(file("a/b", mode=0o666), entry("p", tarfile.FIFOTYPE, mode=0o666))
        )
    finally:
        os.umask(before)
    modes = {name: stat.S_IMODE((root / name).stat().st_mode) for name in ("a", "a/b", "p")}
    assert modes == {"a": 0o755, "a/b": 0o666, "p": 0o666}


def test_a_time_out_of_range_is_brought_into_it(tmp_path):
    times = {"a": 1e300, "b": -5.0}
    root = apply(tmp_path / "root", tar(*(file(name, mtime=time) for name, time in times.items())))
    assert [(root / name).stat().st_mtime for name in times] == [1 << 33, 0]


# 5. special files


def test_devices_are_left_out_and_fifos_made(tmp_path):
    types = {"c": tarfile.CHRTYPE, "b": tarfile.BLKTYPE, "p": tarfile.FIFOTYPE}
    root = apply(tmp_path / "root", tar(file("c", "below")), tar(*(entry(n, t) for n, t in types.items())))
    assert [path.name for path in root.iterdir()] == ["p"]
    assert (root / "p").is_fifo()


def test_extended_attributes_are_dropped(tmp_path):
    with_attribute = file("a", "1", pax_headers={"SCHILY.xattr.user.overlay.redirect": "/etc"})
    assert os.listxattr(apply(tmp_path / "root", tar(with_attribute)) / "a") == []


# the archive is at fault


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (tar(file("a/../../b")), r"entry 'a/../../b': 'a/../../b' leads upwards with '..'"),
        (tar(file("a"), file("a/b")), r"entry 'a/b': 'a' is not a folder"),
        (tar(hard("b", "a")), r"entry 'b': is a hard link to 'a', which is not in the image"),
        (tar(folder("a"), hard("b", "a")), r"entry 'b': Operation not permitted"),
        (tar(file("d/.wh.")), r"entry 'd/.wh.': is a whiteout of no name"),
        (tar(file("d/.wh.x/y")), r"entry 'd/.wh.x/y': lies below a whiteout"),
        (tar(entry("a", b"V")), r"entry 'a': is of the unknown type b'V'"),
        (tar(link("a", "")), r"entry 'a': No such file or directory"),
        (tar(file("a/" * 201 + "b")), r"entry '[a/]{190,}...: lies more than 200 folders deep"),
        (tar(file("\x1b[2J" + "x" * 300)), r"entry '\\x1b\[2Jx{100,200}...: File name too long"),
    ],
)
def test_an_error_names_archive_and_entry(tmp_path, layer, words):
    with pytest.raises(ResourceError, match=f"image: layer 1: {words}"):
        apply(tmp_path / "root", layer)
