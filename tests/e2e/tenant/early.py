"""Tries for some seconds whether a place is open, and prints when it was: `early.py HOST PORT SECONDS`."""

import json
import socket
import sys
import time

host, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
opened, tries, begun = [], 0, time.monotonic()
while time.monotonic() - begun < seconds:
    tries += 1
    try:
        socket.create_connection((host, port), 0.2).close()
        opened.append(round(time.monotonic() - begun, 3))
    except OSError:
        pass
    time.sleep(0.01)
print(json.dumps({"tries": tries, "opened": opened}))
