"""Ways to stay when the lease is over, each a process with the mark in its command line: `linger.py MARK`.

Prints the names of those that run. Without a right they need, they are left out.
"""

import os
import signal
import subprocess
import sys
import time

mark = sys.argv[1]
STAY = "import sys, time\nfor _ in range(9000): time.sleep(0.1)"
DEAF = (
    "import signal, time\n"
    "for n in range(1, 65):\n"
    "    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\n"
    "time.sleep(900)"
)
REBORN = (
    "import os, sys, time\nwhile True:\n    time.sleep(0.01)\n    if os.fork(): os._exit(0)\n    os.setsid()"
)
TRACES = (
    "import ctypes, os, sys, time\n"
    "libc = ctypes.CDLL(None)\n"
    "child = os.fork()\n"
    "if not child:\n    time.sleep(900)\n    os._exit(0)\n"
    "assert libc.ptrace(0x4206, child, 0, 0x100000) == 0\n"
    "while True: time.sleep(0.1)"
)
LISTENS = (
    "import socket, sys, time\n"
    "s = socket.socket(); s.setsockopt(1, 2, 1); s.bind(('0.0.0.0', 7999)); s.listen()\n"
    "u = socket.socket(socket.AF_UNIX); u.bind('\\0' + sys.argv[1]); u.listen()\n"
    "time.sleep(900)"
)
# A deleted folder to stand in, a deleted file that is locked, a queue of pipes that hold each other.
HOLDS = (
    "import fcntl, os, time\n"
    "os.makedirs('/tmp/gone'); os.chdir('/tmp/gone'); os.rmdir('/tmp/gone')\n"
    "f = open('/tmp/held', 'w'); fcntl.flock(f, 2); os.unlink('/tmp/held')\n"
    "r, w = os.pipe()\n"
    "os.read(r, 1)"
)


def start(name: str, program: str, **more: object) -> "subprocess.Popen[bytes]":
    null = subprocess.DEVNULL
    return subprocess.Popen(
        ["python3", "-c", program, f"{mark}-{name}"],
        stdin=null, stdout=null, stderr=null, start_new_session=True, **more,
    )  # fmt: skip


def daemon(name: str, program: str) -> None:
    """Started by a child that ends at once, so that it is nobody's child any more."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for fd in range(3):
                os.dup2(null, fd)
            os.execvp("python3", ["python3", "-c", program, f"{mark}-{name}"])
        os._exit(0)
    os.wait()


daemon("daemon", STAY)
daemon("deaf", DEAF)
daemon("reborn", REBORN)
daemon("traces", TRACES)
daemon("listens", LISTENS)
daemon("holds", HOLDS)
os.kill(start("stopped", STAY).pid, signal.SIGSTOP)
subprocess.Popen(
    ["nohup", "setsid", "sh", "-c", f": {mark}-cron; while :; do sleep 0.1; : {mark}-cron; done"],
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
)


def seen() -> "set[str]":
    """The ways that run now."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if int(pid) != os.getpid() and f"{mark}-" in words:
            found.add(words.split(f"{mark}-")[1].split()[0].strip(";"))
    return found


ways, end = set(), time.monotonic() + 3
while time.monotonic() < end:  # one of them is hard to meet: it forks and ends all the time
    ways |= seen()
    time.sleep(0.05)
print(*sorted(ways))
