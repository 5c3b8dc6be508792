"""Image files as servers take them."""

import base64
import binascii
import io
from collections.abc import Sequence
from typing import Any

_TYPES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}


def media_type(data: bytes) -> str | None:
    """The type of an image file, by how it begins; None if it is none that servers take."""
    found = next((kind for begin, kind in _TYPES.items() if data.startswith(begin)), None)
    return None if found == "image/webp" and data[8:12] != b"WEBP" else found


def data_url(data: bytes) -> str:
    """An image file as text."""
    return f"data:{media_type(data)};base64,{base64.b64encode(data).decode()}"


def from_data_url(url: str) -> bytes:
    """The bytes of a data URL.

    Raises:
        ValueError: it is none, or not base64.
    """
    head, comma, body = url.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64") or not comma:
        raise ValueError(f"not a data URL with base64: {url[:40]!r}")
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from error


def pil_images(urls: Sequence[str]) -> list[Any]:
    """The images of data URLs, in RGB. Takes as long as decoding them does: call it in a thread."""
    from PIL import Image

    return [Image.open(io.BytesIO(from_data_url(url))).convert("RGB") for url in urls]
