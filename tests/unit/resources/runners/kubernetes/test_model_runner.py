import asyncio

import pytest

from agentfly.resources import members
from agentfly.resources.errors import LeaseLost, StartFailed
from agentfly.resources.runners import vllm
from agentfly.resources.runners.kubernetes import model
from agentfly.resources.runners.kubernetes.model_pod import DRAIN_S, STOP_GRACE_S
from agentfly.resources.spec import ContainerSpec, ModelServiceSpec
from tests.unit.kube.object_server import until
from tests.unit.resources.runner_contract import RunnerContract
from tests.unit.resources.runners.kubernetes.cluster import world

NAME = "pool-0a1b-0"
SPEC = ModelServiceSpec(model="m", max_model_len=8, runtime="kubernetes", image="vllm")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(vllm, "_POLL_S", 0.01)
    monkeypatch.setattr(vllm, "CLEAR_S", 0.5)


@pytest.fixture
async def cluster(monkeypatch):
    async with world(monkeypatch) as made:
        yield made


@pytest.fixture
async def runner(cluster):
    return await cluster.models()


class TestContract(RunnerContract):
    exclusive = False

    @pytest.fixture
    async def runner(self, cluster):
        self.cluster = cluster
        return await cluster.models()

    @pytest.fixture
    def spec(self):
        return SPEC

    def left(self, runner):
        return self.cluster.pods() | set(self.cluster.daemons.living)


async def test_server_is_seen_to_answer_a_real_request_first(cluster, runner):
    member = await runner.start(SPEC, NAME)
    assert cluster.daemons.of(NAME).seen == ["/inference/v1/generate"]
    await runner.stop(member)


async def test_server_that_is_stopped_has_time_to_answer_what_it_was_asked(cluster, runner):
    await runner.stop(await runner.start(SPEC, NAME))
    assert cluster.server.graces == [STOP_GRACE_S]
    assert DRAIN_S < STOP_GRACE_S < members.STOP_S / 2 + 1


async def test_server_that_refuses_its_first_request_is_a_failed_start(cluster, runner, monkeypatch):
    begin = cluster.daemons.begin

    def broken(address, pod):
        begin(address, pod).first_answer = 500
        return cluster.daemons.living[address]

    monkeypatch.setattr(cluster.daemons, "begin", broken)
    with pytest.raises(StartFailed, match="inference/v1/generate answered 500"):
        await runner.start(SPEC, NAME)
    assert cluster.pods() == set()


async def test_lease_is_lost_with_the_pod(cluster, runner):
    member = await runner.start(SPEC, NAME)
    await runner.lease(member, "o", 0, "t", 0.01)
    await asyncio.sleep(0.05)
    await runner.lease(member, "o", 0, "t", 0.01)  # never by time
    cluster.server.fail(NAME, reason="Evicted", message="memory")
    await until(lambda: runner._death(member) is not None)
    with pytest.raises(LeaseLost, match="Evicted: memory"):
        await runner.lease(member, "o", 0, "t", 30)
    assert not (await runner.probe(member)).alive
    await runner.stop(member)


async def test_server_that_says_it_does_not_work_is_not_alive(cluster, runner):
    member = await runner.start(SPEC, NAME)
    cluster.daemons.of(NAME).health = 500
    assert not (await runner.probe(member)).alive
    await runner.stop(member)


async def test_reset_ends_when_nothing_holds_the_cache(cluster, runner):
    member = await runner.start(SPEC, NAME)
    cluster.daemons.of(NAME).steps = 3
    again = await runner.reset(member)
    assert again.incarnation == 2
    assert cluster.daemons.of(NAME).seen.count("/reset_prefix_cache") == 4
    cluster.daemons.of(NAME).steps = 10_000
    assert await runner.reset(again) is None
    await runner.stop(again)


async def test_later_broker_finds_what_answers_and_removes_the_rest(cluster, runner):
    await runner.start(SPEC, NAME)
    await runner.start(SPEC, "pool-0a1b-1")
    sandboxes = await cluster.runner()
    await sandboxes.start(ContainerSpec(runtime="kubernetes", image="x"), "pool-0a1b-2")
    cluster.daemons.of("pool-0a1b-1").health = 500
    later = await cluster.models()
    [found] = await later.find()
    assert (found.pool, found.member.id, found.member.spec, found.state) == ("pool", NAME, SPEC, "free")
    await until(lambda: cluster.pods() == {NAME, "pool-0a1b-2"})
    assert await later.find() == []


async def test_server_that_loads_its_model_is_waited_for_by_a_later_broker(cluster, runner):
    held = SPEC.model_copy(update={"image": "held"})
    start = asyncio.create_task(runner.start(held, NAME))
    await until(lambda: cluster.pods() == {NAME})
    runner.leave()
    start.cancel()
    await asyncio.wait({start})
    later = await cluster.models()
    [found] = await later.find()
    assert (found.pool, found.member.id, found.member.spec, found.state) == ("pool", NAME, held, "unknown")
    waiting = asyncio.create_task(later.resume(found, 30))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    pod = cluster.server.objects[NAME]
    pod["spec"]["containers"][0]["image"] = "fine"
    cluster.server.schedule(pod)
    heard = await asyncio.wait_for(waiting, 5)
    assert heard.state == "free"
    assert (await later.probe(heard.member)).alive
    await later.stop(heard.member)
    assert cluster.pods() == set()


@pytest.mark.parametrize("silent", [False, True])
async def test_server_that_does_not_work_when_waited_for_says_so(cluster, runner, monkeypatch, silent):
    monkeypatch.setattr(model, "READY_S", 0.2)
    monkeypatch.setattr(model, "_PAUSE_S", 0.02)
    await runner.start(SPEC, NAME)
    later = await cluster.models()
    real = model.vllm.healthy

    async def nothing(address):
        raise TimeoutError

    monkeypatch.setattr(model.vllm, "healthy", nothing)
    [found] = await later.find()
    assert found.state == "unknown"
    monkeypatch.setattr(model.vllm, "healthy", nothing if silent else real)
    cluster.daemons.of(NAME).health = 500
    with pytest.raises(StartFailed, match="NotReady: TimeoutError"):
        await later.resume(found, 0.0)
    await later.stop(found.member)
    assert cluster.pods() == set()


async def test_another_kind_is_not_served(runner):
    with pytest.raises(StartFailed, match="container"):
        await runner.start(ContainerSpec(), NAME)
