"""A process of nobody that holds a connection and talks: `hold.py HOST PORT`."""

import os
import socket
import sys
import time

sock = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)
if os.fork() == 0:
    os.setsid()
    for fd in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), fd)
    while True:
        sock.sendall(b"still here\n")
        time.sleep(0.05)
print("held")
