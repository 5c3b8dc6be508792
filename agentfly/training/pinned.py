"""A model that may answer with the weights that its step allows alone.

Guarantees:
1. An answer by other weights is never trained on: it is not returned.
2. The mismatch is remembered for the whole process: a server that lost its weights (a restart loads the
   initial ones) ends the attempt instead of turning its rollouts into failures one by one.
"""

from collections.abc import Sequence

from agentfly.models import ModelUnavailable, Sampled, Sampling, TokenModel


class StaleWeights(ModelUnavailable):
    """A server answers with weights that the trainer did not give it."""


class PinnedModel:
    """Passes calls on and checks the version of the weights in every answer.

    Args:
        name: of the server, for the error.
        oldest: version that an answer may be by; so may any later one, up to ``newest``.
    """

    def __init__(self, model: TokenModel, name: str, oldest: int, newest: int) -> None:
        self._model = model
        self._name = name
        self._oldest = oldest
        self._newest = newest
        self.stale: StaleWeights | None = None

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        deadline: float,
        images: Sequence[str] = (),
    ) -> Sampled:
        """See ``TokenModel.generate``."""
        sampled = await self._model.generate(
            prompt_ids, sampling, request_id=request_id, deadline=deadline, images=images
        )
        if sampled.ids and not self._allows(sampled.weight_version or ""):
            wanted = f"{self._oldest} to {self._newest}"
            self.stale = StaleWeights(
                f"model {self._name}: answered with weights {sampled.weight_version!r}, not {wanted}",
                hints=["the server was restarted and has its initial weights: start the trainer again"],
            )
            raise self.stale
        return sampled

    def _allows(self, version: str) -> bool:
        return version.isdecimal() and self._oldest <= int(version) <= self._newest
