"""Image files as a vision-language model is given them."""

import contextlib
import io
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from agentfly.errors import AgentflyError
from agentfly.models.images import data_url, from_data_url, media_type, pil_images
from agentfly.rollout import ProcessorReader
from agentfly.rollout.errors import ImageInvalid, ImagesNotReadable
from agentfly.rollout.vision import reader_of


class Processor:
    """As that of Qwen2.5-VL: a token for each 28 by 28 pixels."""

    image_token, image_token_id = "<|image_pad|>", 5
    video_token, video_token_id = "<|video_pad|>", 6
    around: tuple[int, ...] = ()

    def _get_num_multimodal_tokens(self, image_sizes: list[tuple[int, int]]) -> Any:
        if any(max(size) > 200 * min(size) for size in image_sizes):
            raise ValueError("absolute aspect ratio must be smaller than 200")
        return SimpleNamespace(num_image_tokens=[(h // 28) * (w // 28) for h, w in image_sizes])

    def __call__(self, text: list[str], images: list[Any], add_special_tokens: bool) -> dict[str, Any]:
        assert text == [self.image_token]
        assert not add_special_tokens
        width, height = images[0].size
        return {"input_ids": [[*self.around, *[5] * ((height // 28) * (width // 28)), *self.around]]}


def written(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


READER = ProcessorReader(Processor())
FILES = {kind: written(Image.new("RGB", (56, 56), "red"), kind) for kind in ("PNG", "JPEG", "GIF", "WEBP")}


def test_rgb_file_is_given_as_it_is() -> None:
    for kind in ("PNG", "JPEG", "WEBP"):
        data = written(Image.new("RGB", (84, 56), "red"), kind)
        image = READER.read(data)
        assert (from_data_url(image.url), image.tokens) == (data, 6)
        assert from_data_url(data_url(data)) == data
        assert media_type(data) == f"image/{kind.lower()}"


def test_transparency_lies_on_white_and_grey_has_three_colours() -> None:
    (picture,) = pil_images([READER.read(written(Image.new("RGBA", (56, 56), (255, 0, 0, 0)))).url])
    assert (picture.mode, picture.getpixel((1, 1))) == ("RGB", (255, 255, 255))
    (picture,) = pil_images([READER.read(written(Image.new("L", (56, 56), 7))).url])
    assert picture.getpixel((1, 1)) == (7, 7, 7)
    (picture,) = pil_images([READER.read(written(Image.new("P", (56, 56)), "GIF")).url])
    assert picture.mode == "RGB"


def test_picture_is_turned_as_its_file_says() -> None:
    """Some read that mark and some do not: afterwards there is none."""
    upright = Image.new("RGB", (84, 28), "white")
    ImageDraw.Draw(upright).rectangle((0, 0, 27, 27), fill="black")
    exif = Image.Exif()
    exif[0x0112] = 6
    image = READER.read(written(upright, "PNG", exif=exif))
    assert image.tokens == 3
    (picture,) = pil_images([image.url])
    assert picture.size == (28, 84)
    assert picture.getexif().get(0x0112, 1) == 1
    assert picture.getpixel((14, 14)) == (0, 0, 0)


@pytest.mark.parametrize("cut", [8, 40, -2000])
def test_torn_file_is_no_image(cut: int) -> None:
    data = written(Image.effect_noise((84, 84), 50).convert("RGB"))
    with pytest.raises(ImageInvalid, match="image: cannot be read"):
        READER.read(data[:cut])


@given(st.integers(0, 2**20), st.integers(1, 255), st.sampled_from(["PNG", "JPEG", "GIF", "WEBP"]))
def test_broken_file_is_an_image_or_invalid(at: int, change: int, kind: str) -> None:
    """Decoders raise whatever they like."""
    data = bytearray(FILES[kind])
    data[at % len(data)] ^= change
    with contextlib.suppress(ImageInvalid):
        pil_images([READER.read(bytes(data)).url])


def test_file_that_would_fill_the_memory_is_refused_before_it_is_decoded() -> None:
    data = written(Image.new("1", (8_000, 6_000)))
    assert len(data) < 100_000
    with pytest.raises(ImageInvalid, match="8000 x 6000 is more than 40000000 pixels") as error:
        READER.read(data)
    assert error.value.hints == ("make it smaller",)


def test_picture_that_the_processor_does_not_take_is_invalid() -> None:
    with pytest.raises(ImageInvalid, match="image: 2000 x 2: absolute aspect ratio"):
        READER.read(written(Image.new("RGB", (2000, 2))))


def test_more_than_8_bits_are_refused() -> None:
    """Cut to 8, all that is not nearly black would be white."""
    with pytest.raises(ImageInvalid, match="has more than 8 bits a colour"):
        READER.read(written(Image.new("I;16", (56, 56))))


def test_processor_that_is_not_known_sees_nothing_and_says_so() -> None:
    def missing() -> Any:
        raise ImportError("needs torchvision")

    assert reader_of(Processor).reserved == READER.reserved
    for load, why in ((missing, "needs torchvision"), (SimpleNamespace, "SimpleNamespace cannot be asked")):
        with pytest.raises(ImagesNotReadable, match=f"the policy's processor cannot be used: .*{why}"):
            reader_of(load).read(FILES["PNG"])


def test_placeholders_of_images_and_videos_are_reserved() -> None:
    assert READER.reserved == {"<|image_pad|>": 5, "<|video_pad|>": 6}


def test_processor_that_writes_more_than_placeholders_is_refused() -> None:
    class Framing(Processor):
        around = (7,)

    with pytest.raises(AgentflyError, match=r"Framing writes more of an image than <\|image_pad\|>"):
        ProcessorReader(Framing())


def test_processor_of_something_else_is_refused() -> None:
    with pytest.raises(AgentflyError, match="SimpleNamespace cannot be asked for the tokens of an image"):
        ProcessorReader(SimpleNamespace())


@pytest.mark.parametrize("url", ["http://x/y.png", "data:image/png,abc", "data:image/png;base64,a$b", ""])
def test_what_is_no_data_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"not a data URL|not base64"):
        from_data_url(url)
