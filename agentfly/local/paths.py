"""Where agentfly keeps what can be made again."""

import os
from pathlib import Path

from agentfly.errors import AgentflyError
from agentfly.resources.images.cache import ImageCache

BROKER = "broker"
"""The socket of a data plane's broker, in the data plane's folder."""
IMAGES_GIB = "AGENTFLY_IMAGE_CACHE_GIB"
IMAGES_GIB_DEFAULT = 20.0
"""Some tens of images with Python in them."""


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/agentfly``, by default ``~/.cache/agentfly``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentfly"


def image_cache() -> ImageCache:
    """Unpacked images, as many GiB of them as ``AGENTFLY_IMAGE_CACHE_GIB`` says.

    Raises:
        AgentflyError: that is no number above 0.
    """
    text = os.environ.get(IMAGES_GIB) or str(IMAGES_GIB_DEFAULT)
    try:
        limit = int(float(text) * 2**30)
    except (ValueError, OverflowError):
        limit = 0
    if limit <= 0:
        hints = [f"export {IMAGES_GIB}=40, or unset it"]
        raise AgentflyError(f"{IMAGES_GIB}: {text} is no number of GiB above 0", hints=hints)
    return ImageCache(cache_dir() / "images", limit)


def run_dir() -> Path:
    """Sockets and overlays of what runs now. Beside the cache: the upper of an overlay needs a real disk."""
    path = cache_dir() / "run"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
