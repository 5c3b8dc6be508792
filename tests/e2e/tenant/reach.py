"""What is reached from here: `reach.py NAME=PROTO:HOST:PORT..` prints {NAME: "open" or what stopped it}.

PROTO is tcp, http (answers anything at all), or dns (HOST is asked for the API server's name).
"""

import concurrent.futures
import json
import socket
import sys

PATIENCE_S = 2.0
QUERY = (
    b"\x13\x37\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00"
    + b"".join(
        bytes([len(part)]) + part for part in (b"kubernetes", b"default", b"svc", b"cluster", b"local")
    )
    + b"\x00\x00\x01\x00\x01"
)


def tried(target: str) -> str:
    protocol, _, address = target.partition(":")
    host, _, port = address.rpartition(":")
    try:
        if protocol == "dns":
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.settimeout(PATIENCE_S)
                sock.connect((host, int(port)))
                sock.send(QUERY)
                return "open" if sock.recv(512)[:2] == QUERY[:2] else "another answer"
        with socket.create_connection((host, int(port)), PATIENCE_S) as sock:
            if protocol == "http":
                sock.sendall(f"GET /healthz HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                return "open" if sock.recv(5) == b"HTTP/" else "another answer"
            return "open"
    except OSError as error:
        return f"{type(error).__name__}: {error}"


targets = dict(argument.split("=", 1) for argument in sys.argv[1:])
with concurrent.futures.ThreadPoolExecutor(len(targets)) as pool:
    print(json.dumps(dict(zip(targets, pool.map(tried, targets.values()), strict=True))))
