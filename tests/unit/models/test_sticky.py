import pytest

from agentfly.models import Sampled, Sampling
from agentfly.models.sticky import StickyModels


class Server:
    def __init__(self) -> None:
        self.asked: list[str] = []

    async def generate(self, prompt_ids, sampling, *, request_id, deadline):
        self.asked.append(request_id)
        return Sampled([1], [0.0], "stop", None)


async def test_turns_of_a_rollout_go_to_one_server_and_rollouts_are_spread():
    servers = [Server(), Server()]
    model = StickyModels(servers)
    for rollout in range(64):
        for turn in range(3):
            await model.generate([1], Sampling(), request_id=f"job-{rollout}.0.abcd.{turn}.0", deadline=1)
    homes = [{request.rsplit(".", 2)[0] for request in server.asked} for server in servers]
    assert not homes[0] & homes[1]
    assert min(len(home) for home in homes) >= 16


def test_no_server_is_refused():
    with pytest.raises(ValueError, match="at least one server"):
        StickyModels([])
