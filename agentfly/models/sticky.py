"""Several servers of one policy as one model.

Guarantees:
1. Requests of one attempt at a rollout go to one server: its earlier turns are in that server's prefix cache.
2. Which one follows from the rollout's id and the number of the attempt, so that every process chooses the
   same; the next attempt goes to the next server, since this one may be what failed.
"""

import zlib
from collections.abc import Sequence

from agentfly.models.base import Sampled, Sampling, TokenModel


class StickyModels:
    """Spreads rollouts over servers.

    A request id is ``<rollout id>.<attempt>.<nonce>.<turn>.<part>``; only the rollout's id may have dots.
    """

    def __init__(self, models: Sequence[TokenModel]) -> None:
        if not models:
            raise ValueError("models: none; a policy needs at least one server")
        self._models = tuple(models)

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
        rollout, attempt, *_ = request_id.rsplit(".", 4)
        model = self._models[(zlib.crc32(rollout.encode()) + int(attempt)) % len(self._models)]
        return await model.generate(
            prompt_ids, sampling, request_id=request_id, deadline=deadline, images=images
        )
