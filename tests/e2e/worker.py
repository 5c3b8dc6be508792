"""A program that does in a worker pod what a test asks for over HTTP, with agentfly's image.

POST / takes {"do": NAME, ...} and answers {"is": ...}, or {"error": TYPE, "message": TEXT}.

Guarantees:
1. A lease is held, and renewed, until it is released or this program ends, however the asker fares.
2. The load is loops that acquire, look for what an earlier holder left, leave something, and release; each
   trace of another holder, each lease that was lost, and each acquire that failed is in its report.
"""

import asyncio
import dataclasses
import os
import random
import sys
from typing import Any

from aiohttp import web

from agentfly.broker.client import BrokerClient
from agentfly.errors import AgentflyError
from agentfly.resources.lease import Lease

PORT = 9000
MARKS = "/tmp/mark /workspace/mark /var/tmp/mark"
LOOK = f"for f in {MARKS}; do test -e $f && cat $f; done; true"
PATIENCE_S = 120.0


def leave(mark: str) -> str:
    """A command that leaves a mark wherever one can be left, and a process."""
    return f"for f in {MARKS}; do echo {mark} >$f; done 2>/dev/null; (setsid sleep 900 &) ; cat /tmp/mark"


class Worker:
    """The leases of this pod, by owner."""

    def __init__(self) -> None:
        self._client = BrokerClient(os.environ["AGENTFLY_BROKER"])
        self._held: dict[str, Lease] = {}
        self._load: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._report: dict[str, Any] = {}

    async def answer(self, request: web.Request) -> web.Response:
        """One request."""
        body = await request.json()
        try:
            return web.json_response({"is": await getattr(self, "do_" + body.pop("do"))(**body)})
        except Exception as error:
            return web.json_response({"error": type(error).__name__, "message": str(error)})

    async def do_acquire(self, pool: str, owner: str, **more: Any) -> dict[str, Any]:
        """Acquires; the LeaseInfo."""
        lease = self._held[owner] = await self._client.acquire(pool, owner, **more)
        return lease.info.model_dump()

    async def do_exec(self, owner: str, command: str, **more: Any) -> dict[str, Any]:
        return dataclasses.asdict(await self._held[owner].sandbox.exec(command, **more))

    async def do_info(self, owner: str) -> dict[str, Any]:
        return {**self._held[owner].info.model_dump(), "lost": self._held[owner].lost}

    async def do_call(self, owner: str, method: str, args: list[Any]) -> Any:
        return await self._held[owner].instance.call(method, *args)

    async def do_reset(self, owner: str) -> dict[str, Any]:
        await self._held[owner].reset()
        return self._held[owner].info.model_dump()

    async def do_demand(self, pool: str, wanted: dict[str, int], owner: str) -> None:
        await self._client.demand(pool, wanted, owner)

    async def do_release(self, owner: str, dirty: bool = False) -> None:
        await self._held.pop(owner).release(dirty=dirty)

    async def do_renew(self) -> dict[str, bool]:
        """Renews all that is held: owner -> whether it lives."""
        ids = {lease.info.lease_id: owner for owner, lease in self._held.items()}
        alive = await self._client.heartbeat(list(ids))
        return {ids[lease_id]: lives for lease_id, lives in alive.items()}

    async def do_pools(self) -> Any:
        return {name: status.model_dump() for name, status in (await self._client.status()).items()}

    async def do_leases(self) -> Any:
        return [lease.model_dump() for lease in await self._client.leases()]

    async def do_load(self, pool: str, loops: int, prefix: str = "load") -> None:
        """Starts a load, whose report begins anew."""
        self._stopping.clear()
        self._report = {"rounds": 0, "found": [], "lost": [], "failed": []}
        self._load = [
            asyncio.create_task(self._rounds(pool, f"{prefix}-{number}")) for number in range(loops)
        ]

    async def do_report(self) -> dict[str, Any]:
        return self._report

    async def do_rest(self) -> dict[str, Any]:
        """Lets each loop end its round; the report."""
        self._stopping.set()
        await asyncio.wait_for(asyncio.gather(*self._load), PATIENCE_S)
        return self._report

    async def _rounds(self, pool: str, name: str) -> None:
        number = 0
        while not self._stopping.is_set():
            number += 1
            try:
                await self._round(pool, f"{name}-{number}")
                self._report["rounds"] += 1
            except AgentflyError as error:
                self._report["failed"].append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.2)

    async def _round(self, pool: str, owner: str) -> None:
        lease = await self._client.acquire(pool, owner, deadline=PATIENCE_S)
        async with lease:
            try:
                if found := (await lease.sandbox.exec(LOOK)).stdout:
                    self._report["found"].append(f"{owner} on {lease.info.member_id} found {found!r}")
                await lease.sandbox.exec(leave(owner))
                await asyncio.sleep(random.uniform(0.1, 0.6))
                said = (await lease.sandbox.exec("cat /tmp/mark")).stdout.strip()
                if said != owner:
                    self._report["lost"].append(f"{owner} on {lease.info.member_id}: its mark is {said!r}")
            except AgentflyError as error:
                self._report["lost"].append(
                    f"{owner} on {lease.info.member_id}: {type(error).__name__}: {error}"
                )


async def main() -> None:
    """Serves until it is killed."""
    app = web.Application()
    app.router.add_post("/", Worker().answer)
    app.router.add_get("/", lambda _: asyncio.sleep(0, web.Response(text="here")))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", PORT).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
