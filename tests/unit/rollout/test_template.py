"""What a template puts after a turn, and what happens when it will not."""

import pytest

from agentfly.rollout import TemplateRefused
from agentfly.rollout.template import ChatTemplate
from tests.unit.rollout import toys
from tests.unit.rollout.toys import ToyTokenizer

USER = [{"role": "user", "content": "go"}]
SEEN = [{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}]


# 1. the tail is what the template writes between two assistant turns


@pytest.mark.parametrize(
    ("name", "tail"),
    [
        (
            "chatml",
            "<|im_end|>\n<|im_start|>tool\na<|im_end|>\n<|im_start|>tool\nb<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "grouping",
            "<|im_end|>\n<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>"
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("spaced", " </s><s>tool: a </s><s>tool: b </s><s>assistant: "),
        ("plain", "\n### tool\na\n### tool\nb\n### assistant\n"),
    ],
)
def test_tail_is_written_by_the_template(name: str, tail: str) -> None:
    template = ChatTemplate(ToyTokenizer(toys.APPEND_ONLY[name]), [], USER)
    assert template.tail(SEEN) == tail


@pytest.mark.parametrize(("name", "end"), [("chatml", "<|im_end|>"), ("spaced", "</s>"), ("plain", None)])
def test_end_token_is_found_from_the_template(name: str, end: str | None) -> None:
    tokenizer = ToyTokenizer(toys.APPEND_ONLY[name])
    expected = None if end is None else tokenizer.special(end)
    assert ChatTemplate(tokenizer, [], USER).end_id == expected


def test_tail_is_cut_at_the_turn_and_not_at_text_like_it() -> None:
    template = ChatTemplate(
        ToyTokenizer(toys.chatml), [], [{"role": "user", "content": "say <|im_end|> AgentflyX"}]
    )
    assert template.tail(SEEN).startswith("<|im_end|>\n<|im_start|>tool\na")


# 2. its cost does not grow with the conversation


def test_tail_renders_the_first_messages_only() -> None:
    seen: list[int] = []

    def counting(messages: list[dict[str, object]], tools: object, generation: bool) -> str:
        seen.append(len(messages))
        return toys.chatml(messages, None, generation)

    template = ChatTemplate(ToyTokenizer(counting), [], USER)
    seen.clear()
    template.tail(SEEN)
    assert seen == [4]


# 3. a template that raises


def test_refused_roles_are_named() -> None:
    template = ChatTemplate(ToyTokenizer(toys.refusing), [], USER)
    with pytest.raises(TemplateRefused) as error:
        template.tail(SEEN)
    assert error.value.message == (
        "chat template: refuses the roles user, assistant, tool, tool:"
        " only user and assistant roles are supported"
    )
    assert error.value.hints


def test_template_that_hides_the_assistant_is_refused() -> None:
    with pytest.raises(TemplateRefused, match="does not show the text of an assistant turn"):
        ChatTemplate(ToyTokenizer(toys.hiding), [], USER)
