"""How a pod is, for whoever asks while it runs: ``GET /state`` gives its report.

Guarantees:
1. What is answered is the newest report, as one JSON object that `Report.read` takes.
2. It answers as long as the block lasts, and nothing else than ``/state``.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from agentfly.roles.launch import Report

CLOSE_S = 1.0  # for answers that are on their way


class State:
    """The newest report."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def update(self, **changes: Any) -> Report:
        """Change fields of the report; returns it."""
        self.report = self.report.model_copy(update=changes)
        return self.report


@asynccontextmanager
async def serving(state: State, address: str, port: int) -> AsyncIterator[int]:
    """Answer at this port of an address, 0 for any; gives the port."""

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(text=state.report.model_dump_json(exclude_none=True))

    app = web.Application()
    app.router.add_get("/state", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, address, port).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
