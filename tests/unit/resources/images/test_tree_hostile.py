"""Archives made to reach out of the folder: whatever happens inside, nothing outside is touched."""

import contextlib
import os
import stat
import tarfile
from pathlib import Path

import pytest

from agentfly.resources.errors import ResourceError
from tests.unit.resources.images.archives import entry, file, folder, hard, hide, link, opaque, tar
from tests.unit.resources.images.test_tree import apply

OUT = "{out}"  # stands for a folder outside
FOLDED = folder("d", 0o777)

ATTACKS = {
    "absolute name": [[file(f"{OUT}/evil", "x")]],
    "absolute name with dots": [[file(f"/..{OUT}/evil", "x")]],
    "name that climbs": [[file("../outside/evil", "x")]],
    "name that climbs later": [[file("a/b/../../../outside/evil", "x")]],
    "folder that climbs": [[folder("../outside/evil")]],
    "name that climbs in an extended header": [[file("x" * 120 + "/../../outside/evil", "x")]],
    "file through an absolute link": [[link("d", OUT), file("d/evil", "x")]],
    "file through a relative link": [[link("d", "../outside"), file("d/evil", "x")]],
    "file through a link deep down": [[link("a/b/c", "../../../outside"), file("a/b/c/evil", "x")]],
    "file through a chain of links": [[link("a", "../outside"), link("b", "a"), file("b/evil", "x")]],
    "file through a link of a lower layer": [[link("d", OUT)], [file("d/evil", "x")]],
    "file through a link to the root of the machine": [[link("d", "/"), file(f"d{OUT}/evil", "x")]],
    "file over a link to a file": [[link("f", f"{OUT}/secret"), file("f", "changed")]],
    "folder that a link takes the place of": [[FOLDED, file("d/x"), link("d", OUT), file("d/evil", "x")]],
    "folder that a link replaces in a layer": [[FOLDED, file("d/x")], [link("d", OUT), file("d/evil", "x")]],
    "mode of a folder through a link": [[link("d", OUT), folder("d", 0o777)]],
    "mode of a folder below a link": [[link("d", ".."), folder("d/outside", 0o777)]],
    "hard link to an absolute name": [[hard("f", f"{OUT}/secret"), file("f", "changed")]],
    "hard link that climbs": [[hard("f", "../outside/secret")]],
    "hard link through a link": [[link("d", OUT), hard("f", "d/secret")]],
    "hard link to a link": [[link("l", f"{OUT}/secret"), hard("f", "l"), file("f", "changed")]],
    "append to a hard link": [[hard("f", f"{OUT}/secret")], [file("f", "changed")]],
    "whiteout through a link": [[link("d", OUT), hide("d/secret")]],
    "whiteout that climbs": [[hide("../outside/secret")]],
    "whiteout of the folder above": [[file("d/.wh...", "")], [file(".wh...", "")]],
    "whiteout of the folder itself": [[file(".wh..", "")]],
    "opaque through a link": [[link("d", OUT), opaque("d")]],
    "opaque through a link below": [[link("d", OUT)], [file("d/a", "x"), opaque("d")]],
    "fifo through a link": [[link("d", OUT), entry("d/evil", tarfile.FIFOTYPE)]],
    "device": [[entry("dev/sda", tarfile.BLKTYPE, devmajor=8, mode=0o666)]],
    "device through a link": [[link("d", OUT), entry("d/evil", tarfile.CHRTYPE, devmajor=1, devminor=3)]],
    "link in place of the root": [[link(".", OUT), file("evil", "x")]],
    "whiteout of the root": [[file("/.wh.", "")], [file("evil", "x")]],
    "name with an end in it": [[entry("n", tarfile.REGTYPE, pax_headers={"path": f"{OUT}/a\0b"})]],
    "removal of a folder with a link": [[folder("d"), link("d/out", OUT)], [hide("d")], [file("d", "x")]],
    "loop of links": [[link("a", "b"), link("b", "a"), file("a/evil", "x")]],
}


def state(outside: Path) -> object:
    return [
        (str(path), path.lstat().st_mode, path.lstat().st_nlink, path.lstat().st_mtime_ns)
        for path in sorted([outside, *outside.rglob("*")])
    ] + [path.read_text() for path in sorted(outside.rglob("*")) if path.is_file()]


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_nothing_outside_is_touched(tmp_path, attack):
    outside = tmp_path / "outside"
    (outside / "below").mkdir(parents=True)
    (outside / "secret").write_text("secret")
    before, above = state(outside), sorted(path.name for path in tmp_path.iterdir())
    layers = []
    for layer in attack:
        for info, _ in layer:
            info.name = info.name.replace(OUT, str(outside))
            info.linkname = info.linkname.replace(OUT, str(outside))
            info.pax_headers = {
                key: value.replace(OUT, str(outside)) for key, value in info.pax_headers.items()
            }
        layers.append(tar(*layer))
    with contextlib.suppress(ResourceError):
        apply(tmp_path / "root", *layers)
    assert state(outside) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [*above, "root"]
    inside = [path for path in (tmp_path / "root").rglob("*") if not path.is_symlink()]
    assert not any(path.is_file() and path.read_text() == "secret" for path in inside)
    assert not any(path.is_block_device() or path.is_char_device() for path in inside)


def test_what_an_ordinary_user_cannot_open_is_removed_all_the_same(tmp_path):
    layer = tar(folder("d", 0o000), file("d/f", mode=0o000), folder("d/e", 0o000))
    root = apply(tmp_path / "root", layer, tar(hide("d")))
    assert os.listdir(root) == []
    assert stat.S_IMODE(apply(root, layer).joinpath("d").stat().st_mode) == 0o700
