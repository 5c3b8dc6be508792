"""The page for monitors and kubelet.

Guarantees:
1. /healthz is 200 as long as the process does what it is for: leads and watches, or waits to lead.
2. /readyz is 200 once it can: everything is listed, or another one leads.
3. /metrics is Prometheus' text format. Nothing here needs a token, because nothing here is a secret.
"""

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from aiohttp import web

from agentfly_operator.cluster.metrics import Metrics

Check = Callable[[], str]  # what is wrong; "" is nothing


class Web:
    """Serves the page for as long as it is entered.

    Args:
        healthy: what is wrong with the process as a whole.
        ready: what it still waits for.
    """

    def __init__(self, host: str, port: int, metrics: Metrics, healthy: Check, ready: Check) -> None:
        self._host = host
        self._port = port
        self._metrics = metrics
        app = web.Application()
        app.router.add_get("/healthz", self._answer(healthy))
        app.router.add_get("/readyz", self._answer(ready))
        app.router.add_get("/metrics", self._text)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)

    @property
    def port(self) -> int:
        """The one that it listens on; of interest where 0 was asked for."""
        return int(self._runner.addresses[0][1])

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    def _answer(self, check: Check) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(_: web.Request) -> web.Response:
            wrong = check()
            return web.Response(text=wrong or "ok", status=503 if wrong else 200)

        return answer

    async def _text(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), content_type="text/plain")
