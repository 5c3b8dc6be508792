"""HTTP on both sides of the gateway of an external API: what is passed on, and what answers mean.

Guarantees:
1. What is meant for one connection, cookies and the holder's own authorization are passed on in neither
   direction.
2. A path stays below the base URL: it can reach no other host and no parent.
3. Refusals have the shape of OpenAI's errors, ``{"error": {"message", "type", "code", "hints"}}``, with
   ``type`` ``agentfly``: a client can tell them from the API's own.

Not here: sockets (``proxy``).
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from agentfly.resources.errors import StartFailed
from agentfly.resources.runners.external.account import Refused
from agentfly.resources.runners.external.keys import Key
from agentfly.resources.runners.external.limits import Tokens
from agentfly.resources.runners.external.usage import PROMPTS, Mask, estimate

STATUS = {
    "request": 400,  # cannot be passed on
    "lease": 401,  # the token is of no live lease
    "budget": 402,
    "size": 413,  # of the request
    "limited": 429,  # by the API, on every key, for longer than the request may wait
    "failed": 502,  # the API, in every try
    "answer": 502,  # is larger than what is passed on, or a redirect
    "credentials": 502,  # the API takes none of the keys
    "breaker": 503,
    "busy": 503,  # waited for our own limits as long as it may
}
"""Code of a refusal -> status."""

_HOP = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
    *("te", "trailer", "transfer-encoding", "upgrade", "content-length"),
}
_NOT_SENT = _HOP | {"host", "authorization", "api-key", "x-api-key", "cookie", "accept-encoding", "expect"}
_NOT_RETURNED = _HOP | {"set-cookie", "set-cookie2", "content-encoding", "authorization", "server", "date"}
_IDEMPOTENT = {"GET", "HEAD", "OPTIONS", "PUT", "DELETE"}
_PARENT = re.compile(r"(^|[/\\]|%2f|%5c)(\.|%2e){1,2}([/\\]|%2f|%5c|$)", re.IGNORECASE)


class Verdict(StrEnum):
    """What an answer means for the next step."""

    FINAL = "final"  # the holder's, whatever it says
    FAILED = "failed"
    LIMITED = "limited"
    REFUSED = "refused"  # the key is not known
    FORBIDDEN = "forbidden"  # the key, or the request: another key tells
    REDIRECT = "redirect"


def verdict(status: int, *, waits: bool) -> Verdict:
    """What a status means; ``waits`` says that the answer had a ``Retry-After``."""
    if status in (401, 403):
        return Verdict.REFUSED if status == 401 else Verdict.FORBIDDEN
    if status == 429 or (status == 503 and waits):
        return Verdict.LIMITED
    if status in (301, 302, 303, 307, 308):
        return Verdict.REDIRECT
    return Verdict.FAILED if is_failure(status) else Verdict.FINAL


def is_failure(status: int) -> bool:
    """True of answers that count against the API, and not against the request."""
    return status >= 500 or status == 408


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One request as it is sent, but for the key."""

    method: str
    url: URL
    headers: CIMultiDict[str] = field(repr=False)
    body: bytes = field(repr=False)
    estimate: Tokens
    repeatable: bool  # may be sent again though it may have been carried out

    def with_key(self, key: Key) -> CIMultiDict[str]:
        """The headers, with this key."""
        headers = self.headers.copy()
        if key.value:
            headers["Authorization"] = f"Bearer {key.value}"
        return headers


def outgoing(
    base: str, model: str, method: str, path: str, headers: CIMultiDictProxy[str], body: bytes
) -> Outgoing:
    """A holder's request as it goes to the API; ``path`` is as on the wire, with its query.

    Raises:
        Refused: the path leads out of the base URL.
    """
    if not path.startswith("/") or _PARENT.search(path.partition("?")[0]):
        raise Refused("request", f"path: {path[:200]!a} does not stay below the API's base URL")
    if not all(map(_sendable, [path, *headers.values()])):
        raise Refused("request", "path or headers: are not UTF-8")
    parsed = _object(body) if "json" in headers.get("Content-Type", "") else None
    if parsed is not None and model and "model" not in parsed and body.lstrip()[:1] == b"{":
        # Put in, not parsed and written again: the rest stays as the holder wrote it, to the last digit.
        more = b", " if parsed else b""
        body = b'{"model": ' + json.dumps(model).encode() + more + body.lstrip()[1:]
    kept = _without(headers, _NOT_SENT)
    kept["Accept-Encoding"] = "identity"  # a key in a compressed answer could not be found
    prompt = parsed is not None and any(name in parsed for name in PROMPTS)
    repeatable = prompt or method in _IDEMPOTENT or "Idempotency-Key" in headers
    url = URL(base.rstrip("/") + path, encoded=True)
    return Outgoing(method, url, kept, body, estimate(parsed, len(body)), repeatable)


def returned_headers(headers: CIMultiDictProxy[str], mask: Mask) -> CIMultiDict[str]:
    """The headers of an answer as the holder gets them."""
    kept = _without(headers, _NOT_RETURNED)
    return CIMultiDict((name, mask.text(value)) for name, value in kept.items() if _sendable(value))


def refusal(error: Refused) -> web.Response:
    """The answer that says why there is no answer of the API."""
    body = {"message": error.message, "type": "agentfly", "code": error.code, "hints": list(error.hints)}
    response = web.json_response({"error": body}, status=STATUS[error.code])
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    return response


def check_base_url(base: str) -> None:
    """Refuse a base URL to which no path can be added, or that holds what belongs into ``credentials``.

    Raises:
        StartFailed: without the URL itself, which may hold a password.
    """
    try:
        url = URL(base)
        bad = url.host is None or url.user or url.password or url.query_string or url.fragment
    except ValueError:
        bad = True
    if bad:
        raise StartFailed(
            "base_url: is not just a scheme, a host, perhaps a port, and a path",
            hints=("keep it like https://host/v1, and put the key where one of credentials points",),
        )


def _without(headers: CIMultiDictProxy[str], dropped: Iterable[str]) -> CIMultiDict[str]:
    named = {name.strip().lower() for value in headers.getall("Connection", []) for name in value.split(",")}
    gone = named.union(dropped)
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in gone)


def _sendable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes that aiohttp could not decode, and will not encode
        return False
    return True


def _object(body: bytes) -> dict[str, object] | None:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def bearer(headers: Mapping[str, str]) -> str:
    """The token of a holder's request, "" if it has none."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
