"""The images of a rollout, and the tokens that stand for them.

Guarantees:
1. In the ledger each image is one id of its own, below zero, and one text of its own: prompts that show
   different images differ, whatever else they have in common. An image that is shown twice is one image.
2. Ids for a server have the model's placeholder instead, once for each image; ids of a row have it as often
   as the model has tokens there. Both come from the ids of the ledger, and so do the images beside them: what
   was cut off takes its images along.
3. A template that shows another number of images than the messages have raises ``TemplateRefused``.
4. Text of a tool that spells a placeholder is changed so that it does not.
5. A policy that reads text alone gets no image: ``ImagesNotReadable``. A file that is no image is
   ``ImageInvalid``.
"""

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentfly.agent.content import image_part, images_of, is_image
from agentfly.models.images import from_data_url, media_type
from agentfly.rollout.dialect import Messages
from agentfly.rollout.errors import ImageInvalid, ImagesNotReadable, TemplateRefused
from agentfly.rollout.template import Tokenizer

# A character for each image behind its placeholder, from a plane that no text uses.
_FIRST_MARK, _LAST_MARK = 0xF0000, 0xFFFFD


@dataclass(frozen=True)
class Image:
    """The file of an image as the model is given it, and how many tokens it has there."""

    data: bytes
    tokens: int


class ImageReader(Protocol):
    """What is known of a model that sees images.

    Attributes:
        placeholder: the text that its template writes for an image; one token.
        placeholder_id: that token.
        reserved: texts and ids that stand for what is seen, and that nobody may write.
    """

    placeholder: str
    placeholder_id: int
    reserved: Mapping[str, int]

    def read(self, data: bytes) -> Image:
        """An image file as the model is given it.

        Raises:
            ImageInvalid: it cannot be read.
        """
        ...


class AnyImage:
    """The reader of an API of text and images, which gets files as they are and counts for itself."""

    placeholder, placeholder_id = "", -1
    reserved: Mapping[str, int] = {}

    def read(self, data: bytes) -> Image:
        """See ``ImageReader``."""
        return Image(data, 0)


class Media:
    """The images of one attempt at a rollout, by number.

    Args:
        reader: of the policy; None: it reads text alone.
    """

    def __init__(self, reader: ImageReader | None = None) -> None:
        self._reader = reader
        self._images: list[Image] = []
        self._numbers: dict[bytes, int] = {}

    @property
    def files(self) -> list[bytes]:
        """The files of all images, in the order of their numbers."""
        return [image.data for image in self._images]

    async def add(self, given: Any, of: str) -> int:
        """The number of an image: of the bytes of a file, a data URL, or a number that it has already.

        Args:
            of: who gives it, for the error.

        Raises:
            ImagesNotReadable: the policy reads text alone.
            ImageInvalid: it is no image.
        """
        if isinstance(given, int) and 0 <= given < len(self._images):
            return given
        if self._reader is None:
            raise ImagesNotReadable(
                f"{of}: shows an image, and the policy reads text alone",
                hints=[
                    "say in text what there is to see",
                    "or use a model that sees images",
                ],
            )
        data = _bytes_of(given)
        if data not in self._numbers:
            image = await asyncio.to_thread(self._reader.read, data)
            if data not in self._numbers:
                self._numbers[data] = len(self._images)
                self._images.append(image)
        return self._numbers[data]

    async def take(self, messages: Messages) -> list[dict[str, Any]]:
        """The messages of a prompt with numbers for their images; raises as ``add``."""
        return [{**message, "content": await self._taken(message["content"])} for message in messages]

    async def _taken(self, content: Any) -> Any:
        if isinstance(content, str):
            return content
        return [
            image_part(await self.add(part["image"], "prompt")) if is_image(part) else dict(part)
            for part in content
        ]

    def harmless(self, text: str) -> str:
        """A text that spells no placeholder."""
        for spelled in self._reader.reserved if self._reader is not None else ():
            text = text.replace(spelled, f"{spelled[0]} {spelled[1:]}")
        return text

    def wrote(self, ids: Sequence[int], text: str) -> str | None:
        """Which placeholder an answer has, by its ids or spelled in its text; None: none."""
        reserved = self._reader.reserved if self._reader is not None else {}
        found = (said for said, token in reserved.items() if token in ids or said in text)
        return next(found, None)

    def tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer for ids and texts in which images are told apart."""
        return tokenizer if self._reader is None else _WithImages(tokenizer, self._reader)

    def shown(self, ids: Sequence[int]) -> list[int]:
        """The numbers of the images that stand in ids of the ledger."""
        return [-1 - token for token in ids if token < 0] if self._images else []

    def for_server(self, ids: Sequence[int]) -> list[int]:
        """Ids of the ledger with one placeholder for each image."""
        if self._reader is None:
            return list(ids)
        return _single(ids, self._reader.placeholder_id)

    def length(self, ids: Sequence[int]) -> int:
        """How many tokens the model has for ids of the ledger."""
        return len(ids) + sum(self._images[number].tokens - 1 for number in self.shown(ids))

    def expanded(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The tokens of the model for ids of the ledger, and where each id begins among them; the latter
        has one more entry, for the end."""
        tokens: list[int] = []
        begins = [0]
        for token in ids:
            if token < 0 and self._reader is not None:
                tokens += [self._reader.placeholder_id] * self._images[-1 - token].tokens
            else:
                tokens.append(token)
            begins.append(len(tokens))
        return tokens, begins


class _WithImages:
    """A tokenizer for which images are ids below zero, and marked in text."""

    def __init__(self, tokenizer: Tokenizer, reader: ImageReader) -> None:
        self._tokenizer = tokenizer
        self._id, self._text = reader.placeholder_id, reader.placeholder
        self._marked = re.compile(f"{re.escape(self._text)}([{chr(_FIRST_MARK)}-{chr(_LAST_MARK)}])")

    @property
    def eos_token_id(self) -> int | None:
        """See ``Tokenizer``."""
        return self._tokenizer.eos_token_id

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, **options: Any
    ) -> Any:
        """See ``Tokenizer``."""
        made = self._tokenizer.apply_chat_template(conversation, tokenize=tokenize, **options)
        numbers = images_of(conversation)
        return self._numbered(made, numbers) if tokenize else self._mark(str(made), numbers)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """See ``Tokenizer``."""
        numbers = [ord(mark) - _FIRST_MARK for mark in self._marked.findall(text)]
        plain = self._marked.sub(lambda _: self._text, text)
        return self._numbered(self._tokenizer.encode(plain, add_special_tokens=add_special_tokens), numbers)

    def decode(self, token_ids: list[int]) -> str:
        """See ``Tokenizer``."""
        numbers = [-1 - token for token in token_ids if token < 0]
        text = self._tokenizer.decode(_single(token_ids, self._id))
        return self._mark(text, numbers) if numbers else text

    def _numbered(self, ids: Sequence[int], numbers: Sequence[int]) -> list[int]:
        self._check(sum(token == self._id for token in ids), len(numbers))
        left = iter(numbers)
        return [-1 - next(left) if token == self._id else token for token in ids]

    def _mark(self, text: str, numbers: Sequence[int]) -> str:
        *between, last = text.split(self._text)
        self._check(len(between), len(numbers))
        marked = (f"{part}{self._text}{chr(_FIRST_MARK + n)}" for part, n in _zip(between, numbers))
        return "".join(marked) + last

    def _check(self, shown: int, given: int) -> None:
        if shown != given:
            raise TemplateRefused(
                f"chat template: shows {shown} images of {given}",
                hints=[
                    f"give images as parts of a message, and spell {self._text} nowhere",
                    "use a model whose chat template shows images in messages of every role",
                ],
            )


def _zip(parts: Sequence[str], numbers: Sequence[int]) -> Iterator[tuple[str, int]]:
    return zip(parts, numbers, strict=True)


def _single(ids: Sequence[int], placeholder: int) -> list[int]:
    return [placeholder if token < 0 else token for token in ids]


def _bytes_of(given: Any) -> bytes:
    data = given
    if isinstance(given, str):
        try:
            data = from_data_url(given)
        except ValueError as error:
            raise ImageInvalid(f"image: {error}", hints=[_HINT]) from error
    if not isinstance(data, bytes):
        raise ImageInvalid(f"image: {given!r} is no image of this rollout", hints=[_HINT])
    if media_type(data) is None:
        raise ImageInvalid(f"image: {data[:8]!r}... is no PNG, JPEG, GIF or WebP file", hints=[_HINT])
    return data


_HINT = "give the bytes of a PNG or JPEG file, or a data URL of them"
