"""Finding the daemon's binary."""

from pathlib import Path

import pytest

from agentfly.errors import AgentflyError
from agentfly.sandbox import binary


def test_bundled_binary_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled, other = tmp_path / "a" / "sandboxd", tmp_path / "b" / "sandboxd"
    for path in (bundled, other):
        path.parent.mkdir()
        path.write_text("#!/bin/sh")
        path.chmod(0o755)
    monkeypatch.setattr(binary, "BUNDLED", bundled)
    monkeypatch.setenv("PATH", str(other.parent))
    assert binary.find_sandboxd() == bundled
    bundled.unlink()
    assert binary.find_sandboxd() == other
    other.chmod(0o644)
    with pytest.raises(AgentflyError, match="does not exist") as caught:
        binary.find_sandboxd()
    assert caught.value.hints == ("make sandboxd",)
