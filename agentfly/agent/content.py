"""What a chat message says: text, or a list of parts, each of which is text or an image.

A part is ``{"type": "text", "text": ...}`` or ``{"type": "image", "image": ...}``. From a prompt or a tool an
image is the bytes of its file, or a data URL; in the messages of a rollout it is a number (see
``rollout.media``).
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

Part = dict[str, Any]
Content = str | list[Part]
_SHOWING = ("user", "tool")


def text_part(text: str) -> Part:
    """A part that is text."""
    return {"type": "text", "text": text}


def image_part(image: Any) -> Part:
    """A part that is an image."""
    return {"type": "image", "image": image}


def is_image(part: Mapping[str, Any]) -> bool:
    """Whether a part is an image; it is text otherwise."""
    return bool(part["type"] == "image")


def with_images(text: str, images: Iterable[Any]) -> Content:
    """A text, and the images below it; the text alone if there are none."""
    parts = [image_part(image) for image in images]
    if not parts:
        return text
    return [text_part(text), *parts] if text else parts


def joined(first: Content, second: Content, between: str = "\n") -> Content:
    """Two contents as one."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{between}{second}"
    return [*_parts(first), text_part(between), *_parts(second)]


def text_of(content: Content) -> str:
    """The text, with ``[image]`` where there is one."""
    return "".join("[image]" if is_image(part) else part["text"] for part in _parts(content))


def images_of(messages: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The images of a conversation, in order."""
    contents = (message["content"] for message in messages)
    return [part["image"] for content in contents for part in _parts(content) if is_image(part)]


def problem_of(message: Any) -> str | None:
    """Why this is no message of a prompt, behind its number; None if it is one."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return "is not a dict with a role"
    problem = _problem_of_content(message.get("content")) or _not_json(message, "content")
    if problem is None and not isinstance(message["content"], str) and message["role"] not in _SHOWING:
        problem = "has parts in content: only those of user and tool may"
    return problem if problem is None else f"({message['role']}) {problem}"


def _not_json(told: Mapping[str, Any], but: str) -> str | None:
    """It goes into a trajectory, which is JSON."""
    for key, value in told.items():
        try:
            if key != but:
                json.dumps({key: value})
        except (TypeError, ValueError):
            return f"has {type(value).__name__} at {key!r}, which is no JSON"
    return None


def _problem_of_content(content: Any) -> str | None:
    if isinstance(content, str):
        return None
    if not isinstance(content, list | tuple) or not content:
        return "has no text in content"
    wrong = ((at, _problem_of_part(part)) for at, part in enumerate(content))
    return next((f"has a part {at} {problem}" for at, problem in wrong if problem), None)


def _problem_of_part(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", "image"):
        found = type(part).__name__ if kind is None else f"of type {kind!r}"
        return f'that is {found}, neither {{"type": "text"}} nor {{"type": "image"}}'
    if kind == "text" and not isinstance(part.get("text"), str):
        return "without text"
    image = part.get("image")
    if kind == "image" and (isinstance(image, bool) or not isinstance(image, bytes | str | int)):
        return f"whose image is {type(image).__name__}, neither bytes nor a data URL"
    problem = _not_json(part, "image")
    return problem and f"that {problem}"


def _parts(content: Content) -> list[Part]:
    return [text_part(content)] if isinstance(content, str) else content
