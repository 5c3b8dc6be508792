"""Where things are kept, and how many."""

from pathlib import Path

import pytest

from agentfly.errors import AgentflyError
from agentfly.local import doctor
from agentfly.local.paths import image_cache


@pytest.mark.parametrize(
    ("text", "limit"), [(None, 20 << 30), ("", 20 << 30), ("0.5", 1 << 29), ("100", 100 << 30)]
)
def test_images_are_kept_up_to_the_limit(tmp_path, monkeypatch, text, limit):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("AGENTFLY_IMAGE_CACHE_GIB", raising=False)
    if text is not None:
        monkeypatch.setenv("AGENTFLY_IMAGE_CACHE_GIB", text)
    cache = image_cache()
    assert (cache.folder, cache.limit) == (tmp_path / "agentfly/images", limit)


@pytest.mark.parametrize("text", ["0", "-1", "many", "nan", "inf", "1e-12"])
def test_a_limit_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv("AGENTFLY_IMAGE_CACHE_GIB", text)
    with pytest.raises(AgentflyError, match=f"AGENTFLY_IMAGE_CACHE_GIB: {text} is no number of GiB above 0"):
        image_cache()


def test_doctor_says_how_much_the_images_take(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("AGENTFLY_IMAGE_CACHE_GIB", raising=False)
    home = tmp_path / "agentfly/images" / ("0" * 64)
    home.mkdir(parents=True)
    (home / "image.json").write_text('{"env": {}, "size": 1610612736}')
    found = doctor._images()
    assert (found.state, found.detail) == (
        "ok",
        f"1 unpacked, 1.5 of 20 GiB, in {tmp_path}/agentfly/images",
    )
    monkeypatch.setenv("AGENTFLY_IMAGE_CACHE_GIB", "none")
    assert doctor._images().state == "missing"


def test_doctor_gives_the_reason_of_every_container_engine_that_does_not_work(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "find_sandboxd", lambda: Path("/bin/true"))
    monkeypatch.setenv("AGENTFLY_CONTAINER_CLI", "no-such-engine --flag")
    found = doctor._containers()
    assert (found.part, found.state) == ("container-cli", "optional")
    assert "no-such-engine --flag: not found on PATH" in found.detail
    monkeypatch.setenv("PATH", str(tmp_path))
    found = doctor._enroot()
    assert (found.part, found.state, found.detail) == (
        *("enroot", "optional"),
        "enroot: not found on PATH; install enroot",
    )
