"""Section numbers are the guarantees of metrics.py; S5 is that of server.py. Events are made up."""

import asyncio
import builtins
import re
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentfly.broker import wire
from agentfly.broker.client import BrokerClient
from agentfly.broker.metrics import Metrics
from agentfly.broker.server import BrokerServer
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.errors import ResourceError, Timeout
from agentfly.resources.events import Event, EventKind, LeaseEnd
from agentfly.resources.lease import PoolStatus
from agentfly.resources.spec import ContainerSpec, PoolSpec
from tests.unit.resources.harness import FakeRunner

STATUS = PoolStatus(
    kind="container",
    max=8,
    min=2,
    ready=1,
    leased=3,
    starting=1,
    resetting=2,
    stopping=0,
    quarantined={"m-1": "a process is left"},
    queued=5,
    starts=9,
    resets=7,
    failures=1,
    reason="AtMax",
)
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(metrics: Metrics) -> Samples:
    return parsed(metrics.text().decode())


def parsed(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


# 1. Gauges are read, the rest grows.


def test_gauges_show_the_pools_as_they_are_now():
    pools = {"swe": STATUS}
    metrics = Metrics(lambda: pools)
    found = samples(metrics)
    states = {"ready": 1, "leased": 3, "starting": 1, "resetting": 2, "stopping": 0, "quarantined": 1}
    for state, count in states.items():
        assert value(found, "agentfly_pool_members", pool="swe", state=state) == count
    assert value(found, "agentfly_pool_max", pool="swe") == 8
    assert value(found, "agentfly_pool_min", pool="swe") == 2
    assert value(found, "agentfly_pool_queued", pool="swe") == 5
    pools["swe"] = STATUS.model_copy(update={"queued": 0})
    assert value(samples(metrics), "agentfly_pool_queued", pool="swe") == 0


@pytest.mark.parametrize(
    ("event", "name", "labels"),
    [
        (Event(EventKind.START_FAILED, "p"), "agentfly_starts_failed_total", {}),
        (Event(EventKind.RESET_FAILED, "p"), "agentfly_resets_failed_total", {}),
        (Event(EventKind.MEMBER_LOST, "p"), "agentfly_members_lost_total", {}),
        (
            Event(EventKind.MEMBER_STOPPED, "p", reason="MaxReuses"),
            "agentfly_members_stopped_total",
            {"reason": "MaxReuses"},
        ),
        (
            Event(EventKind.LEASE_LOST, "p", reason=LeaseEnd.NO_HEARTBEAT),
            "agentfly_leases_lost_total",
            {"reason": "NoHeartbeat"},
        ),
        (
            Event(EventKind.ACQUIRE_FAILED, "p", reason="Saturated"),
            "agentfly_acquires_failed_total",
            {"error": "Saturated"},
        ),
    ],
    ids=lambda case: str(case.kind) if isinstance(case, Event) else "",
)
def test_each_of_these_events_is_counted(event, name, labels):
    metrics = Metrics(dict)
    for _ in range(3):
        metrics.note(event)
    assert value(samples(metrics), name, pool="p", **labels) == 3


@pytest.mark.parametrize(
    ("event", "name", "labels"),
    [
        (Event(EventKind.LEASE_GRANTED, "p", seconds=2, warm=True), "acquire_seconds", {"warm": "true"}),
        (Event(EventKind.LEASE_GRANTED, "p", seconds=2, warm=False), "acquire_seconds", {"warm": "false"}),
        (Event(EventKind.LEASE_RELEASED, "p", seconds=2), "hold_seconds", {}),
        (Event(EventKind.MEMBER_STARTED, "p", seconds=2), "start_seconds", {}),
        (Event(EventKind.MEMBER_RESET, "p", seconds=2), "reset_seconds", {}),
    ],
    ids=lambda case: str(case.kind) if isinstance(case, Event) else "",
)
def test_each_of_these_events_is_in_its_histogram(event, name, labels):
    metrics = Metrics(dict)
    for _ in range(3):
        metrics.note(event)
    found = samples(metrics)
    assert value(found, f"agentfly_{name}_count", pool="p", **labels) == 3
    assert value(found, f"agentfly_{name}_sum", pool="p", **labels) == 6
    assert value(found, f"agentfly_{name}_bucket", pool="p", le="1.0", **labels) == 0
    assert value(found, f"agentfly_{name}_bucket", pool="p", le="5.0", **labels) == 3


# 2. Labels are bounded, and named as Prometheus has it.


def every_kind() -> Metrics:
    metrics = Metrics(lambda: {"swe": STATUS})
    for kind in EventKind:
        metrics.note(
            Event(kind, "swe", member="M", lease="L", owner="O", share="S", detail="D", seconds=1, warm=True)
        )
    return metrics


def test_no_label_is_an_owner_a_lease_or_a_member():
    metrics = every_kind()
    text = metrics.text().decode()
    assert not re.search(r'"[MLOSD]"', text)
    labels = {label for _, pairs in parsed(text) for label, _ in pairs}
    assert labels <= {"pool", "state", "warm", "reason", "error", "le"}


def test_names_say_their_unit_and_what_they_are():
    metrics = Metrics(lambda: {"swe": STATUS})
    for family in text_string_to_metric_families(metrics.text().decode()):
        if family.name.endswith("_created"):
            continue  # prometheus-client's own
        assert family.name.startswith("agentfly_")
        assert family.documentation
        if family.type == "histogram":
            assert family.name.endswith("_seconds")


# S5. What a running broker shows.


async def test_broker_shows_pools_leases_and_metrics_without_a_token(tmp_path):
    pool = PoolSpec(name="shell", resource=ContainerSpec(), max=1, lease_ttl_s=60)
    async with (
        asyncio.timeout(20),
        ResourceEngine([FakeRunner()], [pool]) as engine,
        BrokerServer(engine, tmp_path / "b") as server,
        BrokerClient(server.address, share="job") as client,
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(server.path))) as session,
    ):
        lease = await client.acquire("shell", "o", key="k", deadline=5)
        with pytest.raises(Timeout):
            await client.acquire("shell", "other", deadline=0.05)
        (held,) = await client.leases()
        assert held.model_dump(exclude={"held_s", "expires_in_s"}) == {
            "lease_id": lease.info.lease_id,
            "pool": "shell",
            "member_id": lease.info.member_id,
            "owner": "o",
            "key": "k",
            "share": "job",
            "image": "",
        }
        assert 0 <= held.held_s < 20
        assert 40 < held.expires_in_s <= 60
        status = (await client.status())["shell"]
        assert (status.leased, status.hit_ratio) == (1, 0.0)
        assert status.acquire_p99_s is not None
        for path in (wire.POOLS, wire.LEASES, wire.METRICS):
            async with session.get(f"http://broker{path}") as response:
                assert response.status == 200
                text = await response.text()
                assert lease.info.token not in text
        assert response.content_type == "text/plain"
        found = parsed(text)
        assert value(found, "agentfly_pool_members", pool="shell", state="leased") == 1
        assert value(found, "agentfly_acquire_seconds_count", pool="shell", warm="false") == 1
        assert value(found, "agentfly_acquires_failed_total", pool="shell", error="Timeout") == 1
        await lease.release()
        assert await client.leases() == []


async def test_without_prometheus_client_all_but_the_metrics_works(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("prometheus_client"):
            raise ModuleNotFoundError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    async with (
        asyncio.timeout(20),
        ResourceEngine([FakeRunner()], [PoolSpec(name="shell", resource=ContainerSpec())]) as engine,
        BrokerServer(engine, tmp_path / "b") as server,
        BrokerClient(server.address) as client,
    ):
        await (await client.acquire("shell", "o", deadline=5)).release()
        with pytest.raises(ResourceError, match="prometheus-client is not installed") as refused:
            await client._get(wire.METRICS)
        assert refused.value.hints == ('pip install "agentfly[local]"',)


# docs/observability.md.

OPERATORS = ("agentfly_trainingrun_", "agentfly_rolloutjob_")
DOCS = (Path(__file__).parents[3] / "docs" / "observability.md").read_text()


def test_documented_metrics_are_those_that_there_are():
    rows = re.findall(r"^\| `(agentfly_\w+)` \| (\w+) \| (.*?) \|", DOCS, re.M)
    documented = {
        name: (kind, set(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in rows
        if not name.startswith(OPERATORS)
    }
    families = text_string_to_metric_families(every_kind().text().decode())
    there = {
        family.name + ("_total" if family.type == "counter" else ""): (
            family.type,
            {label for sample in family.samples for label in sample.labels} - {"le"},
        )
        for family in families
        if not family.name.endswith("_created")
    }
    assert documented == there


def test_documented_events_are_those_that_there_are():
    assert all(f"`{kind}`" in DOCS for kind in EventKind)
    assert all(f"`{reason}`" in DOCS for reason in LeaseEnd)
    grant = Event(
        EventKind.LEASE_GRANTED,
        "shell",
        member="shell-1f0c-3",
        lease="9d0e4b2c7a615f38",
        owner="train-7-2.0.1c9a",
        share="train",
        seconds=0.002,
        warm=True,
    )
    assert f"\n{grant.line()}\n" in DOCS
