"""What a holder can do to a process, or to what is outside of its sandbox; runs inside, under any Python 3.

Usage: reach.py process PID PORT: attempts on that process and on the port that it listens on; with
SIGNALS=no, none that would end or stop it. reach.py outside: attempts on the kernel and the machine. Writes
the name of each attempt that came to something.
"""

import ctypes
import os
import resource
import socket
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
ARM = os.uname().machine == "aarch64"
NUMBERS = {
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "move_pages": (279, 239), "setns": (308, 268)},
    **{"ioprio_set": (251, 30), "unshare": (272, 97), "clone": (56, 220), "pivot_root": (155, 41)},
    **{"bpf": (321, 280), "keyctl": (250, 219), "open_by_handle_at": (304, 265), "userfaultfd": (323, 282)},
    **{"sethostname": (170, 161), "reboot": (169, 142), "perf_event_open": (298, 241)},
    **dict.fromkeys(["pidfd_getfd"], (438, 438)),
    **{"open_tree": (428, 428), "fsopen": (430, 430), "io_uring_setup": (425, 425), "clone3": (435, 435)},
}
NEW_USER, NEW_MOUNTS, NEW_PROCESSES, NEW_NETWORK = 0x10000000, 0x20000, 0x20000000, 0x40000000
ATTACH, SEIZE = 16, 0x4206
READS = ("environ", "mem", "maps", "auxv", "fd/3", "fd/4", "root/etc", "cwd/etc", "exe")
WRITES = ("oom_score_adj", "mem", "uid_map", "comm", "coredump_filter", "autogroup", "timerslack_ns")


def call(name, *arguments):
    if LIBC.syscall(NUMBERS[name][ARM], *arguments) < 0:
        raise OSError(ctypes.get_errno(), name)


def opened(path, flags=os.O_RDONLY):
    os.close(os.open(path, flags))


def written(path):
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, b"1")


def read(path):
    with open(path, "rb") as file:
        if not file.read(1):
            raise OSError("nothing there")


def listened(host, port):
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    one.bind((host, port))
    one.listen()


def on_process(pid, port):
    buffer = ctypes.create_string_buffer(64)
    here = (ctypes.c_ulong * 2)(ctypes.addressof(buffer), 64)
    there = (ctypes.c_ulong * 2)(0x400000, 64)
    signals = () if os.environ.get("SIGNALS") == "no" else (9, 19, 15, 11, 1)
    yield from ((f"signal {n}", lambda n=n: os.kill(pid, n)) for n in signals)
    yield from ((f"read {name}", lambda name=name: opened(f"/proc/{pid}/{name}")) for name in READS)
    yield from ((f"write {name}", lambda name=name: written(f"/proc/{pid}/{name}")) for name in WRITES)
    yield "attach", lambda: call("ptrace", ATTACH, pid, 0, 0)
    yield "seize", lambda: call("ptrace", SEIZE, pid, 0, 0)
    yield (
        "readv",
        lambda: call("process_vm_readv", pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0),
    )
    for number in range(8):
        yield f"descriptor {number}", lambda n=number: call("pidfd_getfd", os.pidfd_open(pid), n, 0)
    yield "enter", lambda: call("setns", os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY), 0)
    yield "pages", lambda: call("move_pages", pid, 0, 0, 0, 0, 0)
    for host in ("", "127.0.0.1", "0.0.0.0"):
        yield f"listen {host}", lambda host=host: listened(host, port)
    yield "slow: priority", lambda: os.setpriority(os.PRIO_PROCESS, pid, 19)
    yield "slow: affinity", lambda: os.sched_setaffinity(pid, {0})
    yield "slow: scheduler", lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    yield "slow: disk priority", lambda: call("ioprio_set", 1, pid, 3 << 13)
    yield "slow: limits", lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (10, 10))


def mounted(result):
    if result != 0:
        raise OSError(ctypes.get_errno(), "mount")


def outside():
    for name, flag in (
        *(("users", NEW_USER), ("mounts", NEW_MOUNTS), ("processes", NEW_PROCESSES)),
        ("network", NEW_NETWORK),
    ):
        yield f"unshare {name}", lambda flag=flag: call("unshare", flag)
        yield f"clone {name}", lambda flag=flag: call("clone", flag | 17, 0, 0, 0, 0)
    yield "clone3", lambda: call("clone3", ctypes.create_string_buffer(88), 88)
    yield "mount", lambda: mounted(LIBC.mount(b"x", b"/tmp", b"tmpfs", 0, None))
    yield "umount /proc", lambda: mounted(LIBC.umount2(b"/proc", 2))
    yield "umount /", lambda: mounted(LIBC.umount2(b"/", 2))
    yield "open_tree", lambda: call("open_tree", -100, b"/", 1)
    yield "fsopen", lambda: call("fsopen", b"tmpfs", 0)
    yield "pivot_root", lambda: call("pivot_root", b"/tmp", b"/tmp")
    yield "bpf", lambda: call("bpf", 0, ctypes.create_string_buffer(64), 64)
    yield "perf", lambda: call("perf_event_open", ctypes.create_string_buffer(128), -1, 0, -1, 0)
    yield "io_uring", lambda: call("io_uring_setup", 1, ctypes.create_string_buffer(128))
    yield "keys", lambda: call("keyctl", 1, b"x")
    yield "handle", lambda: call("open_by_handle_at", 3, ctypes.create_string_buffer(64), 0)
    yield "userfaultfd", lambda: call("userfaultfd", 1)
    yield "sethostname", lambda: call("sethostname", b"evil", 4)
    yield "reboot", lambda: call("reboot", 0xFEE1DEAD, 672274793, 0, 0)
    yield "packets", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 768)
    yield "raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)
    yield "device", lambda: os.mknod("/tmp/device", 0o60600, os.makedev(254, 0))
    yield "null's mode", lambda: os.chmod("/dev/null", 0)
    yield "null's time", lambda: os.utime("/dev/null", (1, 1))
    yield "daemon's program", lambda: opened("/agentfly/sandboxd")
    yield "daemon's folder", lambda: opened("/agentfly/x", os.O_WRONLY | os.O_CREAT)
    yield "core_pattern", lambda: opened("/proc/sys/kernel/core_pattern", os.O_WRONLY)
    yield "sysrq", lambda: opened("/proc/sysrq-trigger", os.O_WRONLY)
    yield "kcore", lambda: read("/proc/kcore")
    yield "kmsg", lambda: read("/proc/kmsg")
    yield "cgroup", lambda: opened("/sys/fs/cgroup/x", os.O_WRONLY | os.O_CREAT)
    yield "the keeper's user", lambda: os.setresuid(65535, 65535, 65535)


def main():
    attempts = on_process(*map(int, sys.argv[2:])) if sys.argv[1] == "process" else outside()
    me = os.getpid()
    for name, attempt in attempts:
        try:
            attempt()
        except (OSError, ValueError, OverflowError):
            continue
        if os.getpid() != me:
            os._exit(0)
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()


main()
