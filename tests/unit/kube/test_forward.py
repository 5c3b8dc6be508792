"""A port of a pod through the API server; numbers are those of forward.py."""

import pytest
from aiohttp import web

from agentfly.kube import KubeError, Unreachable, get_from_pod
from agentfly.kube.forward import PROTOCOL
from tests.unit.kube.api_stub import ApiStub, connected, status

OK = b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n"


def pod_says(*pieces: bytes, complaint: bytes = b"", asked: list | None = None):
    """A node's end of the line: every channel begins with the port, then come the pieces."""

    async def answer(request):
        line = web.WebSocketResponse(protocols=[PROTOCOL])
        await line.prepare(request)
        for channel in (b"\0", b"\1"):
            await line.send_bytes(channel + (7080).to_bytes(2, "little"))
        asked_for = (await line.receive()).data
        if asked is not None:
            asked.append(asked_for)
        for piece in pieces:
            await line.send_bytes(b"\0" + piece)
        if complaint:
            await line.send_bytes(b"\1" + complaint)
        await line.close()
        return line

    return answer


async def ask(kube, deadline_s=5.0):
    return await get_from_pod(kube, "team", "broker-1", 7080, "/pools", {"X-Token": "t"}, deadline_s)


async def test_the_answer_of_a_pod_however_it_is_cut():
    asked = []
    stub = ApiStub([pod_says(OK[:20], OK[20:], b'{"a"', b": 1}", asked=asked)])
    async with connected(stub) as kube:
        assert await ask(kube) == (200, b'{"a": 1}')
    assert asked == [b"\0GET /pools HTTP/1.0\r\nX-Token: t\r\n\r\n"]
    (seen,) = stub.seen
    assert (seen.path, seen.query) == ("/api/v1/namespaces/team/pods/broker-1/portforward", {"ports": "7080"})
    assert seen.headers["Authorization"] == "Bearer one"


async def test_an_answer_that_is_no_success_is_given_as_it_is():
    async with connected(ApiStub([pod_says(b"HTTP/1.0 401 Unauthorized\r\n\r\nno")])) as kube:
        assert await ask(kube) == (401, b"no")


async def test_2_what_the_node_complains_of_is_said():
    async with connected(ApiStub([pod_says(complaint=b"connection refused")])) as kube:
        with pytest.raises(Unreachable, match="port 7080 of pod broker-1: connection refused"):
            await ask(kube)


async def test_2_a_pod_that_says_nothing_is_given_up():
    async with connected(ApiStub(["hang"])) as kube:
        with pytest.raises(Unreachable, match=r"no answer in 0\.2 s"):
            await ask(kube, 0.2)


async def test_2_half_an_answer_is_none():
    half = b"HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\nhalf"
    async with connected(ApiStub([pod_says(half)])) as kube:
        with pytest.raises(Unreachable, match="IncompleteRead"):
            await ask(kube)


async def test_a_refusal_of_the_api_server_has_its_status():
    async with connected(ApiStub([(403, status(403, "Forbidden"))])) as kube:
        with pytest.raises(KubeError) as caught:
            await ask(kube)
    assert caught.value.status == 403
