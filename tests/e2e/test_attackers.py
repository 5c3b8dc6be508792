"""What an attacker in a sandbox pod can do, with enforced NetworkPolicies, to all that is not its own.

Each test first shows that the same program succeeds where nothing is in its way. Not here: what holders of
tokens, ServiceAccounts and users can do (test_attackers_rights).
"""

import base64
import contextlib
import json
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentfly.resources.runners.kubernetes import Signer
from tests.e2e.attackers import INTERNET, METADATA, SHAPES, Field, field, made
from tests.e2e.world import BROKER, SYSTEM, Refused, installed

__all__ = ["field", "installed"]

NODE = "10.250.0.11"
NODE_PORT = 30707
LAST_WORDS_S = 10.0
"""For a connection to end after its holder's lease, on a busy machine."""


# What is reached.


@pytest.fixture(scope="module")
def targets(field: Field) -> Iterator[dict[str, str]]:
    """Every place by name, as reach.py takes it."""
    path = f"{field.world.path}/services"
    ports = [{"port": 7080, "nodePort": NODE_PORT}]
    spec = {"type": "NodePort", "selector": {"agentfly.dev/component": "broker"}, "ports": ports}
    field.cluster.api.create(path, {"metadata": {"name": "by-node"}, "spec": spec})
    broker = field.address("agentfly.dev/component=broker")
    with field.attack("shell", "victim") as victim:
        yield {
            "the API server": "tcp:10.96.0.1:443",
            "the API server by its own address": "tcp:10.250.0.1:6443",
            "the API server by its name": "tcp:kubernetes.default.svc.cluster.local:443",
            "the kubelet": f"tcp:{NODE}:10250",
            "a port of the node": f"tcp:{NODE}:{NODE_PORT}",
            "the broker": f"http:{broker}:7080",
            "the broker by its name": f"http:{BROKER}.{field.world.namespace}.svc.cluster.local:7080",
            "the broker's gateways": f"http:{broker}:7081",
            "the operator": f"http:{field.address('agentfly.dev/component=operator', SYSTEM)}:8080",
            "a worker": f"http:{field.address('agentfly.dev/component=worker')}:9000",
            "another sandbox": f"http:{victim.address}:7070",
            "metadata of a cloud": f"http:{METADATA}:80",
            "the internet": f"http:{INTERNET}:80",
            "names": "dns:10.96.0.10:53",
        }


def reached(said: str) -> set[str]:
    return {name for name, what in json.loads(said).items() if what == "open"}


def test_all_of_it_is_there_for_others(field: Field, targets: dict[str, str]) -> None:
    said = field.bystander("reach.py", *(f"{name}={place}" for name, place in targets.items()))
    assert reached(said) == set(targets), said


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sandbox_reaches_nothing_of_the_cluster(field: Field, targets: dict[str, str], shape: str) -> None:
    with field.attack(shape) as attacker:
        said = attacker.runs("reach.py", *(f"{name}={place}" for name, place in targets.items()))
        assert set(json.loads(said)) == set(targets)
        assert reached(said) == ({"the internet", "names"} if shape == "online" else set()), said


def test_the_first_packets_of_a_new_sandbox_are_held_back(field: Field) -> None:
    made(field.world, "strict", "sudden", at_once=0)
    with field.attack("sudden") as attacker:  # who waited for it, and comes in the moment that it is there
        early = json.loads(attacker.runs("early.py", "10.96.0.1", "443", "2"))
    assert early["tries"] > 5
    assert early["opened"] == []
    assert json.loads(field.bystander("early.py", "10.96.0.1", "443", "0.5"))["opened"]


# Who is heard.


def signer(field: Field) -> Signer:
    """The broker's own."""
    found = field.cluster.api.get(f"{field.world.path}/secrets/{BROKER}")
    return Signer(base64.b64decode(found["data"]["signing-key"]))


def health(field: Field, address: str) -> dict[str, object]:
    return dict(json.loads(field.bystander("get.py", f"http://{address}:7070/healthz")))


@pytest.mark.parametrize("shape", ["strict", "online"])
def test_a_forged_lease_is_refused(field: Field, shape: str) -> None:
    with field.attack("shell") as neighbour, field.attack(shape) as attacker:
        true, own, there = signer(field), attacker.info["token"], "http://127.0.0.1:7070"
        boot = str(health(field, attacker.address)["boot"])
        member, other = attacker.info["member_id"], neighbour.info["member_id"]
        forged = {
            "none": "",
            "a guess": "admin",
            "its own lease": own,
            "the neighbour's lease": neighbour.info["token"],
            "another key": Signer(secrets.token_bytes(32)).token(member, boot),
            "another member": true.token(other, boot),
            "another boot": true.token(member, str(health(field, neighbour.address)["boot"])),
            "the neighbour's owner": true.token(other, str(health(field, neighbour.address)["boot"])),
        }
        lease = {"owner": "me", "attempt": 0, "token": "mine", "ttlSeconds": 600}
        routes = [
            {"method": "GET", "url": f"{there}/lease"},
            {"method": "POST", "url": f"{there}/lease", "body": lease},
            {"method": "POST", "url": f"{there}/reset", "body": {}},
        ]
        requests = [route | {"token": token} for token in forged.values() for route in routes]
        assert attacker.asks(*requests) == [401] * len(requests)
        exec_ = {"method": "POST", "url": f"{there}/exec", "body": {"command": "true"}}
        tokens = [token for who, token in forged.items() if who != "its own lease"]
        answers = attacker.asks(*(exec_ | {"token": token} for token in tokens))
        assert set(answers) <= {401, 410}, answers
        # The same program, with what the broker has, and with what the holder has.
        assert attacker.asks(routes[0] | {"token": true.token(member, boot)}, exec_ | {"token": own}) == [
            200,
            200,
        ]


@pytest.mark.parametrize("shape", ["plain", "strict"])
def test_an_old_token_opens_nothing(field: Field, shape: str) -> None:
    exec_ = {"method": "POST", "body": {"command": "true"}}
    with field.attack(shape) as attacker:
        old = attacker.info
        assert json.loads(field.bystander("ask.py", json.dumps([asked(old, exec_)]))) == [200]
    with field.attack(shape) as next_:
        answer = field.bystander(
            "ask.py", json.dumps([asked(old | {"address": next_.info["address"]}, exec_)])
        )
        assert json.loads(answer) == [410]


def asked(info: dict[str, str], request: dict[str, object]) -> dict[str, object]:
    return request | {"url": f"{info['address']}/exec", "token": info["token"]}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_daemon_is_neither_killed_nor_impersonated(field: Field, shape: str) -> None:
    with field.attack(shape) as attacker:
        before = health(field, attacker.address)
        with contextlib.suppress(Refused):  # it may kill what runs its commands: then its lease is gone
            attacker.runs("usurp.py", "3", attacker.address, seconds=20)
        assert health(field, attacker.address)["boot"] == before["boot"]
    with field.attack(shape) as next_:
        assert next_.sh("echo fine") == "fine\n"
        assert "usurped" not in json.dumps(health(field, next_.address))


# What is left behind.


def running(mark: str) -> list[str]:
    """What runs on this machine, and with it on the node, that has the mark in its command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if mark in words:
                found.append(words)
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_keeps_running_after_release(field: Field, shape: str) -> None:
    mark = f"mark{secrets.token_hex(6)}"
    with field.attack(shape) as attacker:
        ways = set(attacker.runs("linger.py", mark).split())
        assert ways >= {"daemon", "deaf", "reborn", "traces", "listens", "holds", "stopped", "cron"}
        assert running(f"{mark}-daemon")
        attacker.release()
        with field.attack(shape) as next_:  # given once the last holder's processes are gone
            assert [line for line in running(mark) if "exec" not in line] == []
            assert next_.info["member_id"] == attacker.info["member_id"]
            commands = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '"
            assert next_.sh(f"{commands} | grep -c '[m]ark' || true") == "0\n"
            assert next_.sh("python3 -c \"import socket; socket.socket().bind(('', 7999))\"") == ""


def test_connections_end_with_their_lease(field: Field) -> None:
    serve = (
        "import socket\n"
        "l = socket.create_server(('0.0.0.0', 81)); print('ready', flush=True)\n"
        "c, _ = l.accept(); c.settimeout(60); print('open', c.recv(5), flush=True)\n"
        "try:\n    while c.recv(1000): pass\nexcept OSError: pass\n"
        "print('closed', flush=True)"
    )
    command = [*field.cluster.enter(), sys.executable, "-c", serve]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        field.attack("online") as attacker,
    ):
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            assert attacker.runs("hold.py", INTERNET, "81") == "held\n"
            assert server.stdout.readline() == "open b'still'\n"
            assert not select.select([server.stdout], [], [], 1.0)[0]
            attacker.release()
            assert select.select([server.stdout], [], [], LAST_WORDS_S)[0], "the connection is still open"
            assert server.stdout.readline() == "closed\n"
        finally:
            server.kill()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_next_holder_finds_nothing(field: Field, shape: str) -> None:
    word = f"word{secrets.token_hex(6)}"
    with field.attack(shape) as attacker:
        places = attacker.runs("leave.py", word).strip().split(",")
        assert len(places) > 6, places
        found = attacker.runs("find.py", word[::-1]).split("\n")
        assert len(found) > 6, found
        with field.attack("shell") as other:  # at the same time
            assert other.runs("find.py", word[::-1]) == ""
        token = attacker.info["token"]
        assert attacker.runs("find.py", token[::-1]) == ""
        attacker.release()
        with field.attack(shape) as next_:
            assert next_.info["member_id"] == attacker.info["member_id"]
            assert next_.runs("find.py", word[::-1]) == ""
            assert next_.runs("find.py", token[::-1]) == ""


# What others need.


@pytest.mark.parametrize(
    ("what", "shape"),
    [
        *((what, "plain") for what in ("processes", "memory", "disk", "connections", "output")),
        *((what, "strict") for what in ("processes", "memory", "connections")),
    ],
)
def test_who_takes_all_harms_himself_alone(field: Field, what: str, shape: str) -> None:
    with field.attack("online") as neighbour:
        with field.attack(shape) as attacker:
            with contextlib.suppress(Refused):  # its lease may be lost: that is its own loss
                attacker.runs("exhaust.py", what, attacker.address, seconds=6)
            began = time.monotonic()
            assert neighbour.sh("echo fine") == "fine\n"
            assert time.monotonic() - began < 10
        with field.attack(shape) as next_:
            assert next_.sh("echo fine") == "fine\n"
            assert next_.sh("ls -A /tmp | wc -l") == "0\n"
