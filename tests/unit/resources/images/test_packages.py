"""Roots from packages, with a stand-in for mmdebstrap; the numbers are those of the module's guarantees."""

import os
import time
from pathlib import Path

import pytest

from agentfly.resources.errors import ResourceError
from agentfly.resources.images.layers import unpack
from agentfly.resources.images.packages import packages
from agentfly.resources.images.stream import Budget
from tests.unit.resources.images.archives import file, tar
from tests.unit.resources.images.test_tree import listing


@pytest.fixture
def apt(tmp_path: Path) -> Path:
    (tmp_path / "apt/sources.list.d").mkdir(parents=True)
    (tmp_path / "apt/sources.list").touch()
    (tmp_path / "apt/sources.list.d/debian.sources").write_text("Types: deb")
    (tmp_path / "apt/sources.list.d/off.sources.disabled").write_text("Types: deb")
    return tmp_path / "apt"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Put a shell script in the place of mmdebstrap."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)

    def put(script: str) -> None:
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin/mmdebstrap").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin/mmdebstrap").chmod(0o755)

    return put


def build(path: str, root: Path, apt: Path, check=lambda: None) -> str:  # type: ignore[no-untyped-def]
    root.mkdir()
    budget = Budget(1 << 24, check)
    source = packages(path, budget, apt)
    unpack(source, str(root), budget)
    return source.digest


def test_what_it_writes_is_the_root(tmp_path, apt, stand_in):
    (tmp_path / "root.tar").write_bytes(tar(file("etc/a", "1")))
    stand_in(f'echo "$@" > {tmp_path}/arguments; cat {tmp_path}/root.tar')
    build("bookworm/git,python3", tmp_path / "root", apt)
    assert listing(tmp_path / "root") == {"etc": None, "etc/a": "1"}
    assert (tmp_path / "arguments").read_text().split() == [
        *("--variant=minbase", "--format=tar", "--include=git,python3", "bookworm", "-"),
        str(apt / "sources.list.d/debian.sources"),
    ]


def test_it_is_called_by_what_was_asked(tmp_path, apt, stand_in):
    stand_in("")
    budget = Budget(1 << 24, lambda: None)
    first = packages("bookworm/git", budget, apt).digest
    assert packages("bookworm/git", budget, apt).digest == first
    assert packages("bookworm/vim", budget, apt).digest != first
    (apt / "sources.list").write_text("deb http://other sid main")
    assert packages("bookworm/git", budget, apt).digest != first


def test_its_last_words_are_in_the_error(tmp_path, apt, stand_in):
    stand_in("head -c 3000 /dev/zero | tr '\\0' x >&2; echo 'E: no such package' >&2; exit 25")
    with pytest.raises(
        ResourceError, match=r"packages:sid: mmdebstrap ended with 25: x{500,}\s*E: no such package$"
    ):
        build("sid", tmp_path / "root", apt)


def test_a_failure_in_the_middle_is_its_own(tmp_path, apt, stand_in):
    (tmp_path / "root.tar").write_bytes(tar(file("a", "1" * 5000))[:2000])
    stand_in(f"cat {tmp_path}/root.tar; echo 'E: disk' >&2; exit 1")
    with pytest.raises(ResourceError, match="mmdebstrap ended with 1: E: disk"):
        build("sid", tmp_path / "root", apt)


def test_it_ends_with_all_it_started_when_nobody_wants_it(tmp_path, apt, stand_in):
    stand_in(f"sleep 60 & echo $! > {tmp_path}/pid; sleep 60")
    end = time.monotonic() + 0.5

    def check() -> None:
        if time.monotonic() > end:
            raise ResourceError("enough")

    with pytest.raises(ResourceError, match="enough"):
        build("sid", tmp_path / "root", apt, check)
    pid = int((tmp_path / "pid").read_text())
    for _ in range(200):
        if not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return
        time.sleep(0.01)
    pytest.fail("its child is still there")


def test_without_mmdebstrap_the_remedy_is_said(apt, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ResourceError, match="needs mmdebstrap") as caught:
        packages("sid", Budget(1, lambda: None), apt)
    assert caught.value.hints[0] == "apt install mmdebstrap"
