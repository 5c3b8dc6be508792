"""Passes requests of holders on to an external API, and its answers back.

Guarantees:
1. Each try takes ``timeout_s`` at most, with the whole answer, and so do all waits of a request together:
   a request that waited long for our own limits has as much time there as any.
2. What failed there is tried again, up to ``max_retries`` times, until the answer has begun to reach the
   holder: connections that fail, 5xx and 408, 429, answers that are lost. One that may have been carried out
   is sent again only if that is safe: a prompt, an idempotent method, or an ``Idempotency-Key``. Each try
   counts in the budget.
3. A try that leads to another key is no retry; there is one for each key at most.
4. 401 sets a key aside for good. 403 does so only if another key then opens the same request; if none does,
   the 403 is the request's own, and the holder's to see.
5. Answers are passed on as they come, so memory does not grow with them; small JSON answers are passed on
   when they are whole. One that breaks off, there or at ``ANSWER_MAX``, breaks off for the holder too.
6. A holder that goes away ends its request there, and frees its place.
7. No redirect is followed. Cookies are kept for nobody. A key that the API sends back is masked.

Not here: leases (``api``), order and limits (``gate``).
"""

import asyncio
import logging
import random
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from agentfly.resources.runners.external import limits as external_limits
from agentfly.resources.runners.external import usage as external_usage
from agentfly.resources.runners.external.account import Refused
from agentfly.resources.runners.external.gate import Gate, Pass
from agentfly.resources.runners.external.keys import Key
from agentfly.resources.runners.external.usage import Mask
from agentfly.resources.runners.external.wire import (
    Outgoing,
    Verdict,
    is_failure,
    outgoing,
    returned_headers,
    verdict,
)
from agentfly.resources.spec import ExternalAPISpec

logger = logging.getLogger(__name__)

ANSWER_MAX = 256 << 20  # bytes: embeddings of a large batch, and no endless stream
WHOLE_MAX = 256 << 10  # bytes of a JSON answer that is passed on when it is whole, so that it can be retried
CONNECT_S = 10.0  # longest wait for a connection: name, route, TLS
IDLE_S = 4.0  # servers close idle connections after 5 s: a request on a closed one would count as lost
QUOTE_MAX = 300  # bytes of the API's error in ours


class TornError(Exception):
    """The answer broke off after a part of it had reached the holder."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """A try without an answer for the holder: how it failed, and what is to be done about it."""

    verdict: Verdict
    text: str
    wait: float | None = None  # what the API asked for, in seconds
    carried_out: bool = False  # perhaps


@dataclass(slots=True)
class _Progress:
    sent: bool = False  # a part of the request may have reached the API


def client() -> aiohttp.ClientSession:
    """What sends the requests of a proxy."""

    async def sent(session: aiohttp.ClientSession, context: Any, params: object) -> None:
        context.trace_request_ctx.sent = True

    trace = aiohttp.TraceConfig()
    trace.on_request_headers_sent.append(sent)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),  # the gate limits
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent",),
        trace_configs=[trace],
    )


class Answering:
    """The answer to one request of a holder. ``begun`` is None until a part of it was sent.

    ``prefix`` is what its path begins with, of which the API knows nothing.
    """

    def __init__(self, request: web.Request, prefix: str = "") -> None:
        self.request = request
        self.path = request.raw_path.removeprefix(prefix)
        self.begun: web.StreamResponse | None = None

    async def write(self, like: web.StreamResponse, chunk: bytes) -> None:
        """Send a piece, after the status and headers of ``like``."""
        if self.begun is None:
            self.begun = like
            await like.prepare(self.request)
        await like.write(chunk)

    def tear(self) -> None:
        """Break off, so that the holder cannot take what it has for the whole."""
        if self.request.transport is not None:
            self.request.transport.close()


class Proxy:
    """The way of requests to one API."""

    def __init__(self, spec: ExternalAPISpec, gate: Gate, session: aiohttp.ClientSession) -> None:
        self._spec = spec
        self._gate = gate
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S)

    async def forward(self, answering: Answering) -> web.StreamResponse:
        """The API's answer to a holder's request.

        Raises:
            Refused: there is none.
            TornError: the answer began, and will not end.
        """
        request = answering.request
        try:
            async with asyncio.timeout(self._spec.timeout_s):
                body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise Refused("size", "the request is larger than what is passed on") from None
        except TimeoutError:
            raise Refused("request", f"did not come whole in {self._spec.timeout_s:g} s") from None
        except web.RequestPayloadError as error:
            raise Refused("request", f"is not HTTP: {error}") from None
        out = outgoing(
            self._spec.base_url, self._spec.model, request.method, answering.path, request.headers, body
        )
        with self._gate.request(out.estimate, self._spec.timeout_s) as admission:
            return await self._tries(answering, out, admission)

    async def _tries(self, answering: Answering, out: Outgoing, admission: Pass) -> web.StreamResponse:
        used: set[str] = set()
        forbidden: list[Key] = []
        retries = 0
        while True:
            key = await admission.admitted()
            fresh = key.reference not in used
            used.add(key.reference)
            result = await self._try(answering, out, key, admission)
            if isinstance(result, web.StreamResponse):
                if result.status < 400:
                    for other in forbidden:
                        await admission.refused(other)
                return result
            tries = retries + 1
            pause = external_limits.backoff(tries, random.random())
            if result.verdict is Verdict.FORBIDDEN:
                forbidden.append(key)
                continue
            if result.verdict is Verdict.REFUSED:
                await admission.refused(key)
                continue
            if result.verdict is Verdict.LIMITED:
                admission.limited(key, pause if result.wait is None else result.wait)
                pause = 0.0
                if fresh and self._gate.account.keys.pick(_now(), used) is not None:
                    continue
            logger.info("try %d of %s %s: %s", tries, out.method, out.url.path, result.text)
            final = retries == self._spec.max_retries or (result.carried_out and not out.repeatable)
            if final or not await admission.pause(pause):
                raise _gave_up(result, tries)
            retries += 1

    async def _try(
        self, answering: Answering, out: Outgoing, key: Key, admission: Pass
    ) -> web.StreamResponse | _Failed:
        """One try, which is settled however it ends: what is known of its cost, and of the API."""
        mask = Mask([key.value, *self._gate.account.keys.values])
        code, tail = 200, bytearray()  # what was seen of the answer; without any, it may have been a good one
        ok: bool | None = None
        progress = _Progress()
        try:
            async with (
                asyncio.timeout(self._spec.timeout_s),
                self._session.request(
                    out.method,
                    out.url,
                    headers=out.with_key(key),
                    data=out.body or None,
                    allow_redirects=False,
                    timeout=self._timeout,
                    trace_request_ctx=progress,
                ) as answer,
            ):
                code = answer.status
                ok = not is_failure(code)
                waits = external_limits.retry_after(
                    answer.headers.get("Retry-After"), answer.headers.get("Date"), time.time()
                )
                meaning = verdict(code, waits=waits is not None)
                if meaning is Verdict.FORBIDDEN and not admission.skip(key):
                    meaning = Verdict.FINAL
                if meaning is Verdict.FINAL:
                    return await self._deliver(answering, answer, mask, tail)
                if meaning is Verdict.REFUSED and not key.value:
                    raise Refused(
                        "credentials", "the API asks for a key", hints=("add credentials to the pool",)
                    )
                if meaning is Verdict.REDIRECT:
                    raise _redirected(answer, mask)
                return _Failed(meaning, await _quoted(answer, mask), waits, meaning is Verdict.FAILED)
        except (aiohttp.ClientError, OSError) as error:
            late = isinstance(error, TimeoutError)
            ok = (
                None if late and ok is not None else False
            )  # an answer that takes long may wait for its reader
            if not progress.sent:
                return _Failed(Verdict.FAILED, f"no connection: {_why(error, mask)}")
            text = f"no whole answer in {self._spec.timeout_s:g} s" if late else _why(error, mask)
            if answering.begun is not None:
                raise TornError(text) from None
            return _Failed(Verdict.FAILED, f"its answer was lost: {text}", carried_out=True)
        except _HolderGoneError as error:
            raise TornError("the holder went away") from error.__cause__
        finally:
            used = external_usage.used(code, bytes(tail), out.estimate) if progress.sent else None
            admission.settle(used=used, ok=ok)

    async def _deliver(
        self, answering: Answering, answer: aiohttp.ClientResponse, mask: Mask, tail: bytearray
    ) -> web.StreamResponse:
        """Pass an answer on, and keep its end in ``tail``, also if it is cut short."""
        headers = returned_headers(answer.headers, mask)
        streamed = web.StreamResponse(status=answer.status, headers=headers)
        together = WHOLE_MAX if answer.content_type == "application/json" else 0
        size, ready = 0, bytearray()
        async for chunk in answer.content.iter_any():
            size += len(chunk)
            if size > ANSWER_MAX:
                raise Refused("answer", f"the answer has more than {ANSWER_MAX} bytes")
            tail += chunk
            del tail[: -external_usage.TAIL]
            ready += mask.feed(chunk)
            if ready and len(ready) > together:
                await self._write(answering, streamed, ready)
                together = 0
        ready += mask.end()
        if answering.begun is None:
            return web.Response(status=answer.status, headers=headers, body=bytes(ready))
        await self._write(answering, streamed, ready)
        return streamed

    async def _write(self, answering: Answering, streamed: web.StreamResponse, ready: bytearray) -> None:
        try:
            await answering.write(streamed, bytes(ready))
        except (ConnectionError, aiohttp.ClientError) as error:
            raise _HolderGoneError from error
        ready.clear()


class _HolderGoneError(Exception):
    """The holder does not take its answer any more."""


def _gave_up(result: _Failed, tries: int) -> Refused:
    tried = "1 try" if tries == 1 else f"{tries} tries"
    code = "limited" if result.verdict is Verdict.LIMITED else "failed"
    return Refused(code, f"the API failed in {tried}: {result.text}", retry_after=result.wait)


async def _quoted(answer: aiohttp.ClientResponse, mask: Mask) -> str:
    """The status, and the beginning of the body."""
    text = mask.feed(await answer.content.read(4 * QUOTE_MAX)).decode(errors="replace")
    return f"it answered {answer.status}: {' '.join(text.split())[:QUOTE_MAX]}"


def _redirected(answer: aiohttp.ClientResponse, mask: Mask) -> Refused:
    where = mask.text(answer.headers.get("Location", "nowhere"))[:QUOTE_MAX]
    return Refused(
        "answer",
        f"the API redirects to {where}; a key follows no redirect",
        hints=("set baseUrl of the pool to the address that answers",),
    )


def _why(error: BaseException, mask: Mask) -> str:
    return f"{type(error).__name__}: {mask.text(str(error))[:QUOTE_MAX]}".rstrip(": ")


def _now() -> float:
    return asyncio.get_running_loop().time()
