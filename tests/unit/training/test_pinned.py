"""A model that may answer with the weights that its step allows alone."""

from collections.abc import Sequence

import pytest

from agentfly.models import ModelUnavailable, Sampled, Sampling
from agentfly.training.pinned import PinnedModel, StaleWeights


class Server:
    def __init__(self, version: str | None) -> None:
        self.version = version

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        deadline: float,
        images: Sequence[bytes] = (),
    ) -> Sampled:
        return Sampled([*prompt_ids, 9], [-1.0], "stop", self.version)


async def ask(model: PinnedModel) -> Sampled:
    return await model.generate([1], Sampling(), request_id="r", deadline=1.0)


@pytest.mark.parametrize("version", ["9", "10", "11"])
async def test_an_answer_by_the_steps_weights_passes(version: str) -> None:
    model = PinnedModel(Server(version), "http://m", 9, 11)
    assert (await ask(model)).ids == [1, 9]
    assert model.stale is None


@pytest.mark.parametrize("version", ["default", "2", "5", None])
async def test_an_answer_by_other_weights_is_withheld_and_remembered(version: str | None) -> None:
    model = PinnedModel(Server(version), "http://m", 3, 4)
    with pytest.raises(StaleWeights) as caught:
        await ask(model)
    assert caught.value is model.stale
    assert isinstance(model.stale, ModelUnavailable)
    assert str(model.stale) == f"model http://m: answered with weights {version!r}, not 3 to 4"
    assert "start the trainer again" in model.stale.hints[0]


async def test_an_answer_without_a_token_is_by_no_weights() -> None:
    class Aborting(Server):
        async def generate(self, *_: object, **__: object) -> Sampled:
            return Sampled([], [], "abort", None)

    model = PinnedModel(Aborting(None), "http://m", 3, 4)
    assert (await ask(model)).finish_reason == "abort"
    assert model.stale is None
