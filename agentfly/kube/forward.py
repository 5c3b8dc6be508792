"""One HTTP request to a port of a pod, by the way of ``kubectl port-forward``.

Guarantees:
1. The API server asks the pod's node, which connects from inside the pod: no NetworkPolicy has a say, and
   nobody else can use the connection.
2. It is over by its deadline, with the whole answer or an error.
"""

import asyncio
import http.client
import io
from collections.abc import Mapping

import aiohttp

from agentfly.kube.client import Kube
from agentfly.kube.errors import Unreachable
from agentfly.kube.resources import PODS

PROTOCOL = "v4.channel.k8s.io"
_DATA, _ERROR = 0, 1  # the channels of the one port
_PREFACE = 2  # bytes: each channel begins with the number of its port


async def get_from_pod(
    kube: Kube, namespace: str, pod: str, port: int, path: str, headers: Mapping[str, str], deadline_s: float
) -> tuple[int, bytes]:
    """Status and body of what a pod answers to a GET.

    Raises:
        NotFound, KubeError: the API server refuses.
        Unreachable: there was no whole answer in time.
    """
    what = f"port {port} of pod {pod}"
    try:
        async with (
            asyncio.timeout(deadline_s),
            kube.websocket(PODS.path(namespace, pod, "portforward"), {"ports": str(port)}, PROTOCOL) as line,
        ):
            # HTTP/1.0: the answer ends with the connection.
            lines = [f"GET {path} HTTP/1.0", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
            await line.send_bytes(bytes([_DATA]) + "\r\n".join(lines).encode("latin-1"))
            received, complaint = await _received(line)
    except TimeoutError as error:
        raise Unreachable(f"kubernetes: {what}: no answer in {deadline_s:g} s") from error
    try:
        answer = http.client.HTTPResponse(_Socket(received))  # type: ignore[arg-type]
        answer.begin()
        return answer.status, answer.read()
    except http.client.HTTPException as error:
        raise Unreachable(f"kubernetes: {what}: {complaint or repr(error)}") from error


async def _received(line: aiohttp.ClientWebSocketResponse) -> tuple[bytes, str]:
    """All that came over the two channels."""
    channels = {_DATA: bytearray(), _ERROR: bytearray()}
    async for message in line:
        if message.type is aiohttp.WSMsgType.BINARY and message.data and message.data[0] in channels:
            channels[message.data[0]] += message.data[1:]
    return bytes(channels[_DATA][_PREFACE:]), channels[_ERROR][_PREFACE:].decode(errors="replace").strip()


class _Socket:
    """As much of a socket as ``http.client`` reads an answer from."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._content)
