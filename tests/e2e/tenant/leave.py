"""Leaves a word wherever one can be left: `leave.py WORD`. Prints where it could."""

import contextlib
import ctypes
import os
import subprocess
import sys
import zlib

word = sys.argv[1]
name = ctypes.c_int(zlib.crc32(word.encode()))
libc = ctypes.CDLL(None, use_errno=True)
FOLDERS = (
    *("/tmp", "/workspace", "/dev/shm", "/root", "/home/dev", "/etc", "/var/tmp", "/run", "/usr/local"),
    *("/", "/dev", "/agentfly"),
)
places = []


def left(where: str) -> None:
    places.append(where)


for folder in FOLDERS:
    with contextlib.suppress(OSError):
        with open(f"{folder}/{word}", "w") as file:
            file.write(word)
        left(folder)
for path in ("/etc/hosts", "/etc/resolv.conf", "/etc/hostname", "/dev/termination-log", "/etc/passwd"):
    with contextlib.suppress(OSError):
        with open(path, "a") as file:
            file.write(f"\n# {word}\n")
        left(path)
with contextlib.suppress(OSError):
    os.setxattr("/tmp", "user.word", word.encode())
    left("an attribute")
with contextlib.suppress(OSError):
    os.mkfifo(f"/tmp/fifo-{word}")
    left("a pipe")
key = libc.syscall(
    248, b"user", word.encode(), word.encode(), len(word), ctypes.c_long(-4)
)  # add_key, of the user
if key > 0:
    left("a keyring")
shm = libc.shmget(name, 4096, 0o1666)
if shm >= 0:
    libc.shmat.restype = ctypes.c_void_p
    ctypes.memmove(libc.shmat(shm, None, 0), word.encode(), len(word))
    left("shared memory")
queue = libc.msgget(name, 0o1666)
if queue >= 0:
    text = ctypes.create_string_buffer(b"\x01" + b"\0" * 7 + word.encode())
    libc.msgsnd(queue, text, len(word), 0o4000)
    left("a queue")
with contextlib.suppress(OSError, AttributeError):
    if ctypes.CDLL("librt.so.1").mq_open(f"/{word}".encode(), 0o101, 0o666, None) >= 0:
        left("a POSIX queue")
if libc.sethostname(word.encode(), len(word)) == 0:
    left("the host's name")
abstract = (
    "import socket, sys, time\n"
    "s = socket.socket(socket.AF_UNIX)\n"
    "s.bind('\\0' + sys.argv[1])\n"
    "s.listen()\n"
    "time.sleep(900)"
)
subprocess.Popen(
    ["python3", "-c", abstract, word],
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    start_new_session=True,
    env={"WORD": word, "PATH": os.environ["PATH"]},
)
left("a process")
print(*places, sep=",")
