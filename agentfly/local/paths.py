"""Where agentfly keeps what can be made again."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/agentfly``, by default ``~/.cache/agentfly``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentfly"


def run_dir() -> Path:
    """Sockets and overlays of what runs now. Beside the cache: the upper of an overlay needs a real disk."""
    path = cache_dir() / "run"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
