"""Images in rollouts; the numbers are those of agentfly.rollout.media."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.agent import ToolResult, reward, tool
from agentfly.agent.content import images_of
from agentfly.agent.memory import Notes
from agentfly.context import Context
from agentfly.models import Sampled
from agentfly.models.images import data_url, from_data_url
from agentfly.rollout import (
    Chain,
    Failed,
    Masked,
    Scored,
    Step,
    StepView,
    TokenLedger,
    Trajectory,
    rollout_one,
    window,
    with_notes,
)
from agentfly.rollout.errors import ImageInvalid, ImagesNotReadable
from agentfly.rollout.media import Image, Media, NoImages
from tests.unit.rollout import toys
from tests.unit.rollout.talkers import says, talking
from tests.unit.rollout.toys import FakeResources, Script, ToyTokenizer, call, sampled

PLACEHOLDER = "<|image|>"
SPECIALS = (*toys.SPECIALS, PLACEHOLDER)


def url(number: int) -> str:
    return data_url(png(number))


def png(number: int) -> bytes:
    """What begins as one; the toy reader gives it ``number + 1`` tokens."""
    return b"\x89PNG\r\n\x1a\n" + bytes([number])


PLACEHOLDER_ID = SPECIALS.index(PLACEHOLDER)


class Reader:
    @property
    def reserved(self) -> Mapping[str, int]:
        return {PLACEHOLDER: PLACEHOLDER_ID}

    def read(self, data: bytes) -> Image:
        if data[-1] == 99:
            raise ImageInvalid("image: cannot be read: it is torn")
        return Image(data_url(data), data[-1] + 1)


def showing(messages: list[dict[str, Any]], tools: Any, generation: bool) -> str:
    """As Qwen2.5-VL: text and images of any role."""
    told = [
        {**message, "content": "".join(map(shown, message["content"]))}
        if not isinstance(message["content"], str)
        else message
        for message in messages
    ]
    return toys.chatml(told, None, generation)


def shown(part: dict[str, Any]) -> str:
    return f"[{PLACEHOLDER}]" if part["type"] == "image" else str(part["text"])


def blind(messages: list[dict[str, Any]], tools: Any, generation: bool) -> str:
    """Shows the text of what it is given, and images to nobody."""
    told = [
        {**message, "content": "".join(part.get("text", "") for part in message["content"])}
        if not isinstance(message["content"], str)
        else message
        for message in messages
    ]
    return toys.chatml(told, None, generation)


TOKENIZER = ToyTokenizer(showing, specials=SPECIALS)


@tool
def look(numbers: list[int]) -> ToolResult:
    """Look."""
    return ToolResult("seen" if numbers else "nothing", images=[png(number) for number in numbers])


class Says(Script):
    """A script that also remembers the images, and counts a prompt as a server does that has the reader."""

    def __init__(self, *says: Any, more: int = 0, tokenizer: ToyTokenizer = TOKENIZER) -> None:
        super().__init__(tokenizer, *says)
        self.images: list[list[str]] = []
        self.more = more

    async def generate(self, prompt_ids: Sequence[int], *rest: Any, **options: Any) -> Sampled:
        images = list(options["images"])
        assert sum(token == PLACEHOLDER_ID for token in prompt_ids) == len(images)
        self.images.append(images)
        answer = await super().generate(prompt_ids, *rest, **options)
        read = len(prompt_ids) + sum(from_data_url(image)[-1] for image in images) + self.more
        return Sampled(answer.ids, answer.logprobs, answer.finish_reason, answer.weight_version, read)


READER = Reader()


async def play(
    *answers: Any, reader: Any = READER, strategy: Any = None, **options: Any
) -> tuple[Trajectory, Says]:
    model = Says(*answers, **{key: options.pop(key) for key in ("more", "tokenizer") if key in options})
    trajectory = await rollout_one(
        toys.make_agent(**{"tools": [look], **options}),
        toys.TASK,
        model=model,
        tokenizer=model.tokenizer,
        images=reader,
        resources=FakeResources(),
        strategy=strategy or Chain(),
    )
    return trajectory, model


def with_picture(row: dict[str, Any]) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": data_url(png(4))}, {"type": "text", "text": "what is it"}]
    return [{"role": "user", "content": parts}]


# 1. each image is an id and a text of its own


async def test_tool_shows_and_the_policy_is_shown() -> None:
    trajectory, model = await play(call("look", numbers=[2, 0]), "done", prompt=with_picture)
    assert trajectory.outcome == Scored(1.0)
    assert model.images == [[url(4)], [url(4), url(2), url(0)]]
    (row,) = trajectory.rows
    assert row.images == [0, 1, 2]
    assert trajectory.images == [url(4), url(2), url(0)]
    tokens = row.prompt_ids + row.response_ids
    assert sum(token == PLACEHOLDER_ID for token in tokens) == 5 + 3 + 1
    text = TOKENIZER.decode(tokens)
    observed = f"<|im_start|>tool\nseen[{PLACEHOLDER * 3}][{PLACEHOLDER}]<|im_end|>"
    assert f"<|im_start|>user\n[{PLACEHOLDER * 5}]what is it<|im_end|>" in text
    assert observed in text
    assert trajectory.messages[0]["content"] == [
        {"type": "image", "image": 0},
        {"type": "text", "text": "what is it"},
    ]


async def test_steps_that_show_different_images_are_different_rows() -> None:
    """Their texts are the same up to what is seen."""

    def newest(view: StepView) -> list[Any]:
        images = images_of(message for turn in view.turns for message in turn.observations)
        parts = [{"type": "image", "image": image} for image in images[-1:]]
        return [{"role": "user", "content": [{"type": "text", "text": "now: "}, *parts]}]

    looks = [call("look", numbers=[1]), call("look", numbers=[2]), "done"]
    trajectory, model = await play(*looks, strategy=Step(prompt_builder=newest))
    assert model.images == [[], [url(1)], [url(2)]]
    assert [row.images for row in trajectory.rows] == [[], [0], [1]]
    # With the same image they go on from one another as texts do.
    again = [call("look", numbers=[1]), call("look", numbers=[1]), "done"]
    trajectory, model = await play(*again, strategy=Step(history=9, prompt_builder=window))
    assert [row.images for row in trajectory.rows] == [[0, 0]]
    assert trajectory.images == [url(1)]


# 2. ids for the server, ids of rows

CONTENTS = st.lists(st.one_of(st.integers(0, 5), st.sampled_from(["a", "the port ", "\n"])), max_size=4)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["find", "the", "done"]), CONTENTS), min_size=1, max_size=5))
async def test_rows_have_the_images_of_their_tokens_and_exactly_the_sampled_ids(
    turns: list[tuple[str, list[Any]]],
) -> None:
    media = Media(Reader())
    first = await media.take([{"role": "user", "content": [{"type": "image", "image": png(3)}]}])
    ledger = TokenLedger(TOKENIZER, first, media=media)
    said: list[int] = []
    seen = [3]
    for number, (text, content) in enumerate(turns):
        ids = [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.special("<|im_end|>")]
        ledger.append(sampled(ids), number + 1)
        assert ledger.end_turn() == text
        said += ids
        row_images = list(seen)
        parts = [
            {"type": "image", "image": png(part)} if isinstance(part, int) else {"type": "text", "text": part}
            for part in content
        ]
        seen += [part for part in content if isinstance(part, int)]
        ledger.observe(await media.take([{"role": "tool", "name": "look", "content": parts or "-"}]))
        assert ledger.images == [url(number) for number in seen]
        prompt = ledger.prompt_ids
        assert len(ledger) == len(prompt) + sum(seen)
        assert prompt == TOKENIZER.apply_chat_template(
            ledger.messages, tools=None, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    (row,) = ledger.rows()
    assert [token for token, bit in zip(row.response_ids, row.response_mask, strict=True) if bit] == said
    # What nobody answered is no part of the row, and neither are its images.
    assert [from_data_url(media.urls[number])[-1] for number in row.images] == row_images
    tokens = row.prompt_ids + row.response_ids
    assert sum(token == PLACEHOLDER_ID for token in tokens) == sum(n + 1 for n in row_images)
    assert ledger.drift().drifted == 0


async def test_context_counts_images_at_full_length() -> None:
    short = Chain(max_context_tokens=200, max_tokens_per_turn=100)
    looks = [call("look", numbers=[0]), "done"]
    trajectory, _ = await play(*looks, strategy=short)
    assert trajectory.stop_reason == "done"
    trajectory, model = await play(call("look", numbers=[98, 97]), "done", strategy=short)
    assert (trajectory.stop_reason, len(model.images)) == ("context", 1)
    trajectory, _ = await play("done", prompt=with_picture, strategy=Chain(max_prompt_tokens=33))
    assert trajectory.outcome == Failed("PromptTooLong", "prompt: 34 tokens, over the limit of 33")


async def test_server_that_reads_another_number_of_tokens_fails_the_rollout() -> None:
    trajectory, _ = await play(call("look", numbers=[2]), "done", prompt=with_picture, more=1)
    assert isinstance(trajectory.outcome, Failed)
    assert trajectory.outcome.reason == "ImageTokensDiffer"
    assert "the server read a prompt of 35 tokens, not 34" in trajectory.outcome.message


# 3. templates


async def test_template_that_shows_no_images_is_refused() -> None:
    trajectory, _ = await play("done", prompt=with_picture, tokenizer=ToyTokenizer(blind, specials=SPECIALS))
    assert isinstance(trajectory.outcome, Failed)
    assert trajectory.outcome.reason == "TemplateRefused"
    assert "chat template: shows 0 images of 1" in trajectory.outcome.message


async def test_prompt_that_spells_the_placeholder_is_refused() -> None:
    trajectory, _ = await play("done", prompt="<|image|> what is it {what}")
    assert isinstance(trajectory.outcome, Failed)
    assert "shows 1 images of 0" in trajectory.outcome.message
    assert "spell <|image|> nowhere" in trajectory.outcome.message


# 4. text that spells it


async def test_tool_that_spells_the_placeholder_shows_nothing() -> None:
    @tool
    def page() -> str:
        """Read."""
        return f"write {PLACEHOLDER} for an image"

    trajectory, model = await play(call("page"), "done", tools=[page])
    assert trajectory.outcome == Scored(1.0)
    assert model.images == [[], []]
    assert "write < |image|> for an image" in str(trajectory.messages)
    # Without images there is no placeholder, and text is text.
    trajectory, _ = await play(call("page"), "done", tools=[page], reader=None)
    assert f"write {PLACEHOLDER} for an image" in str(trajectory.messages)


@pytest.mark.parametrize("ids", [[PLACEHOLDER_ID], list(PLACEHOLDER.encode())])
async def test_policy_that_writes_a_placeholder_is_masked(ids: list[int]) -> None:
    """By its id, or spelled by other ones."""
    if len(ids) > 1:
        ids = [len(SPECIALS) + byte for byte in ids]
        assert TOKENIZER.decode(ids) == PLACEHOLDER
    trajectory, _ = await play(sampled([*ids, TOKENIZER.special("<|im_end|>")]), "done")
    assert trajectory.outcome == Masked("placeholder", "the policy wrote <|image|>")


# 5. what is no image, and who sees none


async def test_bytes_that_are_no_image_are_the_tools_exception() -> None:
    for data, said in ((b"hello world", "b'hello wo'... is no PNG"), (png(99), "cannot be read: it is torn")):

        @tool
        def show() -> ToolResult:
            """Show."""
            return ToolResult("see", images=[data])  # noqa: B023 - called in this turn of the loop

        trajectory, model = await play(call("show"), "done", tools=[show])
        assert trajectory.outcome == Scored(1.0)
        assert trajectory.metrics["tool_errors"] == 1
        assert said in trajectory.messages[-2]["content"]
        assert model.images == [[], []]


@pytest.mark.parametrize("image", ["data:image/png;base64,####", "http://x/y.png", 7, b"text"])
async def test_prompt_with_no_image_says_what_it_has(image: Any) -> None:
    def prompt(row: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "image", "image": image}]}]

    trajectory, _ = await play("done", prompt=prompt)
    assert isinstance(trajectory.outcome, Failed)
    assert trajectory.outcome.reason == "ImageInvalid"
    assert "give the bytes of a PNG or JPEG file, or a data URL of them" in trajectory.outcome.message


async def test_policy_that_reads_text_gets_no_image() -> None:
    trajectory, _ = await play("done", prompt=with_picture, reader=None)
    assert isinstance(trajectory.outcome, Failed)
    assert trajectory.outcome.reason == "ImagesNotReadable"
    assert trajectory.outcome.message.startswith("prompt: images: the policy reads text alone")
    with pytest.raises(ImagesNotReadable, match="tool look: images: the policy reads text alone"):
        await Media().add(png(1), "tool look")
    with pytest.raises(ImagesNotReadable, match="tool look: images: its processor is odd"):
        await Media(NoImages("its processor is odd")).add(png(1), "tool look")
    trajectory, _ = await play("done", reader=NoImages("its processor is odd"))
    assert trajectory.outcome == Scored(1.0)


# beside the ledger


async def test_trajectory_with_images_is_json_and_back() -> None:
    trajectory, _ = await play(call("look", numbers=[2]), "done")
    text = trajectory.model_dump_json()
    assert json.loads(text)["images"] == [url(2)]
    assert Trajectory.model_validate_json(text) == trajectory


async def test_api_gets_images_as_urls_and_those_of_tools_from_the_user() -> None:
    looks = says("I look.", ("look", '{"numbers": [2]}'), ("look", '{"numbers": [3]}'))
    async with talking(looks, says("done")) as (model, asked):
        trajectory = await rollout_one(
            toys.make_agent(tools=[look], prompt=with_picture), toys.TASK, model=model
        )
    assert trajectory.outcome == Scored(1.0)
    user, _, *tools, shower = asked[1]["messages"]

    def shows(number: int) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": url(number)}}

    assert user["content"] == [shows(4), {"type": "text", "text": "what is it"}]
    assert [(message["role"], message["content"]) for message in tools] == [("tool", "seen[image]")] * 2
    assert shower == {"role": "user", "content": [shows(2), shows(3)]}


async def test_observations_as_text_of_the_user_keep_their_images() -> None:
    """For a template that knows no tools, and for a parser whose observations are text."""
    tokenizer = ToyTokenizer(lambda m, t, g: refusing(m, g), specials=SPECIALS)
    trajectory, model = await play(call("look", numbers=[2]), "done", tokenizer=tokenizer)
    assert trajectory.outcome == Scored(1.0)
    assert model.images == [[], [url(2)]]
    react = 'Action: look\nAction Input: {"numbers": [1]}'
    trajectory, model = await play(react, "Final Answer: 1", parser="react")
    assert model.images == [[], [url(1)]]
    assert trajectory.messages[-2]["content"] == [
        {"type": "text", "text": "Observation: seen"},
        {"type": "image", "image": 0},
    ]


def refusing(messages: list[dict[str, Any]], generation: bool) -> str:
    if any(message["role"] == "tool" for message in messages):
        raise ValueError("only user and assistant roles are supported")
    return showing(messages, None, generation)


async def test_summary_and_dropped_turns_keep_what_is_still_shown() -> None:
    looks = [call("look", numbers=[n]) for n in (1, 2, 3)]
    chain = Chain(max_context_tokens=200, max_tokens_per_turn=60, when_full="drop_oldest")
    trajectory, model = await play(*looks, "done", strategy=chain)
    assert trajectory.metrics["dropped_turns"] > 0
    assert trajectory.outcome == Scored(1.0)
    assert model.images[-1] == [url(n) for n in (1, 2, 3)][-len(model.images[-1]) :]
    check_rows(trajectory)


def check_rows(trajectory: Trajectory) -> None:
    """Each row has the tokens of its images and of no others."""
    for row in trajectory.rows:
        tokens = [from_data_url(trajectory.images[number])[-1] + 1 for number in row.images]
        assert (row.prompt_ids + row.response_ids).count(PLACEHOLDER_ID) == sum(tokens)


async def test_summary_stands_below_the_pictures_of_the_task() -> None:
    chain = Chain(max_context_tokens=420, max_tokens_per_turn=150, when_full="summarise")
    looks = [call("look", numbers=[60]), "I saw it", "done"]
    trajectory, model = await play(*looks, prompt=with_picture, strategy=chain)
    assert trajectory.metrics["summaries"] == 1
    assert trajectory.outcome == Scored(1.0)
    assert model.images == [[url(4)], [url(4), url(60)], [url(4)]]
    assert "what is it\n\nYou have worked on this before" in TOKENIZER.decode(model.prompts[-1])
    check_rows(trajectory)
    spelled = sampled([len(SPECIALS) + byte for byte in PLACEHOLDER.encode()])
    trajectory, _ = await play(call("look", numbers=[60]), spelled, prompt=with_picture, strategy=chain)
    assert trajectory.outcome == Masked("placeholder", "the policy wrote <|image|>")


async def test_calls_that_the_template_wants_apart_go_with_images() -> None:
    """As Mistral and GPT-OSS: an observation needs its call."""

    def apart(messages: list[dict[str, Any]], tools: Any, generation: bool) -> str:
        for message in messages:
            if message["role"] == "tool" and "tool_call_id" not in message:
                raise ValueError("no call")
        return showing([{**m, "content": m["content"] or ""} for m in messages], tools, generation)

    tokenizer = ToyTokenizer(apart, specials=SPECIALS)
    looks = [call("look", numbers=[2]), call("look", numbers=[3, 2]), "done"]
    trajectory, model = await play(*looks, prompt=with_picture, tokenizer=tokenizer)
    assert trajectory.outcome == Scored(1.0)
    assert model.images[-1] == [url(4), url(2), url(3), url(2)]
    check_rows(trajectory)


async def test_notes_stand_below_pictures_and_spell_nothing() -> None:
    step = Step(prompt_builder=with_notes())
    remember = call("remember", key="a", text="red")
    trajectory, model = await play(remember, "done", prompt=with_picture, tools=[Notes], strategy=step)
    assert trajectory.outcome == Scored(1.0)
    assert "what is it\n\nYour notes:" in TOKENIZER.decode(model.prompts[-1])
    assert model.images == [[url(4)], [url(4)]]
    # JSON spells what the text does not.
    hidden = remember.replace("red", r"\u003c|image|>")
    assert PLACEHOLDER not in hidden
    trajectory, _ = await play(hidden, "done", prompt=with_picture, tools=[Notes], strategy=step)
    assert trajectory.outcome == Masked("placeholder", "the policy wrote <|image|>")


async def test_builder_that_repeats_a_placeholder_of_a_tool_shows_nothing() -> None:
    def builder(view: StepView) -> list[Any]:
        return [{"role": "user", "content": f"state {view.number}: {PLACEHOLDER}"}]

    trajectory, model = await play("done", strategy=Step(prompt_builder=builder))
    assert trajectory.outcome == Scored(1.0)
    assert "state 1: < |image|>" in TOKENIZER.decode(model.prompts[0])


async def test_reward_can_look_at_what_was_shown() -> None:
    seen: list[Any] = []

    @reward
    def judge(ctx: Context) -> float:
        (shown,) = images_of(m for m in ctx.messages if m["role"] == "tool")
        seen.append(ctx.images[shown])
        return 1.0

    await play(call("look", numbers=[2]), "done", prompt=with_picture, reward=judge)
    assert seen == [url(2)]
