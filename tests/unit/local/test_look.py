"""Sections follow the guarantees of `agentfly.local.look`. The broker is a real one, in its own process."""

import copy
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentfly import cli
from agentfly.local import look
from agentfly.local.paths import run_dir
from agentfly.resources.lease import LeaseStatus, PoolStatus

BROKER = """
import asyncio, sys
from pathlib import Path
from agentfly.broker.server import BrokerServer
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.spec import ContainerSpec, PoolSpec
from tests.unit.resources.harness import FakeRunner

async def main(path):
    pool = PoolSpec(name="shell", resource=ContainerSpec(), max=4)
    async with ResourceEngine([FakeRunner()], [pool]) as engine, BrokerServer(engine, Path(path)):
        lease = await engine.acquire("shell", "some owner", share="a job")
        print(lease.info.token, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main(sys.argv[1]))
"""


class Running:
    """A data plane's folder with a broker that has one lease of four."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.address = f"unix://{folder / 'broker'}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", BROKER, str(folder / "broker")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.token = self.process.stdout.readline().strip()
        assert self.token, "the broker did not start"

    def close(self) -> None:
        self.process.communicate(timeout=20)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    made = Running(tmp_path_factory.mktemp("cache") / "agentfly" / "run" / "aaaa")
    yield made
    made.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, where nothing runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "40")  # a row is a line all the same
    return run_dir()


@pytest.fixture
def running(started: Running, home: Path) -> Running:
    """The broker, as if it ran in this test's cache."""
    return appear(started, home / "aaaa")


def appear(started: Running, folder: Path) -> Running:
    folder.symlink_to(Path(started.address.removeprefix("unix://")).parent)
    seen = copy.copy(started)
    seen.address = f"unix://{folder / 'broker'}"
    return seen


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    said = capsys.readouterr()
    return code, said.out, said.err


def cells_of(line: str) -> list[str]:
    return re.split(" {2,}", line.strip())


# 1. What runs here is found.


def test_pools_and_leases_of_what_runs_are_shown(running, capsys):
    code, out, _ = run(capsys, "pools")
    assert code == 0
    head, row = map(cells_of, out.splitlines())
    columns = [
        "Pool",
        "Type",
        "Ready",
        "Free",
        "Leased",
        "Starting",
        "Queued",
        "Max",
        "Hit%",
        "P99",
        "Reason",
    ]
    assert head == columns
    assert row[:9] == ["shell", "container", "1", "0", "1", "0", "0", "4", "0"]
    assert (row[9][-2:], row[10]) == ("ms", "Ready")
    code, out, _ = run(capsys, "leases")
    assert code == 0
    head, row = map(cells_of, out.splitlines())
    columns = ["Lease", "Pool", "Member", "Owner", "Share", "Held for", "Expires in"]
    assert head == columns
    assert (row[1], row[3], row[4]) == ("shell", "some owner", "a job")


def test_json_is_for_programs(running, capsys):
    code, out, _ = run(capsys, "pools", "-o", "json")
    (answer,) = json.loads(out)
    assert (code, answer["broker"]) == (0, running.address)
    assert PoolStatus.model_validate(answer["pools"]["shell"]).leased == 1
    code, out, _ = run(capsys, "leases", "-o", "json")
    (answer,) = json.loads(out)
    (lease,) = answer["leases"]
    assert LeaseStatus.model_validate(lease).owner == "some owner"


def test_several_that_run_are_all_shown_and_one_can_be_chosen(running, home, capsys):
    other = appear(running, home / "bbbb")
    _, out, _ = run(capsys, "leases")
    assert out.count("some owner") == 2
    for address in (running.address, other.address):
        assert address in out.replace("\n", "")
    _, out, _ = run(capsys, "leases", "--broker", other.address, "-o", "json")
    assert [answer["broker"] for answer in json.loads(out)] == [other.address]


def test_folder_without_a_living_broker_is_passed_over(running, home, capsys):
    (home / "0000").mkdir()
    dead = home / "1111"
    dead.mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(dead / "broker"))
    assert look.listening(home) == [running.address]
    assert run(capsys, "pools")[0] == 0


async def test_one_that_ends_meanwhile_is_left_out(running, home):
    found = await look._ask([f"unix://{home}/gone", running.address], look.BrokerClient.status)
    assert list(found) == [running.address]


# 2. Errors say what to do.


@pytest.mark.parametrize("command", ["pools", "leases"])
def test_nothing_that_runs_is_an_error_of_the_input(command, home, capsys):
    assert run(capsys, command) == (
        2,
        "",
        "broker: no run is going on here\n"
        "  hint: start one with agentfly run or agentfly rollout\n"
        "  hint: or name a broker: --broker ADDRESS\n",
    )


def test_broker_that_does_not_answer_is_named(home, capsys):
    address = f"unix://{home}/none"
    code, out, err = run(capsys, "pools", "--broker", address)
    assert (code, out) == (2, "")
    assert err.startswith(f"broker {address}: /pools got no answer: ")
    assert "hint: see whether the broker runs" in err


def test_address_that_is_none_is_refused(home, capsys):
    code, _, err = run(capsys, "leases", "--broker", "/some/path")
    assert code == 2
    assert err == (
        "broker: /some/path is no address\n  hint: use unix:///path/to/broker or http://host:port\n"
    )


# 3. No token.


def test_no_token_is_shown(running, capsys):
    for command in (("pools",), ("leases",), ("pools", "-o", "json"), ("leases", "-o", "json")):
        assert running.token not in run(capsys, *command)[1]


# Times for people.


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0ms"),
        (0.0042, "4.2ms"),
        (0.0421, "42ms"),
        (0.9994, "999ms"),
        (0.9999, "1.0s"),
        (59.94, "59.9s"),
        (59.96, "1m00s"),
        (3599, "59m59s"),
        (3600, "1h00m"),
        (90000, "25h00m"),
    ],
)
def test_duration_has_the_units_that_matter(seconds, text):
    assert look.duration(seconds) == text
