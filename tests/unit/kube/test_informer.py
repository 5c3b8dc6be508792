import asyncio
import logging
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.kube import PODS, Informer, Unreachable, trimmed
from agentfly.kube import informer as module
from tests.unit.kube.object_server import ObjectServer, until


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(module, "PAUSES_S", (0.01,))


@asynccontextmanager
async def following(server, **options):
    async with server.serving() as kube, Informer(kube, PODS, "ns", **options) as informer:
        await informer.synced(5)
        yield informer


def names(informer):
    return {obj["metadata"]["name"] for obj in informer.items.values()}


def told(informer):
    """What subscribers are told, as (kind, name) pairs."""
    events = []
    informer.subscribe(lambda kind, obj: events.append((kind, obj["metadata"]["name"])))
    return events


@pytest.fixture(params=[True, False], ids=["one stream", "pages and a watch"])
def server(request):
    return ObjectServer(streams=request.param)


async def test_has_everything_once_it_is_synced(server):
    for n in range(5):
        server.put(f"p{n}")
    async with following(server) as informer:
        assert names(informer) == {f"p{n}" for n in range(5)}
        assert informer.find("p3", "ns")["metadata"]["name"] == "p3"
        assert informer.find("p9", "ns") is None
        assert informer.find("p3", "other") is None


async def test_tells_of_each_change_once_and_in_order(server):
    uid = server.put("a", n=1)
    async with following(server) as informer:
        events = told(informer)
        server.put("a", n=2)
        server.put("b")
        server.delete("a")
        await until(lambda: len(events) == 3)
        assert events == [("MODIFIED", "a"), ("ADDED", "b"), ("DELETED", "a")]
        assert uid not in informer.items
        assert informer.find("a", "ns") is None


async def test_selects_and_asks_for_bookmarks(server):
    async with following(server, labels="a=b", fields="c=d"):
        await until(lambda: server.watching)
    for query in server.queries:
        assert (query["labelSelector"], query["fieldSelector"]) == ("a=b", "c=d")
    for query in server.watches():
        assert query["allowWatchBookmarks"] == "true"
        assert float(query["timeoutSeconds"]) < module.SILENCE_S
    assert sum("watch" not in query for query in server.queries) == (0 if server.streams else 1)


async def test_broken_watch_goes_on_where_it_was(server):
    server.put("a")
    async with following(server) as informer:
        await until(lambda: server.watching)
        events, before = told(informer), len(server.watches())
        server.cut()
        server.put("b")
        server.delete("a")
        await until(lambda: len(events) == 2)
        assert events == [("ADDED", "b"), ("DELETED", "a")]
        assert all("resourceVersion" in query for query in server.watches()[before:])
        assert "sendInitialEvents" not in server.watches()[-1]


async def test_nothing_that_was_deleted_meanwhile_is_left_after_a_new_list(server):
    for n in range(6):
        server.put(f"p{n}")
    async with following(server) as informer:
        await until(lambda: server.watching)
        events = told(informer)
        server.cut()
        for n in range(4):
            server.delete(f"p{n}")
        server.put("p4", changed=True)
        server.put("new")
        server.forget()
        await until(lambda: names(informer) == {"p4", "p5", "new"})
        await until(lambda: len(events) == 6)
        assert sorted(events) == [
            ("ADDED", "new"),
            *[("DELETED", f"p{n}") for n in range(4)],
            ("MODIFIED", "p4"),
        ]


async def test_list_that_breaks_off_drops_nothing_and_is_not_synced():
    server = ObjectServer()
    for n in range(4):
        server.put(f"p{n}")
    async with following(server) as informer:
        events = told(informer)
        server.cut_in_list_after = 2
        server.forget()
        server.version += 1
        server.floor = server.version
        server.cut()
        await until(lambda: server.cut_in_list_after is None and server.watching)
        await asyncio.sleep(0.05)
        assert names(informer) == {f"p{n}" for n in range(4)}
        assert events == []


async def test_is_not_synced_before_the_end_of_the_list():
    server = ObjectServer()
    server.stall_initial = True
    server.put("a")
    async with server.serving() as kube, Informer(kube, PODS, "ns") as informer:
        await until(lambda: names(informer) == {"a"})
        with pytest.raises(Unreachable, match=r"pods could not be listed in 0.05 s"):
            await informer.synced(0.05)


async def test_says_why_it_cannot_list():
    server = ObjectServer()
    server.refusals = [403] * 1000
    async with server.serving() as kube, Informer(kube, PODS, "ns") as informer:
        with pytest.raises(Unreachable, match="refused with 403"):
            await informer.synced(0.2)
        server.refusals.clear()
        await informer.synced(5)


async def test_object_of_the_same_name_is_another_object(server):
    first = server.put("a")
    async with following(server) as informer:
        await until(lambda: server.watching)
        events = told(informer)
        server.cut()
        server.delete("a")
        second = server.put("a")
        server.forget()
        await until(lambda: second in informer.items)
        assert list(informer.items) == [second] != [first]
        assert events == [("DELETED", "a"), ("ADDED", "a")]
        assert informer.find("a", "ns")["metadata"]["uid"] == second


async def test_bookmark_moves_the_version_from_which_it_goes_on(server):
    async with following(server):
        await until(lambda: server.watching)
        server.bookmark()
        server.forget()  # without the bookmark, going on would be refused as too old
        at = str(server.version)
        await asyncio.sleep(0.05)
        count = len(server.queries)
        server.cut()
        await until(lambda: len(server.queries) > count)
        assert server.queries[count]["resourceVersion"] == at


async def test_silent_watch_is_given_up(server, monkeypatch):
    monkeypatch.setattr(module, "SILENCE_S", 0.2)
    async with following(server):
        await until(lambda: server.watching)
        first = len(server.watches())
        await until(lambda: len(server.watches()) >= first + 2)


async def test_error_in_the_stream_means_a_new_list():
    server = ObjectServer()
    server.put("a")
    async with following(server) as informer:
        events = told(informer)
        server.error(500, "InternalError")
        await until(lambda: len(server.watches()) >= 2)
        assert "sendInitialEvents" in server.watches()[1]
        server.put("b")
        await until(lambda: events == [("ADDED", "b")])


async def test_overloaded_server_is_not_asked_for_everything_again():
    server = ObjectServer()
    async with following(server):
        server.refusals = [429, 503]
        server.cut()
        await until(lambda: not server.refusals and server.watching)
        assert ["sendInitialEvents" in query for query in server.watches()] == [True, False, False, False]


async def test_keeps_what_the_projection_returns(server):
    server.put("a", secret="long")
    async with following(server, project=lambda obj: {"metadata": obj["metadata"]}) as informer:
        assert list(informer.items.values()) == [{"metadata": server.objects["a"]["metadata"]}]


def test_trimmed_object_has_no_record_of_managers():
    assert trimmed({"metadata": {"name": "a", "managedFields": [1]}}) == {"metadata": {"name": "a"}}


async def test_subscriber_that_raises_costs_only_its_own_notice(server, caplog):
    async with following(server) as informer:
        informer.subscribe(lambda kind, obj: 1 / 0)
        events = told(informer)
        with caplog.at_level(logging.CRITICAL, logger=module.__name__):
            server.put("a")
            await until(lambda: events == [("ADDED", "a")])


async def test_subscription_ends(server):
    async with following(server) as informer:
        events = []
        end = informer.subscribe(lambda kind, obj: events.append(kind))
        end()
        end()
        later = told(informer)
        server.put("a")
        await until(lambda: later)
        assert events == []


async def test_ends_with_its_block(server):
    async with following(server):
        await until(lambda: server.watching)
    assert not [task for task in asyncio.all_tasks() if "informer" in task.get_name()]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from("abcd")),
        st.tuples(st.just("delete"), st.sampled_from("abcd")),
        st.sampled_from([("cut", ""), ("forget", ""), ("bookmark", ""), ("wait", "")]),
        st.tuples(st.just("refuse"), st.sampled_from([429, 500, 503, 410, 403])),
        st.tuples(st.just("error"), st.sampled_from([410, 500])),
    ),
    max_size=25,
)


@settings(max_examples=30)
@given(ACTIONS, st.booleans())
async def test_whatever_happens_it_ends_with_what_exists(actions, streams):
    server, mirror = ObjectServer(streams=streams), {}

    def follow(kind, obj):
        name = obj["metadata"]["name"]
        if kind == "DELETED":
            assert mirror.pop(name)["metadata"]["uid"] == obj["metadata"]["uid"]
        else:
            assert (kind == "ADDED") == (name not in mirror)
            mirror[name] = obj

    async with following(server) as informer:
        informer.subscribe(follow)
        for action, value in actions:
            match action:
                case "put":
                    server.put(value)
                case "delete" if value in server.objects:
                    server.delete(value)
                case "cut":
                    server.cut()
                case "forget":
                    server.forget()
                case "bookmark":
                    server.bookmark()
                case "refuse":
                    server.refusals.append(value)
                case "error":
                    server.error(value, "Expired")
                case "wait":
                    await asyncio.sleep(0.01)
        await until(
            lambda: {obj["metadata"]["name"]: obj for obj in informer.items.values()} == server.objects
        )
        assert mirror == server.objects
