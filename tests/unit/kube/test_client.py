import asyncio
import gc
import json

import pytest
from aiohttp import web

from agentfly.kube import PODS, RESOURCE_POOLS, Conflict, Gone, KubeError, NotFound, Unreachable, answers
from agentfly.kube import client as module
from agentfly.kube.access import Access
from agentfly.kube.client import Kube
from tests.unit.kube.api_stub import ApiStub, StubLogin, connected, status

POD = {"metadata": {"name": "a", "namespace": "ns"}, "spec": {}}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(module, "_PAUSES_S", (0.01,))


async def test_says_who_it_is_and_reads_what_it_asked_for():
    stub = ApiStub([(200, {"metadata": {"name": "a"}})])
    async with connected(stub) as kube:
        assert (await kube.get(PODS, "a", "ns"))["metadata"]["name"] == "a"
    seen = stub.seen[0]
    assert (seen.method, seen.path) == ("GET", "/api/v1/namespaces/ns/pods/a")
    assert seen.headers["User-Agent"] == "agentfly-test/1"
    assert seen.headers["Authorization"] == "Bearer one"


async def test_namespace_is_the_clients_own_where_none_is_named():
    stub = ApiStub()
    async with connected(stub) as kube:
        await kube.get(PODS, "a")
        await kube.create(PODS, {"metadata": {"name": "b"}})
        await kube.create(PODS, POD)
        assert kube.namespace == "home"
    assert [each.path for each in stub.seen] == [
        "/api/v1/namespaces/home/pods/a",
        "/api/v1/namespaces/home/pods",
        "/api/v1/namespaces/ns/pods",
    ]


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (404, "NotFound", NotFound),
        (409, "AlreadyExists", Conflict),
        (409, "Conflict", Conflict),
        (410, "Expired", Gone),
        (403, "Forbidden", KubeError),
        (422, "Invalid", KubeError),
    ],
)
async def test_refusal_is_a_typed_error_at_once(code, reason, kind):
    stub = ApiStub(default=(code, status(code, reason, "pods a: is wrong")))
    async with connected(stub) as kube:
        with pytest.raises(KubeError) as caught:
            await kube.create(PODS, POD)
    assert type(caught.value) is kind
    assert (caught.value.status, caught.value.reason) == (code, reason)
    assert "pods a: is wrong" in str(caught.value)
    assert "POST /api/v1/namespaces/ns/pods" in str(caught.value)
    assert len(stub.seen) == 1


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
async def test_overload_and_failure_are_tried_again(code):
    stub = ApiStub([(code, status(code, "x"))] * 3 + [(200, {"ok": 1})])
    async with connected(stub) as kube:
        assert await kube.create(PODS, POD) == {"ok": 1}
    assert stub.methods() == ["POST"] * 4


async def test_connection_that_breaks_is_tried_again():
    stub = ApiStub(["cut", "cut", (200, {"ok": 1})])
    async with connected(stub) as kube:
        assert await kube.get(PODS, "a") == {"ok": 1}


async def test_object_without_a_name_is_created_at_most_once():
    unnamed = {"metadata": {"generateName": "a-"}}
    stub = ApiStub(["cut"])
    async with connected(stub) as kube:
        with pytest.raises(Unreachable):
            await kube.create(PODS, unnamed)
        assert len(stub.seen) == 1
        stub.answers = [(500, status(500, "InternalError"))]
        with pytest.raises(KubeError, match="500 InternalError"):
            await kube.create(PODS, unnamed)
        assert len(stub.seen) == 2
        stub.answers = [(429, status(429, "TooManyRequests")), (201, {"ok": 1})]  # it was not even begun
        assert await kube.create(PODS, unnamed) == {"ok": 1}


async def test_waits_as_long_as_the_server_says():
    stub = ApiStub([(429, status(429, "TooManyRequests"), {"Retry-After": "1"}), (200, {})])
    async with connected(stub) as kube:
        began = asyncio.get_running_loop().time()
        await kube.get(PODS, "a")
        assert 0.95 < asyncio.get_running_loop().time() - began < 5


async def test_failure_is_told_when_the_pause_would_pass_the_deadline():
    stub = ApiStub(default=(503, status(503, "ServiceUnavailable", "etcd is away"), {"Retry-After": "60"}))
    async with connected(stub) as kube:
        began = asyncio.get_running_loop().time()
        with pytest.raises(KubeError, match="etcd is away"):
            await kube.request("GET", "/x", deadline_s=20)
        assert asyncio.get_running_loop().time() - began < 5


async def test_deadline_holds_over_all_tries(monkeypatch):
    monkeypatch.setattr(module, "_PAUSES_S", (0.05, 0.05, 0.05, 60.0))  # the last one would go beyond it
    stub = ApiStub(default=(500, status(500, "InternalError")))
    async with connected(stub) as kube:
        began = asyncio.get_running_loop().time()
        with pytest.raises(KubeError, match="500"):
            await kube.request("GET", "/x", deadline_s=10)
        assert asyncio.get_running_loop().time() - began < 10
    assert len(stub.seen) == 4


async def test_answer_that_never_comes_ends_with_the_deadline():
    stub = ApiStub(default="hang")
    async with connected(stub) as kube:
        with pytest.raises(Unreachable, match=r"did not answer GET /x: no answer in time"):
            await kube.request("GET", "/x", deadline_s=0.2)


async def test_one_try_does_not_use_up_the_deadline(monkeypatch):
    monkeypatch.setattr(module, "ATTEMPT_S", 0.1)
    stub = ApiStub(["hang", (200, {"ok": 1})])
    async with connected(stub) as kube:
        assert await kube.get(PODS, "a") == {"ok": 1}


async def test_nobody_listens():
    async with Kube("agentfly-test/1", StubLogin("http://127.0.0.1:9")) as kube:
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9") as caught:
            await kube.request("GET", "/x", deadline_s=0.1)
    assert caught.value.status == 0
    assert caught.value.hints


async def test_rotated_token_is_read_again_when_it_is_refused():
    stub = ApiStub([(401, status(401, "Unauthorized")), (200, {"ok": 1})])
    async with connected(stub, tokens=("old", "new")) as kube:
        assert await kube.get(PODS, "a") == {"ok": 1}
    assert [each.headers["Authorization"] for each in stub.seen] == ["Bearer old", "Bearer new"]


async def test_token_that_stays_refused_is_an_error():
    stub = ApiStub(default=(401, status(401, "Unauthorized", "Unauthorized")))
    async with connected(stub) as kube:
        with pytest.raises(KubeError, match="401") as caught:
            await kube.get(PODS, "a")
    assert len(stub.seen) == 2
    assert caught.value.hints


async def test_many_refused_at_once_read_the_token_once():
    stub = ApiStub([(401, status(401, "Unauthorized"))] * 20, takes_s=0.05)
    async with stub.serving():
        login = StubLogin(stub.url, ("old", "new"))
        async with Kube("agentfly-test/1", login) as kube:
            await asyncio.gather(*(kube.get(PODS, f"p{n}") for n in range(20)))
    assert login.reads == 2


async def test_token_is_read_again_before_it_is_old():
    stub = ApiStub()
    async with stub.serving():
        login = StubLogin(stub.url, ("old", "new"))
        login.valid_s = 0.0
        async with Kube("agentfly-test/1", login) as kube:
            await kube.get(PODS, "a")
    assert stub.seen[0].headers["Authorization"] == "Bearer new"


async def test_access_that_cannot_be_read_again_is_used_as_it_was():
    stub = ApiStub()

    class Broken(StubLogin):
        valid_s = 0.0

        def read(self):
            if self.reads:
                raise KubeError("service account: away")
            return super().read()

    async with stub.serving(), Kube("agentfly-test/1", Broken(stub.url)) as kube:
        assert await kube.get(PODS, "a") == {}


async def test_writes_are_bounded_and_reads_do_not_wait_for_them(monkeypatch):
    monkeypatch.setattr(module, "WRITES", 3)
    stub = ApiStub(takes_s=0.05)
    async with connected(stub) as kube:
        await asyncio.gather(*(kube.create(PODS, {"metadata": {"name": f"p{n}"}}) for n in range(12)))
        assert stub.most == 3
        stub.takes_s = 0.3
        writes = [asyncio.create_task(kube.delete(PODS, f"p{n}")) for n in range(3)]
        await asyncio.sleep(0.05)
        stub.takes_s = 0.0
        await asyncio.wait_for(kube.get(PODS, "a"), 0.2)
        await asyncio.gather(*writes)


async def test_write_that_waits_in_line_was_not_tried(monkeypatch):
    monkeypatch.setattr(module, "WRITES", 1)
    monkeypatch.setattr(module, "ATTEMPT_S", 0.3)
    stub = ApiStub(takes_s=0.1)
    async with connected(stub) as kube:
        await asyncio.gather(*(kube.create(PODS, {"metadata": {"name": f"p{n}"}}) for n in range(8)))
    assert len(stub.seen) == 8


async def test_apply_is_server_side_under_our_name():
    stub = ApiStub()
    async with connected(stub) as kube:
        await kube.apply(RESOURCE_POOLS, POD)
        await kube.apply(RESOURCE_POOLS, POD, force=False, subresource="status", dry_run=True)
    first, second = stub.seen
    assert first.method == "PATCH"
    assert first.path == "/apis/agentfly.dev/v1alpha1/namespaces/ns/resourcepools/a"
    assert first.query == {"fieldManager": "agentfly", "force": "true"}
    assert first.headers["Content-Type"] == "application/apply-patch+yaml"
    assert first.body == POD
    assert second.path.endswith("/resourcepools/a/status")
    assert second.query == {"fieldManager": "agentfly", "force": "false", "dryRun": "All"}


async def test_status_is_merged_into_its_subresource():
    stub = ApiStub()
    async with connected(stub) as kube:
        await kube.patch_status(RESOURCE_POOLS, "a", {"ready": 1})
    seen = stub.seen[0]
    assert seen.path.endswith("/namespaces/home/resourcepools/a/status")
    assert seen.headers["Content-Type"] == "application/merge-patch+json"
    assert seen.body == {"status": {"ready": 1}}


async def test_replace_puts_the_whole_object():
    stub = ApiStub()
    async with connected(stub) as kube:
        await kube.replace(PODS, POD)
    assert (stub.seen[0].method, stub.seen[0].path) == ("PUT", "/api/v1/namespaces/ns/pods/a")


async def test_delete_names_the_object_that_is_meant():
    stub = ApiStub([(200, {}), (404, status(404, "NotFound")), (409, status(409, "Conflict"))])
    async with connected(stub) as kube:
        assert await kube.delete(PODS, "a", uid="u1", grace_s=0, propagation="Background") is True
        assert await kube.delete(PODS, "a", uid="u1") is False
        with pytest.raises(Conflict):
            await kube.delete(PODS, "a", uid="u1")
    body = stub.seen[0].body
    assert body["preconditions"] == {"uid": "u1"}
    assert body["gracePeriodSeconds"] == 0
    assert body["propagationPolicy"] == "Background"
    assert "gracePeriodSeconds" not in stub.seen[1].body


def page(names, token=""):
    return 200, {"metadata": {"continue": token}, "items": [{"metadata": {"name": n}} for n in names]}


async def test_list_reads_all_pages():
    stub = ApiStub([page(["a", "b"], "next"), page(["c"])])
    async with connected(stub) as kube:
        found = await kube.list(PODS, "ns", labels="x=y", fields="status.phase=Running")
    assert [each["metadata"]["name"] for each in found] == ["a", "b", "c"]
    assert stub.seen[0].query == {
        "limit": "500",
        "labelSelector": "x=y",
        "fieldSelector": "status.phase=Running",
    }
    assert stub.seen[1].query["continue"] == "next"


async def test_list_over_all_namespaces():
    stub = ApiStub([page([])])
    async with connected(stub) as kube:
        assert await kube.list(PODS) == []
    assert stub.seen[0].path == "/api/v1/pods"


async def test_list_whose_rest_is_too_old_begins_anew():
    stub = ApiStub([page(["a"], "next"), (410, status(410, "Expired")), page(["b"], "x"), page(["c"])])
    async with connected(stub) as kube:
        assert [each["metadata"]["name"] for each in await kube.list(PODS)] == ["b", "c"]


async def test_list_that_is_always_too_old_ends():
    stub = ApiStub(default=(410, status(410, "Expired")))
    async with connected(stub) as kube:
        with pytest.raises(Gone):
            await kube.list(PODS)
    assert len(stub.seen) == 3


async def test_answer_that_is_no_json():
    async def html(request):
        return web.Response(text="<html>proxy</html>")

    async with connected(ApiStub([html])) as kube:
        with pytest.raises(KubeError, match="no JSON"):
            await kube.get(PODS, "a")


async def test_refusal_that_is_no_status_is_quoted():
    async def html(request):
        return web.Response(text="blocked by a proxy", status=403)

    async with connected(ApiStub([html])) as kube:
        with pytest.raises(KubeError, match="blocked by a proxy"):
            await kube.get(PODS, "a")


def test_large_answer_is_parsed_without_the_collector(monkeypatch):
    during = []
    loads = json.loads
    monkeypatch.setattr(answers.json, "loads", lambda text: during.append(gc.isenabled()) or loads(text))
    assert gc.isenabled()
    assert answers.parsed(b'{"a": 1}') == {"a": 1}
    assert answers.parsed(json.dumps({"a": "x" * answers._LARGE_BYTES}).encode())["a"].startswith("x")
    with pytest.raises(KubeError):
        answers.parsed(b"x" * (answers._LARGE_BYTES + 1))
    assert during == [True, False, False]
    assert gc.isenabled()


async def test_closed_client_says_so():
    async with connected(ApiStub()) as kube:
        pass
    with pytest.raises(Unreachable, match="closed"):
        await kube.get(PODS, "a")


async def collect(kube, got, silence_s=5.0, params=()):
    async with kube.watch("/api/v1/pods", dict(params), silence_s=silence_s) as events:
        async for event in events:
            got.append(event)


async def test_watch_that_falls_silent_ends():
    async def silent(request):
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b'{"type":"ADDED","object":{"n":1}}\n{"type":"ADD')
        await asyncio.sleep(3600)

    got = []
    async with connected(ApiStub([silent])) as kube:
        with pytest.raises(Unreachable, match="watch of /api/v1/pods"):
            await collect(kube, got, silence_s=0.2)
    assert got == [{"type": "ADDED", "object": {"n": 1}}]


async def test_events_longer_than_any_buffer_and_cut_anywhere():
    big = {"type": "ADDED", "object": {"x": "y" * 300_000}}
    text = (json.dumps(big) + "\n" + json.dumps({"type": "ADDED", "object": {"n": 2}}) + "\n\n").encode()

    async def stream(request):
        answer = web.StreamResponse()
        await answer.prepare(request)
        for start in range(0, len(text), 70_001):
            await answer.write(text[start : start + 70_001])
        return answer

    got, stub = [], ApiStub([stream])
    async with connected(stub) as kube:
        await collect(kube, got, params={"a": "b"})
    assert stub.seen[0].query == {"watch": "1", "a": "b"}
    assert got == [big, {"type": "ADDED", "object": {"n": 2}}]


async def test_watch_tells_of_an_error_in_the_stream():
    async def stream(request):
        answer = web.StreamResponse()
        await answer.prepare(request)
        line = json.dumps({"type": "ERROR", "object": status(410, "Expired", "too old resource version")})
        await answer.write(line.encode() + b"\n")
        return answer

    async with connected(ApiStub([stream])) as kube:
        with pytest.raises(Gone, match="too old"):
            await collect(kube, [])


def test_identity_is_what_the_access_says():
    access = Access("https://x", "ns", "Bearer t", tls=None, server_name="api", proxy="http://p")
    assert module._identity(access, {"a": "b"}) == {
        "headers": {"a": "b", "Authorization": "Bearer t"},
        "server_hostname": "api",
        "proxy": "http://p",
    }
