"""Forwards a port of this machine's loopback to an address inside a cluster's network namespace.

Runs as a process of its own: `python forward.py PORT NAMESPACE_PID HOST:PORT`. It listens where it was
started and then enters the namespace, so that what it opens later belongs there: the cluster needs no way
out.

Guarantees:
1. SIGUSR1 cuts: every open connection is reset, new ones are reset as they come. SIGUSR2 mends.
2. Bytes pass unchanged in both directions, and the end of one direction leaves the other open.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys

CLONE_NEWNET = 0x40000000
CHUNK = 1 << 18


class Forward:
    """The open connections of one forwarded port."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._cut = False
        self._open: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Resets every connection, and new ones until `mend`."""
        self._cut = True
        for writer in list(self._open):
            _reset(writer)

    def mend(self) -> None:
        """Lets connections through again."""
        self._cut = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carries one connection until both directions ended."""
        self._open.add(writer)
        try:
            if self._cut:
                _reset(writer)
                return
            with contextlib.suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection(*self._target, limit=CHUNK)
                self._open.add(far_writer)
                try:
                    await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
                finally:
                    self._open.discard(far_writer)
                    far_writer.transport.abort()
        finally:
            self._open.discard(writer)
            writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
        return
    writer.transport.abort()


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _enter(pid: int) -> None:
    fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(fd)


async def _main(listener: socket.socket, host: str, port: int) -> None:
    forward = Forward(host, port)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, forward.cut)
    loop.add_signal_handler(signal.SIGUSR2, forward.mend)
    server = await asyncio.start_server(forward.serve, sock=listener, limit=CHUNK)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    at, inside, target = sys.argv[1:]
    host, _, port = target.rpartition(":")
    with socket.create_server(("127.0.0.1", int(at)), backlog=1024) as listener:
        _enter(int(inside))
        asyncio.run(_main(listener, host, int(port)))
