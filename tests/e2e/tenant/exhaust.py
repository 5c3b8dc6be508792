"""Takes all there is of something: `exhaust.py processes|memory|disk|connections|output ADDRESS`."""

import contextlib
import os
import socket
import sys
import time

what, address = sys.argv[1], sys.argv[2]
SECONDS = 5.0


def processes() -> None:
    while True:
        with contextlib.suppress(OSError):
            os.fork()


def memory() -> None:
    taken = []
    while True:
        taken.append(bytearray(os.urandom(1 << 20)))


def disk() -> None:
    for folder in ("/tmp", "/dev/shm", "/workspace", "/var/tmp"):
        with contextlib.suppress(OSError), open(f"{folder}/full", "wb") as file:
            for _ in range(512):
                file.write(bytes(1 << 20))
    for number in range(3000):
        with contextlib.suppress(OSError):
            open(f"/tmp/{number}", "w").close()


def connections() -> None:
    held = []
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            held.append(socket.create_connection((address, 7070), 1))
            held[-1].sendall(b"POST /exec HTTP/1.1\r\nContent-Length: 99999\r\n")
        except OSError:
            time.sleep(0.01)


def output() -> None:
    while True:
        os.write(1, b"x" * 65536)


{"processes": processes, "memory": memory, "disk": disk, "connections": connections, "output": output}[what]()
print("done")
