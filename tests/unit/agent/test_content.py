"""What chat messages may say."""

from typing import Any

import pytest

from agentfly.agent.content import image_part, images_of, joined, problem_of, text_of, text_part, with_images

SEEN = [text_part("a"), image_part(3)]


def test_text_alone_stays_text() -> None:
    assert with_images("a", []) == "a"
    assert joined("a", "b") == "a\nb"
    assert text_of("a") == "a"


def test_images_stand_below_the_text() -> None:
    assert with_images("a", [3, 4]) == [text_part("a"), image_part(3), image_part(4)]
    assert with_images("", [3]) == [image_part(3)]


def test_joined_contents_keep_their_images_in_order() -> None:
    both = joined([image_part(1)], joined("b", SEEN), "\n\n")
    assert images_of([{"content": both}, {"content": "x"}, {"content": SEEN}]) == [1, 3, 3]
    assert text_of(both) == "[image]\n\nb\na[image]"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", None),
        (SEEN, None),
        ([image_part(b"x"), image_part("data:")], None),
        (None, "(user) has no text in content"),
        ([], "(user) has no text in content"),
        (["a"], '(user) has a part 0 that is str, neither {"type": "text"} nor {"type": "image"}'),
        ([text_part("a"), {"type": "video"}], "(user) has a part 1 that is of type 'video', neither"),
        ([{"type": "text"}], "(user) has a part 0 without text"),
        ([image_part(None)], "(user) has a part 0 whose image is NoneType, neither bytes nor a data URL"),
        ([image_part(True)], "(user) has a part 0 whose image is bool, neither bytes nor a data URL"),
        ([{**text_part("a"), "raw": b""}], "(user) has a part 0 that has bytes at 'raw', which is no JSON"),
    ],
)
def test_what_is_no_content_says_why(content: Any, problem: str | None) -> None:
    found = problem_of({"role": "user", "content": content})
    assert found is None if problem is None else found is not None and found.startswith(problem)


@pytest.mark.parametrize("role", ["system", "assistant", "user", "tool"])
def test_user_and_tool_alone_show_something(role: str) -> None:
    found = problem_of({"role": role, "content": SEEN})
    refused = f"({role}) has parts in content: only those of user and tool may"
    assert found == (None if role in ("user", "tool") else refused)
    assert problem_of({"role": role, "content": "a"}) is None


def test_what_would_not_go_into_a_trajectory_is_said() -> None:
    message = {"role": "user", "content": "what is it", "images": [b"png"]}
    assert problem_of(message) == "(user) has list at 'images', which is no JSON"


@pytest.mark.parametrize("message", ["text", {"content": "x"}, {"role": 1, "content": "x"}])
def test_what_is_no_message_says_so(message: Any) -> None:
    assert problem_of(message) == "is not a dict with a role"
