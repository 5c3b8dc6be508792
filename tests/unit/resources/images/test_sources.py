"""Layouts, archives and tarballs as sources; the numbers are those of ``oci`` and ``sources``."""

import gzip
import hashlib
import json
import lzma
import os
import platform
import shutil
from pathlib import Path

import pytest
import zstandard

from agentfly.resources.errors import ResourceError
from agentfly.resources.images import oci
from agentfly.resources.images.layers import unpack
from agentfly.resources.images.reference import locate
from agentfly.resources.images.sources import opened
from agentfly.resources.images.stream import Budget
from tests.unit.resources.images.archives import (
    Layout,
    config,
    digest,
    docker_archive,
    file,
    hide,
    link,
    oci_layout,
    tar,
)
from tests.unit.resources.images.test_stream import negative_size
from tests.unit.resources.images.test_tree import listing

LOWER, UPPER = tar(file("a", "1"), file("b", "2")), tar(hide("a"), file("c", "3"))
EXPECTED = {"b": "2", "c": "3"}
FOREIGN = "linux/s390x" if platform.machine() != "s390x" else "linux/amd64"


def budget(limit: int = 1 << 24) -> Budget:
    return Budget(limit, lambda: None)


def made(text: str, tmp_path: Path) -> tuple[dict[str, object], str, dict[str, str]]:
    """(content, digest, environment) of an image."""
    root = tmp_path / "root"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    with opened(locate(text, tmp_path), tmp_path, budget()) as source:
        unpack(source, str(root), budget())
        return listing(root), source.digest, dict(source.env)


def refused(text: str, tmp_path: Path) -> str:
    with pytest.raises(ResourceError) as caught:
        made(text, tmp_path)
    return caught.value.render()


def test_one_image_saved_in_every_way_is_one_image(tmp_path):
    env = ["PATH=/opt/bin", "EMPTY=", "EQUALS=a=b", "nothing"]
    oci_layout(tmp_path / "layout", LOWER, UPPER, env=env)
    shutil.copytree(tmp_path / "layout", tmp_path / "copy")
    docker_archive(tmp_path / "docker.tar", LOWER, UPPER, env=env)
    archive = Layout(tmp_path / "third")
    archive.index(archive.image([LOWER, UPPER], env=env, pack=zstandard.ZstdCompressor().compress))
    archive.archive(tmp_path / "oci.tar")
    for name in ("docker", "oci"):
        packed = (tmp_path / f"{name}.tar").read_bytes()
        (tmp_path / f"{name}.tar.gz").write_bytes(gzip.compress(packed))
        (tmp_path / f"{name}.tar.xz").write_bytes(lzma.compress(packed))
    expected = (
        EXPECTED,
        digest(config([LOWER, UPPER], env)),
        {"PATH": "/opt/bin", "EMPTY": "", "EQUALS": "a=b"},
    )
    for text in (
        *("oci:layout", "oci:copy", "oci-archive:oci.tar", "docker-archive:docker.tar"),
        *("oci-archive:oci.tar.gz", "docker-archive:docker.tar.gz", "docker-archive:docker.tar.xz"),
    ):
        assert made(text, tmp_path) == expected, text
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("tmp")) == []


def test_a_tarball_is_called_by_its_bytes(tmp_path):
    for name, pack in {"t.tar": bytes, "t.tgz": gzip.compress, "t.txz": lzma.compress}.items():
        (tmp_path / name).write_bytes(pack(LOWER))
        expected = digest((tmp_path / name).read_bytes())
        assert made(f"tar:{name}", tmp_path) == ({"a": "1", "b": "2"}, expected, {})


def test_a_layer_that_is_there_twice_is_a_link_in_old_archives(tmp_path):
    docker_archive(tmp_path / "i.tar", LOWER, UPPER, LOWER)
    assert made("docker-archive:i.tar", tmp_path)[0] == {"a": "1", "b": "2", "c": "3"}


def test_the_resolver_of_an_image_is_no_link(tmp_path):
    (tmp_path / "t.tar").write_bytes(
        tar(link("etc/resolv.conf", "../run/resolv.conf"), link("etc/hosts", "x"))
    )
    assert made("tar:t.tar", tmp_path)[0] == {"etc": None, "etc/resolv.conf": "", "etc/hosts": "-> x"}


# oci 2. which image


def test_an_image_is_picked_by_name(tmp_path):
    layout = Layout(tmp_path / "layout")
    layout.index(
        layout.image([LOWER], annotations={oci.REF_NAME: "v1"}),
        layout.image(
            [UPPER], annotations={oci.REF_NAME: "v2", oci.CONTAINERD_NAME: "docker.io/library/b:v2"}
        ),
    )
    assert made("oci:layout:v1", tmp_path)[0] == {"a": "1", "b": "2"}
    assert made("oci:layout:v2", tmp_path)[0] == {"c": "3"}
    assert made("oci:layout:docker.io/library/b:v2", tmp_path)[0] == {"c": "3"}
    assert "has not exactly one image; it has docker.io/library/b:v2, v1, v2" in refused(
        "oci:layout", tmp_path
    )
    assert "has no image v3, or several; it has docker.io" in refused("oci:layout:v3", tmp_path)


@pytest.mark.parametrize("name", ["python:3.12", "docker.io/library/python:3.12", "library/python:3.12"])
def test_a_docker_archive_is_picked_by_tag(tmp_path, name):
    docker_archive(tmp_path / "i.tar", LOWER, tags=["other:1", "python:3.12"])
    assert made(f"docker-archive:i.tar:{name}", tmp_path)[0] == {"a": "1", "b": "2"}
    assert "has no image python, or several; it has other:1, python:3.12" in refused(
        "docker-archive:i.tar:python", tmp_path
    )


def test_the_platform_of_this_machine_is_picked_from_indexes(tmp_path):
    layout = Layout(tmp_path / "layout")
    ours = dict(zip(("os", "architecture"), oci.machine().split("/"), strict=True))
    theirs = dict(zip(("os", "architecture"), FOREIGN.split("/"), strict=True))
    unknown = {"os": "unknown", "architecture": "unknown"}  # attestations of buildkit
    inner = {
        "schemaVersion": 2,
        "manifests": [
            layout.image([UPPER], platform=FOREIGN) | {"platform": theirs},
            layout.image([LOWER]) | {"platform": ours | {"variant": "v8"}},
            layout.image([UPPER]) | {"platform": unknown},
        ],
    }
    index = layout.blob(json.dumps(inner).encode(), "application/vnd.oci.image.index.v1+json")
    layout.index(index | {"annotations": {oci.REF_NAME: "latest"}})
    assert made("oci:layout:latest", tmp_path)[0] == {"a": "1", "b": "2"}
    inner["manifests"].pop(1)  # type: ignore[attr-defined]
    layout.index(layout.blob(json.dumps(inner).encode(), "application/vnd.oci.image.index.v1+json"))
    assert f"is for {FOREIGN} and unknown/unknown, and this machine is {oci.machine()}" in refused(
        "oci:layout", tmp_path
    )


def test_indexes_in_indexes_end(tmp_path):
    layout = Layout(tmp_path / "layout")
    inner = layout.image([LOWER])
    for _ in range(oci.INDEXES_MAX + 1):
        index = json.dumps({"schemaVersion": 2, "manifests": [inner]}).encode()
        inner = layout.blob(index, "application/vnd.oci.image.index.v1+json")
    layout.index(inner)
    assert "has more than 64 indexes" in refused("oci:layout", tmp_path)


def test_an_image_of_another_platform_is_refused(tmp_path):
    layout = Layout(tmp_path / "layout")
    layout.index(layout.image([LOWER], platform=FOREIGN))
    words = f"is for {FOREIGN}, and this machine is {oci.machine()}\n  hint: save the image for --platform"
    assert words in refused("oci:layout", tmp_path)


# oci 1. damage


def test_a_changed_blob_is_refused(tmp_path):
    path = oci_layout(tmp_path / "layout", LOWER)
    for blob in sorted((path / "blobs/sha256").iterdir()):
        before = blob.read_bytes()
        changed = (
            tar(file("evil", "x")) if before.startswith(b"\x1f\x8b") else before.replace(b"linux", b"minix")
        )
        if changed == before:
            changed = before.replace(b"layer.v1.tar", b"layer.v2.tar")
        blob.write_bytes(changed)
        assert f"has the digest {digest(changed)}, and should have sha256:{blob.name}" in refused(
            "oci:layout", tmp_path
        )
        blob.write_bytes(before)
    assert made("oci:layout", tmp_path)[0] == {"a": "1", "b": "2"}


def test_a_layer_that_is_not_what_the_settings_say_is_refused(tmp_path):
    """The manifest is right about the compressed bytes, the configuration about other plain ones."""
    layout = Layout(tmp_path / "layout")
    layout.index(layout.image([LOWER], pack=lambda _: gzip.compress(UPPER)))
    assert f"has the digest {digest(UPPER)}, and should have {digest(LOWER)}" in refused(
        "oci:layout", tmp_path
    )


def saved(tmp_path: Path, *entries: tuple[str, bytes | str]) -> Path:
    path = tmp_path / "i.tar"
    path.write_bytes(tar(*(file(name, data) for name, data in entries)))
    return path


SETTINGS = config([LOWER])
NAME = f"{hashlib.sha256(SETTINGS).hexdigest()}.json"
SAVED = json.dumps([{"Config": NAME, "RepoTags": None, "Layers": ["l.tar"]}])


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], "empty"),
        ([("x", "")], "has no file 'manifest.json'"),
        ([("manifest.json", "nonsense")], "manifest.json: it: Invalid JSON"),
        ([("manifest.json", '{"a": 1}')], "manifest.json: it: Input should be a valid array"),
        ([("manifest.json", '[{"Config": 1}]')], "manifest.json: 0.Config: Input should be a valid string"),
        ([("manifest.json", "[]")], "has not exactly one image"),
        ([("manifest.json", SAVED)], f"has no file '{NAME}'"),
        ([("manifest.json", SAVED), (NAME, SETTINGS)], "has no file 'l.tar'"),
        ([("manifest.json", SAVED), (NAME, SETTINGS + b" ")], f"{NAME}: has the digest sha256:"),
        (
            [("manifest.json", SAVED.replace('"l.tar"', "")), (NAME, SETTINGS)],
            "has 0 layers in its manifest, 1",
        ),
        (
            [("manifest.json", SAVED.replace(NAME, "c.json")), ("c.json", SETTINGS)],
            "'c.json' is not named by its",
        ),
        ([("manifest.json", SAVED + " " * (5 << 20))], "manifest.json: has more than 4 MiB"),
    ],
)
def test_a_damaged_archive_is_refused_by_name(tmp_path, entries, words):
    saved(tmp_path, *entries)
    if not entries:
        (tmp_path / "i.tar").write_bytes(b"")
    error = refused("docker-archive:i.tar", tmp_path)
    assert words in error
    assert f"image: {tmp_path}/i.tar: " in error


@pytest.mark.parametrize("blob", ["../../../etc/passwd", "/etc/passwd", "sha256:../../../etc/passwd"])
def test_digests_are_no_paths(tmp_path, blob):
    layout = Layout(tmp_path / "layout")
    layout.index({"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": blob, "size": 1})
    assert "index.json: manifests.0.digest: String should match pattern" in refused("oci:layout", tmp_path)


def test_links_in_an_archive_stay_in_it(tmp_path):
    (tmp_path / "secret").write_text("[]")
    (tmp_path / "i.tar").write_bytes(tar(link("manifest.json", f"{tmp_path}/secret")))
    assert "has no file 'manifest.json'" in refused("docker-archive:i.tar", tmp_path)
    (tmp_path / "i.tar").write_bytes(tar(link("manifest.json", "a"), link("a", "manifest.json")))
    assert "has no file 'manifest.json'" in refused("docker-archive:i.tar", tmp_path)


def test_an_entry_that_leads_backwards_is_no_loop(tmp_path):
    (tmp_path / "i.tar").write_bytes(negative_size())
    assert "its data overlap" in refused("docker-archive:i.tar", tmp_path)


def test_a_blob_that_is_no_file_is_refused_at_once(tmp_path):
    for blob in (oci_layout(tmp_path / "layout", LOWER) / "blobs/sha256").iterdir():
        before = blob.read_bytes()
        blob.unlink()
        assert f"{blob}: No such file or directory" in refused("oci:layout", tmp_path)
        os.mkfifo(blob)
        assert f"{blob}: is not a file" in refused("oci:layout", tmp_path)
        blob.unlink()
        blob.write_bytes(before)


@pytest.mark.parametrize("entry", ["A=x\0y", "A\0=x", "=x"])
def test_an_environment_that_no_process_can_have_is_refused(tmp_path, entry):
    docker_archive(tmp_path / "i.tar", LOWER, env=["OK=1", entry])
    assert "its environment has '" in refused("docker-archive:i.tar", tmp_path)


def test_what_is_no_image_is_refused(tmp_path):
    layout = Layout(tmp_path / "layout")
    chart = {"config": layout.blob(b"{}", "application/vnd.cncf.helm.config.v1+json"), "layers": []}
    layout.index(layout.blob(json.dumps(chart).encode(), "application/vnd.oci.image.manifest.v1+json"))
    assert "is no image: its configuration is of type 'application/vnd.cncf.helm" in refused(
        "oci:layout", tmp_path
    )


def test_a_compressed_archive_has_a_limit(tmp_path):
    (tmp_path / "i.tar.gz").write_bytes(gzip.compress(tar(file("big", b"\0" * (8 << 20)))))
    with (
        pytest.raises(ResourceError, match="the limit of the image cache"),
        opened(locate("docker-archive:i.tar.gz", tmp_path), tmp_path, budget(1 << 20)),
    ):
        pass
