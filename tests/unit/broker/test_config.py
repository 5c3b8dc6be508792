"""What a broker is told at its start, what it reads of Secrets, and how it logs."""

import base64
import json
import logging
from pathlib import Path

import pytest

from agentfly.broker import config
from agentfly.broker.cluster import SecretReader
from agentfly.broker.config import BrokerConfig, config_from
from agentfly.broker.logs import JSONLines
from agentfly.resources.errors import ResourceError
from tests.unit.kube.api_stub import ApiStub, connected, status

FILES = {config.SIGNING_KEY_FILE: "/k", config.CLIENT_TOKEN_FILE: "/t"}


def test_defaults_are_those_of_the_deployment():
    assert config_from(FILES) == BrokerConfig(
        listen=("0.0.0.0", 7080),
        gateway_listen=("0.0.0.0", 7081),
        signing_key_file=Path("/k"),
        client_token_file=Path("/t"),
        sandboxd_image="agentfly/sandboxd:dev",
    )
    assert config_from(FILES).gateway("team") == "http://agentfly-broker.team.svc:7081"


def test_everything_can_be_set():
    given = {
        config.NAMESPACE: "team",
        config.LISTEN: "[::]:80",
        config.GATEWAY_LISTEN: "127.0.0.1:81",
        config.GATEWAY_URL: "http://g",
        config.SANDBOXD_IMAGE: "registry/sandboxd:1",
        config.IN_PROCESS_MODULES: "games, envs.chess,",
    }
    found = config_from(FILES | given)
    assert (found.namespace, found.listen, found.gateway_listen) == ("team", ("::", 80), ("127.0.0.1", 81))
    assert (found.gateway("team"), found.modules) == ("http://g", ("games", "envs.chess"))
    assert found.sandboxd_image == "registry/sandboxd:1"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({config.SIGNING_KEY_FILE: ""}, "AGENTFLY_SIGNING_KEY_FILE: is not set"),
        ({config.LISTEN: "7080"}, "AGENTFLY_LISTEN: 7080 is no address"),
        ({config.GATEWAY_LISTEN: "a:70000"}, "AGENTFLY_GATEWAY_LISTEN: a:70000 is no address"),
    ],
)
def test_what_cannot_be_used_is_named(given, text):
    with pytest.raises(ResourceError) as refused:
        config_from(FILES | given)
    assert refused.value.message == text
    assert refused.value.hints


@pytest.mark.parametrize("content", [b"k" * 32, base64.b64encode(b"k" * 32) + b"\n"])
def test_signing_key_is_32_bytes_also_in_base64(tmp_path, content):
    (tmp_path / "key").write_bytes(content)
    found = config_from(FILES | {config.SIGNING_KEY_FILE: str(tmp_path / "key")})
    assert found.signing_key() == b"k" * 32


@pytest.mark.parametrize("content", [None, b"", b"short", b"k" * 33, base64.b64encode(b"k" * 31)])
def test_other_keys_are_refused_and_not_quoted(tmp_path, content):
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ResourceError, match="AGENTFLY_SIGNING_KEY_FILE") as refused:
        config_from(FILES | {config.SIGNING_KEY_FILE: str(path)}).signing_key()
    assert "kkk" not in refused.value.render()


async def test_value_of_a_secret_is_read_by_its_name():
    async with ApiStub().serving() as stub, connected(stub) as kube:
        stub.answers.append((200, {"data": {"key": base64.b64encode(b"sk-1").decode()}}))
        assert await SecretReader(kube, "team").read("judge/key") == "sk-1"
        assert [each.path for each in stub.seen] == ["/api/v1/namespaces/team/secrets/judge"]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ((404, status(404, "NotFound", "none")), "Secret judge: does not exist in namespace team"),
        ((403, status(403, "Forbidden", "no")), "Secret judge: cannot be read: Forbidden"),
        ((200, {}), "Secret judge: has no key key"),
        ((200, {"data": {"other": "c2stMQ=="}}), "Secret judge: has no key key"),
        ((200, {"data": {"key": "sk-1 is no base64"}}), "Secret judge: key key is not text"),
        ((200, {"data": {"key": "/w=="}}), "Secret judge: key key is not text"),
    ],
)
async def test_secret_that_cannot_be_read_says_why_and_quotes_nothing(answer, text):
    async with ApiStub().serving() as stub, connected(stub) as kube:
        stub.answers.append(answer)
        with pytest.raises(ResourceError) as refused:
            await SecretReader(kube, "team").read("judge/key")
        assert refused.value.message == text


def test_log_is_one_object_a_line():
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.getLogger("agentfly.x").makeRecord(
            "agentfly.x",
            logging.ERROR,
            "f",
            1,
            "pool %s:\nfailed",
            ("shell",),
            logging.sys.exc_info(),  # type: ignore[attr-defined]
        )
    record.created = 0.25
    text = JSONLines().format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert (line["time"], line["level"]) == ("1970-01-01T00:00:00.250Z", "error")
    assert (line["logger"], line["message"]) == ("agentfly.x", "pool shell:\nfailed")
    assert line["error"].endswith("ValueError: two\nlines")
