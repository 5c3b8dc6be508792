"""Calling the object of an in-process member, wherever it lives.

Guarantees:
1. Arguments and results are JSON. What the object raised is ``CallRaised``, with the type's name.
2. No answer is ``Infra``, a lost lease ``LeaseLost``. A call is never sent twice: it may have had its effect.
3. Calls of one object happen one after the other, in the order in which they reach it.
"""

import json
from typing import Any

import aiohttp

from agentfly.resources.errors import CallRaised, Infra, LeaseLost, ResourceError

DEADLINE_S = 600.0  # beyond any sensible callTimeoutSeconds, whose own answer says more


class InstanceClient:
    """The object of a lease. ``address`` is ``unix:///path`` or a URL, ``token`` that of the lease."""

    def __init__(self, address: str, token: str) -> None:
        self._address, self._token = address, token
        self._base = "http://instance" if address.startswith("unix://") else address
        self._session: aiohttp.ClientSession | None = None

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What the object's method returns for these arguments.

        Raises:
            CallRaised, LeaseLost, Infra.
        """
        body = {"method": method, "args": args, "kwargs": kwargs}
        answer = await self.request("POST", "/call", body, within=DEADLINE_S)
        return answer["value"]

    async def request(self, method: str, path: str, body: Any = None, *, within: float) -> Any:
        """One request to the instance's server, its errors as ours."""
        if self._session is None:
            connector = (
                aiohttp.UnixConnector(self._address.removeprefix("unix://"))
                if self._address.startswith("unix://")
                else aiohttp.TCPConnector()
            )
            self._session = aiohttp.ClientSession(
                connector=connector, headers={"Authorization": f"Bearer {self._token}"}
            )
        try:
            timeout = aiohttp.ClientTimeout(total=within)
            async with self._session.request(
                method, self._base + path, json=body, timeout=timeout
            ) as response:
                received = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Infra(
                f"instance {self._address}: {path}: {str(error) or type(error).__name__}",
                hints=["its process may have died; release it and acquire again"],
            ) from error
        if response.status == 200:
            return json.loads(received)
        raise _error(received, response.status)

    async def close(self) -> None:
        """Hang up. Idempotent; a later call connects again."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _error(received: bytes, status: int) -> ResourceError:
    try:
        answer = json.loads(received)
        message, hints = answer["message"], answer["hints"]
    except (ValueError, KeyError, TypeError):
        return Infra(f"instance: answered {status}: {received[:200].decode(errors='replace')}")
    if answer["code"] == "CallRaised":
        return CallRaised(message, type_name=answer["type_name"], hints=hints)
    return LeaseLost(message, hints=hints) if answer["code"] == "LeaseLost" else Infra(message, hints=hints)
