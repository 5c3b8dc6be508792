"""Parts of the cluster's bench that need no cluster: stand-ins for daemons, the ceiling, the chapter."""

import asyncio
import base64
import json
import os
from typing import Any

import aiohttp
import pytest

from agentfly.resources.runners.kubernetes import Signer
from agentfly.resources.runners.kubernetes.pod import Start, sandbox_pod
from agentfly.resources.spec import ContainerSpec
from agentfly.sandbox import SandboxAdmin, SandboxError
from tests.bench.cluster import acquire, node, runs, starts
from tests.bench.cluster.acquire import Step
from tests.bench.cluster.daemons import Connection, Daemons, project
from tests.bench.cluster.processes import Usage, cpu_s, peak_mb
from tests.bench.stats import Series

SIGNER = Signer(b"k" * 32)
ADDRESS = "127.0.0.1"
START = Start("shell", "shell-0a1b-0", "ns", {}, "nonce", incarnation=7)


def told(kind: str = "ADDED") -> tuple[str, dict[str, Any]]:
    """A pod as the product makes it, as an informer tells it."""
    key = SIGNER.public_key
    pod = sandbox_pod(START, ContainerSpec(runtime="kubernetes"), admin_key=key, sandboxd_image="s")
    pod["metadata"] |= {"uid": "u", "resourceVersion": "1"}
    pod["status"] = {"podIP": ADDRESS}
    return kind, project(pod)


async def serve(daemons: Daemons) -> tuple[asyncio.Server, str]:
    server = await asyncio.get_running_loop().create_server(lambda: Connection(daemons), ADDRESS, 0)
    return server, f"http://{ADDRESS}:{server.sockets[0].getsockname()[1]}"


async def token(url: str, signer: Signer) -> str:
    async with SandboxAdmin(url, "") as admin:
        return signer.token(START.member_id, (await admin.health()).boot)


# The daemons' guarantees.


async def test_the_product_s_client_leases_and_resets_at_a_stand_in() -> None:
    daemons = Daemons()
    daemons.changed(*told())
    server, url = await serve(daemons)
    async with server, SandboxAdmin(url, await token(url, SIGNER)) as admin:
        assert (await admin.holding()).incarnation == 7
        await admin.lease("me", 2, "token", 30.0, "note")
        held = await admin.holding()
        assert (held.state, held.note) == ("leased", "note")
        with pytest.raises(SandboxError, match="another owner"):
            await admin.lease("other", 0, "token", 30.0)
        report = await admin.reset()
        assert (report.clean, report.incarnation) == (True, 8)
        assert (await admin.holding()).state == "free"


@pytest.mark.parametrize("seed", [b"x" * 32, None])
async def test_another_key_opens_no_stand_in(seed: bytes | None) -> None:
    daemons = Daemons()
    daemons.changed(*told())
    server, url = await serve(daemons)
    async with server:
        wrong = await token(url, Signer(seed)) if seed else base64.b64encode(b"?").decode()
        async with SandboxAdmin(url, wrong) as admin:
            with pytest.raises(SandboxError, match="Unauthorized"):
                await admin.holding()


async def test_a_stand_in_is_gone_with_its_pod() -> None:
    daemons = Daemons()
    server, url = await serve(daemons)
    async with server, aiohttp.ClientSession() as session:
        daemons.changed(*told())
        async with session.get(f"{url}/healthz") as answer:
            assert json.loads(await answer.read())["member"] == START.member_id
        daemons.changed(*told("DELETED"))
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"{url}/healthz")


async def test_requests_are_answered_in_whatever_pieces_they_come() -> None:
    daemons = Daemons()
    daemons.changed(*told())
    server, url = await serve(daemons)
    async with server:
        reader, writer = await asyncio.open_connection(ADDRESS, int(url.rpartition(":")[2]))
        one = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
        for piece in (one[:9], one[9:] + one[:20], one[20:]):
            writer.write(piece)
            await asyncio.sleep(0.02)
        writer.write_eof()
        answers = await asyncio.wait_for(reader.read(), 5)
        assert answers.count(b"HTTP/1.1 200") == 2
        writer.close()


# The figures.


def step(rate: float, wait: float = 0.01, failed: int = 0) -> Step:
    return Step(rate, [wait] * 100, failed, 0.2)


def test_the_ceiling_is_the_last_rate_before_one_that_is_not_held() -> None:
    ramp = [step(60), step(100), step(150, wait=0.6), step(200)]
    held = acquire.ceiling(ramp)
    assert held is not None
    assert held.rate == 100
    assert acquire.ceiling([step(60, failed=1)]) is None


def test_the_part_of_acquires_says_writes_warm_share_and_ceiling() -> None:
    one = Series([[0.002, 0.004]])
    found = acquire.Found(step(45), 0.995, one, one, one, one, one, [step(60), step(80, wait=0.7)])
    found.acquires, found.writes["create pods"] = 500, 2
    waits, ramp = acquire.section(found).tables
    assert "99.5 % found a member free" in waits.text
    assert "500 acquires, releases and resets, the broker wrote to the API server 2 times" in waits.text
    assert "The ceiling: 60 a second" in ramp.text
    assert ramp.rows[1] == ["80", "700", "700", "0", "2.00", "no"]


def test_the_part_of_starts_says_which_bound_is_missed() -> None:
    few, many = Usage(2.0, 100.0, 3.0), Usage(6.0, 210.0, 6.0)
    section = starts.section(starts.Found({1: few, 2: few}, {1: few, 2: many}, (1, 2)))
    assert [row[-1] for row in section.tables[0].rows] == [*["held"] * 3, "CPU missed, memory missed"]
    assert [each.spread.middle for each in section.ratios] == [1.0, 1.0, 1.0, 3.0, pytest.approx(2.1), 2.0]


def test_the_most_status_writes_of_one_run_are_those_of_the_fullest_span() -> None:
    written = {"a": [0.0, 30.0, 60.0, 61.0], "b": [5.0]}
    window = runs.Window(60.0, 1.0, {}, written)
    assert [window.most(span) for span in (0.5, 10.0, 60.0, 61.0)] == [1, 2, 3, 4]
    assert runs.Window(60.0, 1.0, {}, {}).most(10.0) == 0


def test_the_part_of_runs_tells_requests_a_minute_and_which_bound_is_missed() -> None:
    counts = {("get", "trainingruns"): 300, ("list", "trainingruns"): 3, ("patch", "trainingruns/status"): 10}
    often = {"a": [float(each) for each in range(12)], "b": [0.0]}
    quiet = runs.Window(30.0, 2.0, counts, {"a": [0.0, 30.0]})
    moving = runs.Window(30.0, 3.0, counts, often)
    lives = Usage(20.0, 310.0, 90.0), Usage(5.0, 120.0, 9.0)
    section = runs.section(runs.Found(200, *lives, quiet, quiet, moving))
    assert "2,000 trainer pods" in section.text
    table = {each.title: each.rows for each in section.tables}
    assert [row[-1] for row in table["Runs"]] == ["missed", "held"]
    assert table["A minute with runs"][0][1:] == ["4.0", "600", "6", "20"]
    assert [row[-2:] for row in table["Status writes"]] == [
        ["1", "11, held"],
        ["11", "11, held"],
        ["12", "3, missed"],
    ]
    assert [each.spread.middle for each in section.ratios] == [1.5, 1.0]


@pytest.mark.parametrize(("took", "said"), [(0.010, ("held", "held")), (0.030, ("missed", "missed"))])
def test_the_part_of_pods_says_which_bar_is_held(took: float, said: tuple[str, str]) -> None:
    resets = {"0": [[0.005]], "1000": [[took]], "delete and create": [[1.0]], "create": [[0.8]]}
    execs = {"pod": {"one": [[0.002]], "rate": [[400.0]]}, "api": {"one": [[0.1]], "rate": [[20.0]]}}
    section = node.section({"resets": resets, "execs": execs, "rollouts": {"reset": 20.0, "fresh": 1.0}})
    text = section.tables[0].text
    assert f"1,000 changed files, {said[0]}; 50 times as fast as to delete and create, {said[1]}." in text
    assert "10 times as many, held." in section.tables[1].text
    assert [round(each.spread.middle) for each in section.ratios][3:] == [20, 50, 20]


def test_a_process_s_cpu_and_memory_are_read() -> None:
    assert cpu_s(os.getpid()) > 0
    assert 10 < peak_mb(os.getpid()) < 5000
