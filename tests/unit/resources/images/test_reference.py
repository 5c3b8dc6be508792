"""What a reference to an image means; the numbers are those of the module's guarantees."""

from pathlib import Path

import pytest

from agentfly.resources.errors import ResourceError
from agentfly.resources.images.reference import Reference, locate


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "images/root").mkdir(parents=True)
    (tmp_path / "layout").mkdir()
    (tmp_path / "layout/index.json").touch()
    (tmp_path / "image.tar").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host", Reference("host")),
        ("images/root", Reference("dir", "{}/images/root")),
        ("./images/root", Reference("dir", "{}/images/root")),
        ("dir:images/root", Reference("dir", "{}/images/root")),
        ("dir:{}/images", Reference("dir", "{}/images")),
        ("{}/images", Reference("dir", "{}/images")),
        ("tar:image.tar", Reference("tar", "{}/image.tar")),
        ("oci:layout", Reference("oci", "{}/layout")),
        ("oci:layout:v1", Reference("oci", "{}/layout", "v1")),
        ("oci-archive:image.tar:v1", Reference("oci-archive", "{}/image.tar", "v1")),
        ("docker-archive:image.tar", Reference("docker-archive", "{}/image.tar")),
        ("docker-archive:image.tar:a/b:1", Reference("docker-archive", "{}/image.tar", "a/b:1")),
        ("packages:bookworm", Reference("packages", "bookworm")),
        ("packages:bookworm/git,g++,git", Reference("packages", "bookworm/g++,git")),
    ],
)
def test_every_form_is_known_and_absolute(base, text, expected):
    found = locate(text.replace("{}", str(base)), base)
    assert found == Reference(expected.form, expected.path.replace("{}", str(base)), expected.name)
    assert locate(str(found), Path("/nowhere")) == found  # 3.
    assert str(found).startswith("/") == (expected.form == "dir")


@pytest.mark.parametrize(
    "text", ["python:3.12", "ubuntu", "ghcr.io/a/b", "localhost:5000/a", "a/b:1", "docker://a", "x" * 900]
)
def test_an_image_of_a_registry_is_refused_with_the_remedies(base, text):
    with pytest.raises(ResourceError, match="names an image of a registry") as caught:
        locate(text, base)
    remedies = " ".join(caught.value.hints)
    assert all(
        word in remedies for word in ("docker save", "skopeo copy", "runtime: ContainerCLI", "cluster")
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("./none", "image: ./none is not a directory (looked at {}/none)"),
        ("/no/such", "image: /no/such is not a directory (looked at /no/such)"),
        ("dir:image.tar", "image: dir:image.tar is not a directory (looked at {}/image.tar)"),
        ("tar:none", "image: tar:none is not a file (looked at {}/none)"),
        ("tar:", "image: tar: is not a file (looked at {})"),
        ("tar:layout", "image: tar:layout is not a file (looked at {}/layout)"),
        ("oci:images", "image: oci:images is not an OCI image layout"),
        ("oci-archive:none:v1", "image: oci-archive:none:v1 is not a file (looked at {}/none)"),
        ("docker-archive:none", "image: docker-archive:none is not a file (looked at {}/none)"),
        ("packages:", "image: packages:: '' is no name of a suite"),
        ("packages:--option", "image: packages:--option: '--option' is no name of a suite"),
        ("packages:sid/git,--hook=x", "'--hook=x' is no name of a package"),
        ("packages:sid/a b", "'a b' is no name of a package"),
        ("packages:sid/git,", "'' is no name of a package"),
    ],
)
def test_what_is_not_there_is_refused_with_the_place(base, text, words):
    with pytest.raises(ResourceError) as caught:
        locate(text, base)
    assert words.replace("{}", str(base)) in str(caught.value)
    assert caught.value.hints


def test_a_tarball_without_its_form_gets_the_form_as_a_hint(base):
    with pytest.raises(ResourceError) as caught:
        locate("./image.tar", base)
    assert "tar:image.tar" in caught.value.hints[0]
