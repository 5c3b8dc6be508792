"""Looks for what leave.py left: `find.py WORD-WRITTEN-BACKWARDS`. Prints where it is."""

import ctypes
import os
import socket
import sys
import zlib

word = sys.argv[1][::-1]
name_of_it = ctypes.c_int(zlib.crc32(word.encode()))
libc = ctypes.CDLL(None, use_errno=True)


def read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return os.read(fd, 1 << 20)
        finally:
            os.close(fd)
    except OSError:
        return b""


def say(where: str) -> None:
    print(where, flush=True)


own = {str(os.getpid()), "self", "thread-self"}
for root, folders, names in os.walk("/"):
    skipped = {"sys", "task", "map_files", "usr"} - ({"usr"} if root != "/" else set())
    folders[:] = [name for name in folders if name not in skipped and name not in own]
    for name in names:
        path = os.path.join(root, name)
        if word in name or word.encode() in read(path):
            say(path)
for path in ("/usr/local", "/tmp", "/workspace"):
    if os.path.isdir(path):
        if any(word in name for name in os.listdir(path)):
            say(path)
        try:
            if any(word.encode() in os.getxattr(path, name) for name in os.listxattr(path)):
                say(f"an attribute of {path}")
        except OSError:
            pass
if libc.syscall(249, b"user", word.encode(), None, ctypes.c_long(-4)) > 0:  # request_key
    say("a keyring")
if libc.shmget(name_of_it, 0, 0) >= 0:
    say("shared memory")
if libc.msgget(name_of_it, 0) >= 0:
    say("a queue")
if word in socket.gethostname():
    say("the host's name")
