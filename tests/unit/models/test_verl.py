"""verl's client as a model. Numbers are those of `agentfly.models.verl`."""

import asyncio
import io
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from agentfly.models import ContextOverflow, ModelUnavailable, Sampled, Sampling
from agentfly.models.images import data_url
from agentfly.models.verl import VerlModel, sampling_params
from agentfly.models.vllm import request_body


class Client:
    """verl's, with one answer."""

    def __init__(self, answer: Any = None) -> None:
        self.answer, self.asked = answer, list[tuple[str, dict[str, Any]]]()

    async def generate(self, request_id: str, **rest: Any) -> Any:
        self.asked.append((request_id, rest))
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is None:
            await asyncio.sleep(600)
        return self.answer


def output(ids: list[int], logprobs: list[float] | None, **changes: Any) -> Any:
    fields = {"stop_reason": "completed", "extra_fields": {"global_steps": 6}}
    return SimpleNamespace(token_ids=ids, log_probs=logprobs, **{**fields, **changes})


async def asks(client: Client, sampling: Sampling, request: str = "s7-t3-r1.0.ab12.2.0") -> Sampled:
    return await VerlModel(client).generate([5, 6], sampling, request_id=request, deadline=0.5)


# 1. One server for all turns of an attempt.


async def test_turns_of_an_attempt_have_one_name_at_the_balancer_and_the_next_another() -> None:
    client = Client(output([1], [0.0]))
    for request in ("a.b.0.ab.1.0", "a.b.0.ab.2.0", "a.b.1.cd.1.0"):
        await asks(client, Sampling(), request)
    assert [name for name, _ in client.asked] == ["a.b.0", "a.b.0", "a.b.1"]


async def test_the_prompt_and_how_to_draw_go_to_verl() -> None:
    client = Client(output([1], [0.0]))
    await asks(client, Sampling(0.7, 0.9, 12, (3,), seed=4))
    params = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 12, "stop_token_ids": [3], "seed": 4}
    wanted = {**params, "logprobs": True, "detokenize": False}
    assert client.asked[0][1] == {"prompt_ids": [5, 6], "sampling_params": wanted}
    await asks(client, Sampling())
    assert "seed" not in client.asked[1][1]["sampling_params"]


async def test_images_go_to_verl_as_pictures() -> None:
    client, file = Client(output([1], [0.0])), io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(file, "PNG")
    model = VerlModel(client)
    await model.generate(
        [5], Sampling(), request_id="a.0.n.1.0", deadline=0.5, images=[data_url(file.getvalue())]
    )
    (picture,) = client.asked[0][1]["image_data"]
    assert (picture.mode, picture.size, picture.getpixel((0, 0))) == ("RGB", (3, 2), (255, 0, 0))


@pytest.mark.parametrize("seed", [None, 4])
async def test_verl_is_given_what_a_server_of_its_own_is_given(seed: int | None) -> None:
    sampling = Sampling(0.7, 0.9, 12, (3,), seed)
    # verl makes the 0 of it that asks for the sampled token alone.
    served = request_body([5, 6], sampling, "r")["sampling_params"] | {"logprobs": True}
    assert sampling_params(sampling) == served


# 2. Deadline.


async def test_a_server_that_stays_silent_is_unavailable_when_the_time_is_over() -> None:
    with pytest.raises(ModelUnavailable, match=r"no answer within 0\.5 s to a prompt of 2 tokens"):
        await asks(Client(), Sampling())


# 3. What is no answer.


@pytest.mark.parametrize(
    ("failure", "kind", "text"),
    [
        (RuntimeError("ray::generate()\nActorDiedError: gone"), ModelUnavailable, "ActorDiedError: gone"),
        (OSError(), ModelUnavailable, "verl's servers: OSError"),
        (
            ValueError("Prompt length (9) leaves no room to generate within the model's maximum"),
            ContextOverflow,
            "a prompt of 2 tokens does not fit",
        ),
        (output([1, 2], None), ModelUnavailable, "2 tokens and 0 log-probabilities"),
    ],
)
async def test_what_is_no_answer_says_so(failure: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        await asks(Client(failure), Sampling())


# 4. Versions, and why an answer ended.


@pytest.mark.parametrize(
    ("answer", "reason", "version"),
    [
        (output([1, 2], [0.0, -1.0]), "stop", "6"),
        (output([1, 2, 4], [0.0, 0.0, 0.0]), "length", "6"),
        (output([1, 2, 3], [0.0, 0.0, 0.0]), "stop", "6"),  # the last one is one to stop at
        (output([1], [0.0], stop_reason="aborted"), "abort", "6"),
        (output([], None, stop_reason="aborted"), "abort", "6"),
        (output([1], [0.0], stop_reason=None), "abort", "6"),
        (output([1], [0.0], extra_fields={"global_steps": None}), "stop", None),
        (output([1], [0.0], extra_fields={"global_steps": 0}), "stop", "0"),
    ],
)
async def test_an_answer_has_its_end_and_its_weights(answer: Any, reason: str, version: str | None) -> None:
    sampled = await asks(Client(answer), Sampling(max_tokens=3, stop_token_ids=(3,)))
    assert sampled == Sampled(answer.token_ids, answer.log_probs or [], reason, version)
