"""The images of a rollout, and the tokens that stand for them.

Guarantees:
1. In the ledger each image is one id of its own, below zero, and one text of its own: prompts that show
   different images differ, whatever else they have in common. An image that is shown twice is one image.
2. Ids for a server have the model's placeholder instead, once for each image; ids of a row have it as often
   as the model has tokens there. Both come from the ids of the ledger, and so do the images beside them: what
   was cut off takes its images along.
3. A template that shows another number of images than the messages have raises ``TemplateRefused``.
4. Text of a tool that spells a placeholder is changed so that it does not.
5. A policy that reads text alone, or whose processor is not known here, gets no image:
   ``ImagesNotReadable``. A file that is no image is ``ImageInvalid``.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentfly.agent.content import image_part, images_of, is_image, text_part
from agentfly.models.images import data_url, from_data_url, media_type
from agentfly.rollout.dialect import Messages
from agentfly.rollout.errors import ImageInvalid, ImagesNotReadable, TemplateRefused
from agentfly.rollout.template import Tokenizer

# A character for each image behind its placeholder, from a plane that no text uses.
_FIRST_MARK, _LAST_MARK = 0xF0000, 0xFFFFD


@dataclass(frozen=True)
class Image:
    """An image as the model is given it, as a data URL, and how many tokens it has there."""

    url: str
    tokens: int


class ImageReader(Protocol):
    """What is known of how a model sees images."""

    @property
    def reserved(self) -> Mapping[str, int]:
        """The texts that stand for what is seen and that nobody may write, with the token of each; that of an
        image is the first. Empty: a model whose tokens are not counted here."""
        ...

    def read(self, data: bytes) -> Image:
        """An image file as the model is given it.

        Raises:
            ImageInvalid: it cannot be read.
        """
        ...


class AnyImage:
    """The reader of an API of text and images, which gets files as they are and counts for itself."""

    reserved: Mapping[str, int] = {}

    def read(self, data: bytes) -> Image:
        """See ``ImageReader``."""
        return Image(data_url(data), 0)


@dataclass(frozen=True)
class NoImages:
    """The reader of a policy that sees none, and why."""

    why: str = "the policy reads text alone"
    reserved: Mapping[str, int] = field(default_factory=dict)

    def read(self, data: bytes) -> Image:
        """Raise ``ImagesNotReadable``."""
        raise ImagesNotReadable(
            f"images: {self.why}",
            hints=["say in text what there is to see", "or use a model that sees images"],
        )


class Media:
    """The images of one attempt at a rollout, by number.

    Args:
        reader: of the policy; None: it reads text alone.

    Attributes:
        urls: the images as data URLs, in the order of their numbers.
    """

    def __init__(self, reader: ImageReader | None = None) -> None:
        self.urls: list[str] = []
        self._reader = reader or NoImages()
        self._tokens: list[int] = []
        self._numbers: dict[bytes, int] = {}

    @property
    def sees(self) -> bool:
        """Whether the policy has placeholders, which nobody may write."""
        return bool(self._reader.reserved)

    async def add(self, given: Any, of: str) -> int:
        """The number of an image: of the bytes of a file, a data URL, or a number that it has already.

        Args:
            of: who gives it, for the error.

        Raises:
            ImagesNotReadable: the policy reads text alone.
            ImageInvalid: it is no image.
        """
        if isinstance(given, int) and 0 <= given < len(self.urls):
            return given
        try:
            data = _bytes_of(given)
            if data not in self._numbers:
                image = await asyncio.to_thread(self._reader.read, data)
                if data not in self._numbers:
                    self._numbers[data] = len(self.urls)
                    self.urls.append(image.url)
                    self._tokens.append(image.tokens)
            return self._numbers[data]
        except (ImageInvalid, ImagesNotReadable) as error:
            raise type(error)(f"{of}: {error.message}", hints=error.hints) from error

    async def take(self, messages: Messages, *, spelled: bool = True) -> list[dict[str, Any]]:
        """The messages of a prompt with numbers for their images; raises as ``add``.

        Args:
            spelled: leave text that spells a placeholder, for the template to refuse: who wrote the prompt
                meant something by it. Else it is made harmless.
        """
        taken = [{**message, "content": await self._taken(message["content"])} for message in messages]
        return taken if spelled else [self._harmless(message) for message in taken]

    def _harmless(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"]
        if isinstance(content, str):
            return {**message, "content": self.harmless(content)}
        parts = [part if is_image(part) else text_part(self.harmless(part["text"])) for part in content]
        return {**message, "content": parts}

    async def _taken(self, content: Any) -> Any:
        if isinstance(content, str):
            return content
        return [
            image_part(await self.add(part["image"], "prompt")) if is_image(part) else dict(part)
            for part in content
        ]

    def harmless(self, text: str) -> str:
        """A text that spells no placeholder."""
        for spelled in self._reader.reserved:
            text = text.replace(spelled, f"{spelled[0]} {spelled[1:]}")
        return text

    def wrote(self, ids: Sequence[int], text: str) -> str | None:
        """Which placeholder an answer has, by its ids or spelled in its text; None: none."""
        reserved = self._reader.reserved.items()
        found = (said for said, token in reserved if token in ids or said in text)
        return next(found, None)

    def tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer for ids and texts in which images are told apart."""
        return _WithImages(tokenizer, *self._placeholder) if self.sees else tokenizer

    def shown(self, ids: Sequence[int]) -> list[int]:
        """The numbers of the images that stand in ids of the ledger."""
        return [-1 - token for token in ids if token < 0] if self.urls else []

    def for_server(self, ids: Sequence[int]) -> list[int]:
        """Ids of the ledger with one placeholder for each image."""
        return _single(ids, self._placeholder[1]) if self.urls else list(ids)

    def length(self, ids: Sequence[int]) -> int:
        """How many tokens the model has for ids of the ledger."""
        return len(ids) + sum(self._tokens[number] - 1 for number in self.shown(ids))

    def expanded(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The tokens of the model for ids of the ledger, and where each id begins among them; the latter
        has one more entry, for the end."""
        tokens: list[int] = []
        begins = [0]
        for token in ids:
            if token < 0:
                tokens += [self._placeholder[1]] * self._tokens[-1 - token]
            else:
                tokens.append(token)
            begins.append(len(tokens))
        return tokens, begins

    @property
    def _placeholder(self) -> tuple[str, int]:
        return next(iter(self._reader.reserved.items()))


class _WithImages:
    """A tokenizer for which images are ids below zero, and marked in text."""

    def __init__(self, tokenizer: Tokenizer, text: str, token: int) -> None:
        self._tokenizer = tokenizer
        self._text, self._id = text, token
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
        marked = (
            f"{part}{self._text}{chr(_FIRST_MARK + n)}" for part, n in zip(between, numbers, strict=True)
        )
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
