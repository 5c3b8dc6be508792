"""Kills whatever it can, above all the daemon, and takes its port: `usurp.py SECONDS ADDRESS`.

It answers as the daemon would, in a process that is not killed, and prints where.
"""

import contextlib
import os
import signal
import socket
import sys
import time

PORT = 7070
ANSWER = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 18\r\n\r\n{"boot":"usurped"}'
TAKES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP, signal.SIGTERM, signal.SIGABRT, signal.SIGQUIT)


def serve(listener: socket.socket) -> None:
    if os.fork() == 0:
        os.setsid()
        while True:
            other, _ = listener.accept()
            other.recv(4096)
            other.sendall(ANSWER)
            other.close()


def bind(address: str) -> "socket.socket | None":
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((address, PORT))
        sock.listen()
    except OSError:
        sock.close()
        return None
    return sock


mine = sys.argv[2]
end, bound = time.monotonic() + float(sys.argv[1]), set()
killed = False
while time.monotonic() < end:
    for address in ("0.0.0.0", "::", mine, "127.0.0.1"):
        if address not in bound and (sock := bind(address)):
            bound.add(address)
            serve(sock)
    if not killed:
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            if pid not in (os.getpid(), os.getppid()):
                for number in TAKES:
                    with contextlib.suppress(OSError):
                        os.kill(pid, number)
        killed = not bound
    time.sleep(0.002)
print(*sorted(bound))
