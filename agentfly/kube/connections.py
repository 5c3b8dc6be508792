"""TCP connections that notice by themselves that the other side is gone.

Guarantees:
1. A connection over which no packet comes back is closed by the kernel after about ``IDLE_S`` plus three
   times ``PROBE_S`` seconds, whether something was sent or not.
"""

import socket

import aiohttp
from aiohttp.connector import AddrInfoType

IDLE_S = 10
PROBE_S = 5
_OPTIONS = {"TCP_KEEPIDLE": IDLE_S, "TCP_KEEPINTVL": PROBE_S, "TCP_KEEPCNT": 3}


def connector(limit: int, *, dns_s: int = 10) -> aiohttp.TCPConnector:
    """A pool of at most ``limit`` connections; 0 is any number.

    Args:
        dns_s: seconds after which a name is looked up again.
    """
    return aiohttp.TCPConnector(limit=limit, ttl_dns_cache=dns_s, socket_factory=_socket)


def _socket(address: AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        if hasattr(socket, name):  # Linux has all of them
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (IDLE_S + 3 * PROBE_S))
    return made
