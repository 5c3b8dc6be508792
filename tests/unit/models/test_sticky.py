import pytest

from agentfly.context import Context
from agentfly.models import Sampled, Sampling
from agentfly.models.sticky import StickyModels
from tests.unit.rollout.toys import FakeResources


class Server:
    def __init__(self) -> None:
        self.asked: list[str] = []

    async def generate(self, prompt_ids, sampling, *, request_id, deadline, images=()):
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


async def test_server_follows_from_the_rollout_and_the_attempt_and_not_from_the_process():
    servers = [Server(), Server(), Server()]
    model = StickyModels(servers)
    for number in range(20):  # owners of contexts: one in each process, all of the same attempt
        owner = Context("job.x-3", {}, FakeResources(), 0).owner
        await model.generate([1], Sampling(), request_id=f"{owner}.{number}.0", deadline=1)
    assert sorted(len(server.asked) for server in servers) == [0, 0, 20]


async def test_next_attempt_goes_to_another_server():
    servers = [Server(), Server(), Server()]
    model = StickyModels(servers)
    for attempt in range(3):
        owner = Context("job-3", {}, FakeResources(), attempt).owner
        await model.generate([1], Sampling(), request_id=f"{owner}.1.0", deadline=1)
    assert [len(server.asked) for server in servers] == [1, 1, 1]


def test_no_server_is_refused():
    with pytest.raises(ValueError, match="at least one server"):
        StickyModels([])
