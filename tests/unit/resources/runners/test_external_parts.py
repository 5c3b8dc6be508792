"""Keys, tokens, masks and headers of external APIs, by the guarantees of their modules."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from agentfly.resources.errors import StartFailed
from agentfly.resources.runners.external import keys as external_keys
from agentfly.resources.runners.external.account import Refused
from agentfly.resources.runners.external.keys import ANONYMOUS, Key, Keys, read_keys
from agentfly.resources.runners.external.limits import Tokens
from agentfly.resources.runners.external.usage import (
    OUTPUT_GUESS,
    TAIL,
    TOKENS_MAX,
    Mask,
    estimate,
    used,
)
from agentfly.resources.runners.external.wire import (
    STATUS,
    Outgoing,
    Verdict,
    bearer,
    check_base_url,
    outgoing,
    refusal,
    returned_headers,
    verdict,
)

A, B = Key("env:A", "value-a"), Key("env:B", "value-b")


def two_keys() -> Keys:
    keys = Keys(["env:A", "env:B"])
    keys.know({"env:A": "value-a", "env:B": "value-b"})
    return keys


# Keys.


def test_first_key_that_is_not_set_aside_is_used():
    keys = two_keys()
    assert keys.pick(0.0) == A
    keys.limit(A, 10.0)
    assert (keys.pick(0.0), keys.pick(10.0)) == (B, A)
    keys.refuse(A)
    assert keys.pick(10.0) == B
    keys.limit(B, 20.0)
    assert (keys.pick(10.0), keys.ready_at(10.0)) == (None, 20.0)
    keys.refuse(B)
    assert keys.ready_at(10.0) == math.inf


def test_shorter_time_does_not_end_a_longer_one():
    keys = two_keys()
    keys.limit(A, 10.0)
    keys.limit(A, 5.0)
    assert keys.pick(7.0) == B


def test_new_value_is_a_new_key_and_the_verdict_on_the_old_one_says_nothing_of_it():
    keys = two_keys()
    keys.refuse(A)
    keys.limit(B, 99.0)
    keys.know({"env:A": "value-c", "env:B": "value-b"})
    assert keys.pick(0.0) == Key("env:A", "value-c")
    assert keys.states(0.0) == {"env:A": "ready", "env:B": "limited"}
    keys.refuse(A)
    keys.limit(A, 99.0)
    assert keys.pick(0.0) == Key("env:A", "value-c"), "what was in flight with the old value"


def test_reference_that_cannot_be_read_keeps_its_value():
    keys = two_keys()
    keys.know({"env:B": "value-b"})
    assert keys.pick(0.0) == A
    assert Keys(["env:A"]).states(0.0) == {"env:A": "missing"}


def test_without_references_there_is_one_key_that_is_none():
    keys = Keys([])
    assert keys.pick(0.0) == Key(ANONYMOUS, "")
    assert (keys.references, keys.values) == ([], [])


def test_no_repr_shows_a_value():
    assert "value-a" not in repr((A, two_keys(), two_keys()._places))


def test_references_are_read_and_what_is_wrong_is_named(tmp_path, monkeypatch):
    def file(name: str, data: bytes) -> str:
        (tmp_path / name).write_bytes(data)
        return f"file:{tmp_path / name}"

    monkeypatch.setenv("A", " value-a\n")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("NONE", raising=False)
    good = file("good", b"value-b\n")
    bad = {
        "env:NONE": "is not set",
        "env:EMPTY": "is empty",
        f"file:{tmp_path}/none": "No such file or directory",
        f"file:{tmp_path}": "Is a directory",
        file("lines", b"a\nHost: evil"): "is not a key",
        file("binary", b"\xff\xfe"): "is not text",
        file("long", b"x" * (external_keys.KEY_MAX + 10)): "is not a key",
    }
    values, faults = read_keys(["env:A", good, *bad])
    assert values == {"env:A": "value-a", good: "value-b"}
    assert len(faults) == len(bad)
    for fault, (reference, what) in zip(faults, bad.items(), strict=True):
        assert fault.startswith(f"{reference}: {what}")


# Tokens.


@pytest.mark.parametrize(
    ("body", "size", "tokens"),
    [
        (None, 4000, Tokens(0, 0)),
        ({"messages": [], "max_tokens": 7}, 401, Tokens(101, 7)),
        ({"messages": [], "max_completion_tokens": 8, "max_tokens": 7}, 4, Tokens(1, 8)),
        ({"input": "a", "max_output_tokens": 9}, 4, Tokens(1, 9)),
        ({"prompt": "a", "max_tokens": 7, "n": 3}, 4, Tokens(1, 21)),
        ({"messages": []}, 4, Tokens(1, OUTPUT_GUESS)),
        ({"input": "a"}, 4, Tokens(1, 0)),
        ({"messages": [], "max_tokens": 10**30}, 4, Tokens(1, TOKENS_MAX)),
        ({"messages": [], "max_tokens": -5, "n": True}, 4, Tokens(1, OUTPUT_GUESS)),
        ({"messages": [], "max_tokens": 1.5, "n": "x"}, 10**9, Tokens(TOKENS_MAX, OUTPUT_GUESS)),
    ],
)
def test_estimate_is_the_prompt_and_what_the_answer_may_have(body, size, tokens):
    assert estimate(body, size) == tokens


ESTIMATED = Tokens(100, 50)
OPENAI = {"usage": {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached": 1}}}
STREAM = (
    b'data: {"type": "message_start", "message": {"usage": {"input_tokens": 25, "output_tokens": 1}}}\n\n'
    b'data: {"usage": null}\n\n'
    b'data: {"type": "message_delta", "usage": {"output_tokens": 15}}\n\n'
)


@pytest.mark.parametrize(
    ("status", "answer", "tokens"),
    [
        (200, json.dumps(OPENAI).encode(), Tokens(3, 4)),
        (
            200,
            json.dumps({"response": {"usage": {"input_tokens": 5, "output_tokens": 6}}}).encode(),
            Tokens(5, 6),
        ),
        (
            200,
            json.dumps({"data": [], "usage": {"prompt_tokens": 8, "total_tokens": 8}}).encode(),
            Tokens(8, 0),
        ),
        (200, STREAM, Tokens(25, 15)),
        (200, b"x" * 100 + json.dumps(OPENAI).encode(), Tokens(3, 4)),
        (200, json.dumps({"content": 'he said "usage": {"prompt_tokens": 9}'}).encode(), ESTIMATED),
        (200, b'{"usage": {"prompt_tokens": -1, "completion_tokens": true}}', ESTIMATED),
        (200, b'{"usage": {"prompt_tokens": 1, "compl', ESTIMATED),
        (200, b'{"usage": ' + b'{"a":' * 30_000, ESTIMATED),
        (200, b"\xff\xfe", ESTIMATED),
        (200, b"", ESTIMATED),
        (400, b'{"error": {}}', Tokens(0, 0)),
        (500, json.dumps(OPENAI).encode(), Tokens(3, 4)),
    ],
)
def test_used_is_what_the_answer_says(status, answer, tokens):
    assert used(status, answer[-TAIL:], ESTIMATED) == tokens


def test_answer_to_what_was_no_prompt_costs_nothing():
    assert used(200, json.dumps(OPENAI).encode(), Tokens()) == Tokens()


# Masks.

SECRET = "abcabcabd"


@given(st.lists(st.text("abcd", max_size=12), max_size=12), st.data())
@settings(deadline=None)
def test_masked_stream_never_has_the_secret_and_nothing_else_is_changed(pieces, data):
    text = SECRET.join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b].encode() for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    mask = Mask([SECRET, "short"])
    got = b"".join([*map(mask.feed, parts), mask.end()]).decode()
    assert got == text.replace(SECRET, "***")


def test_nothing_is_kept_back_but_the_beginning_of_a_secret():
    mask = Mask([SECRET])
    assert mask.feed(b"data: 1\n\n") == b"data: 1\n\n"
    assert mask.feed(b"data: abcab") == b"data: "
    assert mask.feed(b"\n\n") == b"abcab\n\n"


def test_placeholders_are_not_secrets():
    mask = Mask(["EMPTY"])
    assert mask.feed(b"the box is EMPTY") == b"the box is EMPTY"


# HTTP.


def sent(
    path: str = "/chat", body: bytes = b"", method: str = "POST", model: str = "", **headers: str
) -> Outgoing:
    named = CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()})
    return outgoing("https://api/v1/", model, method, path, CIMultiDictProxy(named), body)


@pytest.mark.parametrize(
    "path", ["/chat", "/chat?a=%2e%2e/x&b=..", "/a%20b", "/..a/b..", "/.well-known/x", "//x"]
)
def test_path_is_put_below_the_base_url(path):
    assert str(sent(path).url) == f"https://api/v1{path}"


@pytest.mark.parametrize(
    "path", ["", "@evil/", "http://evil/", "/..", "/a/../b", "/./a", "/%2E%2e/a", "/a%2F..%2fb", "/a%5c..\\b"]
)
def test_path_that_leads_elsewhere_is_refused(path):
    with pytest.raises(Refused) as error:
        sent(path)
    assert error.value.code == "request"


def test_bytes_that_are_no_text_are_refused_and_not_returned():
    for bad in ({"path": "/\udcff"}, {"X_Mine": "\udcff"}):
        with pytest.raises(Refused, match="not UTF-8"):
            sent(**bad)
    headers = CIMultiDictProxy(CIMultiDict({"X-Bad": "\udcff", "X-Good": "ü"}))
    assert dict(returned_headers(headers, Mask([]))) == {"X-Good": "ü"}


def test_headers_of_the_connection_and_of_the_holder_are_dropped():
    out = sent(
        Connection="close, X-Hop",
        X_Hop="1",
        Host="here",
        Cookie="a=b",
        Authorization="Bearer token",
        Api_Key="token",
        Transfer_Encoding="chunked",
        Accept="*/*",
    )
    assert dict(out.headers) == {"Accept": "*/*", "Accept-Encoding": "identity"}
    assert out.with_key(A)["Authorization"] == "Bearer value-a"
    assert "Authorization" not in out.with_key(Key(ANONYMOUS, ""))
    assert "value-a" not in repr(out)


JSON = {"Content_Type": "application/json; charset=utf-8"}


@pytest.mark.parametrize(
    ("body", "headers", "arrives"),
    [
        (b' {"n": 1.000000000000000001, "n": 2}', JSON, b'{"model": "j", "n": 1.000000000000000001, "n": 2}'),
        (b"{}", JSON, b'{"model": "j"}'),
        (b'{"model": "k"}', JSON, b'{"model": "k"}'),
        (b'{"model": null}', JSON, b'{"model": null}'),
        (b"[{}]", JSON, b"[{}]"),
        (b"{", JSON, b"{"),
        (b"[" * 200_000, JSON, b"[" * 200_000),
        (b"{}", {"Content_Type": "text/plain"}, b"{}"),
        ('{"n": 1}'.encode("utf-16"), JSON, '{"n": 1}'.encode("utf-16")),
    ],
)
def test_model_is_put_into_an_object_without_one_and_the_rest_stays(body, headers, arrives):
    assert sent(body=body, model="j", **headers).body == arrives


@pytest.mark.parametrize(
    ("repeatable", "method", "body", "headers"),
    [
        (True, "POST", b'{"messages": []}', JSON),
        (True, "POST", b'{"input": ""}', JSON),
        (True, "GET", b"", {}),
        (True, "POST", b"", {"Idempotency_Key": "1"}),
        (False, "POST", b'{"input_file_id": "f"}', JSON),
        (False, "POST", b"file", {}),
        (False, "PATCH", b"", {}),
    ],
)
def test_what_may_be_sent_again_though_it_may_have_been_carried_out(repeatable, method, body, headers):
    assert sent(method=method, body=body, **headers).repeatable is repeatable


@pytest.mark.parametrize(
    ("status", "waits", "meaning"),
    [
        *[(status, False, Verdict.FINAL) for status in (200, 204, 304, 400, 404, 409, 413, 422)],
        *[(status, False, Verdict.FAILED) for status in (408, 500, 502, 503, 504, 529)],
        (401, False, Verdict.REFUSED),
        (403, False, Verdict.FORBIDDEN),
        (429, False, Verdict.LIMITED),
        (503, True, Verdict.LIMITED),
        (500, True, Verdict.FAILED),
        (307, False, Verdict.REDIRECT),
    ],
)
def test_verdict_on_an_answer(status, waits, meaning):
    assert verdict(status, waits=waits) is meaning


def test_refusal_has_the_shape_of_the_api_s_own_errors():
    response = refusal(Refused("breaker", "left alone", retry_after=3.2, hints=("wait",)))
    assert (response.status, response.headers["Retry-After"]) == (STATUS["breaker"], "4")
    assert json.loads(response.body) == {
        "error": {"message": "left alone", "type": "agentfly", "code": "breaker", "hints": ["wait"]}
    }


@pytest.mark.parametrize(
    "base",
    [
        "https://user:hunter2@api/v1",
        "https://api/v1?key=hunter2",
        "https://api/#hunter2",
        "https://",
        "https://[hunter2",
    ],
)
def test_base_url_with_more_than_a_place_is_refused_without_showing_it(base):
    with pytest.raises(StartFailed) as error:
        check_base_url(base)
    assert "hunter2" not in error.value.render()


@pytest.mark.parametrize(
    ("header", "token"),
    [("Bearer t", "t"), ("bearer  t ", "t"), ("Basic t", ""), ("t", ""), ("", "")],
)
def test_bearer_token_of_a_holder(header, token):
    assert bearer({"Authorization": header}) == token
