"""What a template puts after a turn, and what happens when it will not."""

from typing import Any

import pytest

from agentfly.agent import HermesParser
from agentfly.rollout import TemplateRefused, template
from agentfly.rollout.template import ChatTemplate
from tests.unit.rollout import toys
from tests.unit.rollout.toys import ToyTokenizer

USER = [{"role": "user", "content": "go"}]
SEEN = [{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}]


def opened(render: toys.Render, first: Any = USER) -> ChatTemplate:
    return ChatTemplate(ToyTokenizer(render), [], first, HermesParser())


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
    template = opened(toys.APPEND_ONLY[name])
    assert template.tail(SEEN) == tail


@pytest.mark.parametrize(("name", "end"), [("chatml", "<|im_end|>"), ("spaced", "</s>"), ("plain", None)])
def test_end_token_is_found_from_the_template(name: str, end: str | None) -> None:
    tokenizer = ToyTokenizer(toys.APPEND_ONLY[name])
    expected = None if end is None else tokenizer.special(end)
    assert ChatTemplate(tokenizer, [], USER, HermesParser()).end_id == expected


def test_tail_is_cut_at_the_turn_and_not_at_text_like_it() -> None:
    template = opened(toys.chatml, [{"role": "user", "content": "say <|im_end|> AgentflyX"}])
    assert template.tail(SEEN).startswith("<|im_end|>\n<|im_start|>tool\na")


# 2. its cost does not grow with the conversation


def test_tail_renders_the_first_messages_only() -> None:
    seen: list[int] = []

    def counting(messages: list[dict[str, object]], tools: object, generation: bool) -> str:
        seen.append(len(messages))
        return toys.chatml(messages, None, generation)

    template = opened(counting)
    seen.clear()
    template.tail(SEEN)
    template.tail(SEEN)
    assert seen == [4, 4]


# 3. observations in the first form that the template neither refuses nor leaves out


def wants_calls(messages: Any, tools: Any, generation: bool) -> str:
    """As Mistral and GPT-OSS: a tool message needs its call."""
    ids = [call["id"] for m in messages for call in m.get("tool_calls", [])]
    if any(m["role"] == "tool" and m.get("tool_call_id") not in ids for m in messages):
        raise ValueError("a tool message without its call")
    said = [{**m, "content": f"{m['content']}{m.get('tool_calls', '')}"} for m in messages]
    return toys.chatml(said, tools, generation)


def skipping(messages: Any, tools: Any, generation: bool) -> str:
    return toys.chatml([m for m in messages if m["role"] != "tool"], tools, generation)


def test_template_that_wants_calls_gets_them_apart() -> None:
    template = opened(wants_calls)
    conversation = [*USER, {"role": "assistant", "content": toys.call("shell", command="ls")}, SEEN[0]]
    text = template.text(conversation, generation=True)
    assert "'function': {'name': 'shell', 'arguments': {'command': 'ls'}}" in text
    assert text.endswith("<|im_start|>tool\na<|im_end|>\n<|im_start|>assistant\n")
    assert template.tail(SEEN) is None


@pytest.mark.parametrize("render", [toys.refusing, skipping])
def test_template_without_tool_messages_gets_observations_from_the_user(render: toys.Render) -> None:
    assert (
        opened(render).tail(SEEN) == "<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    )


# 4. a template that raises


def test_refused_roles_are_named() -> None:
    with pytest.raises(TemplateRefused) as error:
        opened(toys.one_turn).tail(SEEN)
    assert error.value.message == (
        "chat template: refuses the roles user, assistant, tool: one turn is enough"
    )
    assert error.value.hints


def test_template_that_shows_no_observation_is_refused() -> None:
    def users_once(messages: Any, tools: Any, generation: bool) -> str:
        return skipping(
            [m for at, m in enumerate(messages) if at == 0 or m["role"] != "user"], tools, generation
        )

    with pytest.raises(TemplateRefused, match="does not show what a tool gave"):
        opened(users_once).tail(SEEN)


def test_template_that_hides_the_assistant_is_refused() -> None:
    with pytest.raises(TemplateRefused, match="does not show the text of an assistant turn"):
        opened(toys.hiding)


# 5. tools that the template does not tell of


def test_template_that_tells_of_no_tools_is_in_the_log_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(template, "_CHECKED", set())
    for render in (toys.grouping, toys.grouping, toys.chatml):
        ChatTemplate(ToyTokenizer(render), [toys.shell.schema], USER, HermesParser())
    (record,) = caplog.records
    assert "chat template: tells the policy of no tools (shell)" in record.getMessage()
    monkeypatch.setattr(template, "_CHECKED", set())
    ChatTemplate(ToyTokenizer(toys.chatml), [toys.shell.schema], USER, HermesParser())
    ChatTemplate(ToyTokenizer(toys.grouping), [], USER, HermesParser())
    assert len(caplog.records) == 1
