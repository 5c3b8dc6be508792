"""The processor of a vision-language model as an ``ImageReader``.

Guarantees:
1. An image is the same pixels for everybody who reads its file: what is not RGB as it stands is made so,
   turned as its file says and laid on white. One with more than 8 bits of grey, or more than
   ``MAX_PIXELS``, is refused.
2. What the processor makes of an image is its placeholder so many times; one that writes anything else around
   or between them is refused when the reader is made.
"""

import io
import logging
from collections.abc import Callable
from typing import Any

from agentfly.errors import AgentflyError
from agentfly.models.images import data_url
from agentfly.rollout.errors import ImageInvalid
from agentfly.rollout.media import Image, ImageReader, NoImages

logger = logging.getLogger(__name__)

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""In the folder of a model that sees: one of them, depending on the version that saved it."""
MAX_PIXELS = 40_000_000
"""A small file can be a picture of gigabytes."""
_PROBE = (64, 48)
_ORIENTATION = 0x0112


class ProcessorReader:
    """How a model sees images.

    Args:
        processor: of the model, as ``AutoProcessor.from_pretrained`` gives it.

    Raises:
        AgentflyError: it is not for images, or writes them in a way that is not known here.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        name = type(processor).__name__
        try:
            self.reserved: dict[str, int] = {processor.image_token: processor.image_token_id}
            made = self._probe(processor.image_token)
        except Exception as error:
            raise AgentflyError(
                f"processor: {name} cannot be asked for the tokens of an image: {error}",
                hints=["use a model such as Qwen2.5-VL or Qwen3-VL"],
            ) from error
        if made != [processor.image_token_id] * self._tokens(*_PROBE):
            raise AgentflyError(
                f"processor: {name} writes more of an image than {processor.image_token}",
                hints=["use a model such as Qwen2.5-VL or Qwen3-VL"],
            )
        video = getattr(processor, "video_token", None), getattr(processor, "video_token_id", None)
        if isinstance(video[0], str) and isinstance(video[1], int):
            self.reserved |= {video[0]: video[1]}

    def read(self, data: bytes) -> Image:
        """See ``ImageReader``."""
        data, (width, height) = _as_seen(data)
        try:
            return Image(data_url(data), self._tokens(width, height))
        except ValueError as error:  # such as of a line of one pixel
            raise ImageInvalid(f"image: {width} x {height}: {error}", hints=["crop it, or pad it"]) from error

    def _tokens(self, width: int, height: int) -> int:
        sizes = [(height, width)]
        return int(self._processor._get_num_multimodal_tokens(image_sizes=sizes).num_image_tokens[0])

    def _probe(self, text: str) -> list[int]:
        from PIL import Image as Picture

        image = Picture.new("RGB", _PROBE)
        return list(self._processor(text=[text], images=[image], add_special_tokens=False)["input_ids"][0])


def reader_of(load: Callable[[], Any]) -> ImageReader:
    """How a model sees images. One whose processor cannot be loaded, or is not known here, sees none."""
    try:
        return ProcessorReader(load())
    except Exception as error:  # of whatever the processor is made of; text needs none
        logger.warning("images: not for this policy: %s", error)
        return NoImages(f"the policy's processor cannot be used: {error}")


def _as_seen(data: bytes) -> tuple[bytes, tuple[int, int]]:
    """The file for an image, and its width and height."""
    from PIL import Image as Picture
    from PIL import ImageOps

    try:
        picture: Picture.Image = Picture.open(io.BytesIO(data))
        if picture.width * picture.height > MAX_PIXELS:
            raise ImageInvalid(
                f"image: {picture.width} x {picture.height} is more than {MAX_PIXELS} pixels",
                hints=["make it smaller"],
            )
        if picture.mode[0] in "IF":
            raise ImageInvalid(
                f"image: has more than 8 bits a colour ({picture.mode})", hints=["save it with 8 bits"]
            )
        picture.load()
        if picture.mode != "RGB" or picture.getexif().get(_ORIENTATION, 1) != 1:
            picture = ImageOps.exif_transpose(picture).convert("RGBA")
            white = Picture.new("RGBA", picture.size, "white")
            picture = Picture.alpha_composite(white, picture).convert("RGB")
            written = io.BytesIO()
            picture.save(written, "PNG")
            data = written.getvalue()
        return data, picture.size
    except ImageInvalid:
        raise
    except Exception as error:  # whatever a decoder raises for what is no image
        raise ImageInvalid(
            f"image: cannot be read: {error}", hints=["give the bytes of a PNG or JPEG file"]
        ) from error
