"""The daemons of a cluster's pods, as far as a broker speaks to them: one server, a state for each address.

A daemon is there from ``begin`` to ``end``, at the address that its pod has; all listen at one port of this
machine, which answers on every address of 127.0.0.0/8. A reset finds what ``residue`` says.
"""

import asyncio
import base64
import json
import secrets
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey


@dataclass
class Daemon:
    config: dict
    boot: str = field(default_factory=lambda: secrets.token_hex(16))
    state: str = "free"
    owner: str = ""
    token: str = ""
    attempt: int = 0
    note: str = ""
    expires: float = 0.0
    incarnation: int = 1
    residue: str = ""
    mute: bool = False
    says_key: str | None = None  # None for the key that it knows

    def see(self):
        if self.state == "leased" and asyncio.get_running_loop().time() >= self.expires:
            self.state = "dirty"

    def knows(self, request):
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        message = f"agentfly-admin:{self.config['member']}:{self.boot}".encode()
        key = Ed25519PublicKey.from_public_bytes(base64.b64decode(self.config["adminKey"]))
        try:
            key.verify(base64.urlsafe_b64decode(given + "=" * (-len(given) % 4)), message)
        except (InvalidSignature, ValueError):
            return False
        return True


@dataclass
class Model:
    """A vLLM server: ``steps`` answers it takes until an abort has had its effect."""

    config: dict
    first_answer: int = 200
    health: int = 200
    steps: int = 0
    mute: bool = False
    seen: list = field(default_factory=list)

    def answer(self, path):
        self.seen.append(path)
        if path == "/health":
            return web.Response(status=self.health)
        if path == "/inference/v1/generate":
            return web.json_response({}, status=self.first_answer)
        if path == "/reset_prefix_cache":
            self.steps -= 1
            return web.json_response({"success": self.steps < 0})
        return web.json_response({})


class Daemons:
    def __init__(self):
        self.port = 0
        self.living: dict[str, Daemon] = {}
        self.requests = 0
        self.asked = []  # method, path, and whether a token came with it
        self.resets_by = {"method": "overlay", "refused": {}}

    def begin(self, address, pod):
        container = pod["spec"]["containers"][0]
        if container["name"] == "model":
            self.living[address] = Model({"member": pod["metadata"]["name"]})
            return self.living[address]
        text = container["env"][0]["value"]
        config = json.loads(text)
        self.living[address] = Daemon(config, incarnation=config["incarnation"])
        return self.living[address]

    def end(self, address):
        self.living.pop(address, None)

    def of(self, member_id):
        return next(each for each in self.living.values() if each.config["member"] == member_id)

    async def handle(self, request):
        self.requests += 1
        self.asked.append((request.method, request.path, "Authorization" in request.headers))
        address = request.transport.get_extra_info("sockname")[0]
        daemon = self.living.get(address)
        if daemon is None:
            request.transport.abort()
            return web.Response()
        if daemon.mute:
            await asyncio.sleep(3600)
        if isinstance(daemon, Model):
            return daemon.answer(request.path)
        daemon.see()
        if request.path == "/healthz":
            return web.json_response(self.health(daemon))
        return await self.answer(daemon, request)

    async def answer(self, daemon, request):
        if not daemon.knows(request):
            return refused(401, "Unauthorized", "authorization: not the owner's")
        left = max(0.0, daemon.expires - asyncio.get_running_loop().time())
        match request.method, request.path:
            case "GET", "/lease":
                held = daemon.state == "leased"
                body = {
                    "state": daemon.state,
                    "incarnation": daemon.incarnation,
                    "owner": daemon.owner or None,
                }
                body |= {"attempt": daemon.attempt, "note": daemon.note if held else ""}
                return web.json_response(body | {"expiresInSeconds": left if held else None})
            case "POST", "/lease":
                return self.lease(daemon, await request.json())
            case "POST", "/reset":
                return self.reset(daemon)
        return web.Response(status=404)

    def health(self, daemon):
        return {
            "state": daemon.state,
            "incarnation": daemon.incarnation,
            "leases": 0,
            "owner": daemon.owner or None,
            "expiresInSeconds": None,
            "idleSeconds": 0.0,
            "version": "test",
            "boot": daemon.boot,
            "member": daemon.config["member"],
            "ownerKey": daemon.config["adminKey"] if daemon.says_key is None else daemon.says_key,
            "reset": self.resets_by,
        }

    @staticmethod
    def lease(daemon, body):
        holder = (daemon.owner, daemon.token)
        if daemon.state == "dirty":
            return refused(409, "Dirty", "lease: must be reset first")
        if daemon.state == "leased" and holder != (body["owner"], body["token"]):
            return refused(409, "Busy", "lease: has another owner")
        daemon.state, daemon.owner, daemon.token = "leased", body["owner"], body["token"]
        daemon.attempt, daemon.note = body["attempt"], body.get("note", "")
        daemon.expires = asyncio.get_running_loop().time() + body["ttlSeconds"]
        return web.json_response({"state": "leased", "incarnation": daemon.incarnation})

    @staticmethod
    def reset(daemon):
        daemon.owner = daemon.token = daemon.note = ""
        if daemon.residue:
            daemon.state = "dirty"
            return web.json_response({"clean": False, "reason": daemon.residue})
        daemon.state, daemon.incarnation = "free", daemon.incarnation + 1
        return web.json_response({"clean": True, "method": "overlay", "incarnation": daemon.incarnation})

    @asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self.handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "0.0.0.0", 0)
            await site.start()
            self.port = site._server.sockets[0].getsockname()[1]
            yield self
        finally:
            await runner.cleanup()


def refused(status, code, message):
    return web.json_response({"error": {"code": code, "message": message}}, status=status)
