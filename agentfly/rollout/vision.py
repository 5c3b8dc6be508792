"""The processor of a vision-language model as an ``ImageReader``.

Guarantees:
1. An image is the same pixels for everybody who reads its file: what is not RGB as it stands is made so,
   turned as its file says and laid on white.
2. What the processor makes of an image is its placeholder so many times; one that writes anything else around
   or between them is refused when the reader is made.
"""

import io
from collections.abc import Mapping
from typing import Any

from agentfly.errors import AgentflyError
from agentfly.rollout.errors import ImageInvalid
from agentfly.rollout.media import Image

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
            self.placeholder: str = processor.image_token
            self.placeholder_id: int = processor.image_token_id
            made = self._probe()
        except Exception as error:
            raise AgentflyError(
                f"processor: {name} cannot be asked for the tokens of an image: {error}",
                hints=["use a model such as Qwen2.5-VL or Qwen3-VL"],
            ) from error
        if made != [self.placeholder_id] * self._tokens(*_PROBE):
            raise AgentflyError(
                f"processor: {name} writes more of an image than {self.placeholder}",
                hints=["use a model such as Qwen2.5-VL or Qwen3-VL"],
            )
        self.reserved: Mapping[str, int] = {self.placeholder: self.placeholder_id}
        video = getattr(processor, "video_token", None), getattr(processor, "video_token_id", None)
        if isinstance(video[0], str) and isinstance(video[1], int):
            self.reserved |= {video[0]: video[1]}

    def read(self, data: bytes) -> Image:
        """See ``ImageReader``."""
        from PIL import Image as Picture
        from PIL import ImageOps

        try:
            picture: Picture.Image = Picture.open(io.BytesIO(data))
            picture.load()
            if picture.mode != "RGB" or picture.getexif().get(_ORIENTATION, 1) != 1:
                picture = ImageOps.exif_transpose(picture).convert("RGBA")
                white = Picture.new("RGBA", picture.size, "white")
                picture = Picture.alpha_composite(white, picture).convert("RGB")
                written = io.BytesIO()
                picture.save(written, "PNG")
                data = written.getvalue()
            return Image(data, self._tokens(*picture.size))
        except (OSError, ValueError, Picture.DecompressionBombError) as error:
            raise ImageInvalid(
                f"image: cannot be read: {error}", hints=["give the bytes of a PNG or JPEG file"]
            ) from error

    def _tokens(self, width: int, height: int) -> int:
        sizes = [(height, width)]
        return int(self._processor._get_num_multimodal_tokens(image_sizes=sizes).num_image_tokens[0])

    def _probe(self) -> list[int]:
        from PIL import Image as Picture

        text, image = self.placeholder, Picture.new("RGB", _PROBE)
        return list(self._processor(text=[text], images=[image], add_special_tokens=False)["input_ids"][0])
