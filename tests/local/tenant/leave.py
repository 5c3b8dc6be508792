"""What a holder may try in a sandbox, one function an operation; runs inside, under any Python 3.

Usage: leave.py JSON, where JSON is a list of [operation, argument...]. What is refused is skipped: the
property is about what succeeds.
"""

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time

LIBC = ctypes.CDLL(None, use_errno=True)
SYSCALLS = {
    "x86_64": {"add_key": 248, "keyctl": 250, "ioprio_set": 251, "mq_open": 240, "msgget": 68, "semget": 64},
    "aarch64": {
        "add_key": 217,
        "keyctl": 219,
        "ioprio_set": 30,
        "mq_open": 180,
        "msgget": 186,
        "semget": 190,
    },
}[os.uname().machine]
LINGER_S = 600


# Files.


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)


def append(path, text):
    with open(path, "a") as file:
        file.write(text)


def store(path, text):
    """Write through a mapping: on some file systems no time changes."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[0:1] = text.encode()[:1]


def store_and_hide(path, text):
    """The same with the times set back."""
    before = os.lstat(path)
    store(path, text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def truncate(path):
    os.truncate(path, 0)


def mkdir(path):
    os.makedirs(path)


def remove(path):
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def rename(path, target):
    os.rename(path, target)


def undo(path):
    os.rename(path, path + ".away")
    os.rename(path + ".away", path)


def replace_by_link(path, target):
    os.rename(path, path + ".away")
    os.symlink(target, path)


def chmod(path, mode):
    os.chmod(path, mode)


def chown(path, uid):
    os.chown(path, uid, uid, follow_symlinks=False)


def symlink(path, target):
    os.symlink(target, path)


def link(path, target):
    os.link(path, target)


def fifo(path):
    os.mkfifo(path)


def device(path):
    os.mknod(path, 0o666 | 0o020000, os.makedev(1, 3))


def xattr(path, text):
    os.setxattr(path, "user.left", text.encode(), follow_symlinks=False)


def times(path, seconds):
    os.utime(path, (seconds, seconds), follow_symlinks=False)


def flags(path, bits):
    fd = os.open(path, os.O_RDONLY)
    fcntl.ioctl(fd, 0x40086602, struct.pack("L", bits))  # FS_IOC_SETFLAGS


def odd_names(path):
    for name in (b"new\nline", b"not\xffutf8", b" ", b"-rf", b"a" * 255):
        with open(os.path.join(os.fsencode(path), name), "w") as file:
            file.write("odd")


def deep(path):
    """A tree whose path is longer than the kernel takes in one call."""
    os.chdir(path)
    for _ in range(40):
        os.mkdir("d" * 120)
        os.chdir("d" * 120)
    with open("bottom", "w") as file:
        file.write("deep")


def many(path):
    for number in range(300):
        with open(f"{path}/many-{number}", "w") as file:
            file.write("x")


def closed_folder(path):
    os.makedirs(path + "/closed/inner")
    with open(path + "/closed/inner/x", "w") as file:
        file.write("x")
    os.chmod(path + "/closed/inner", 0)
    os.chmod(path + "/closed", 0)


# Processes.


def _detach():
    """Whether this is the grandchild: of nobody's group, deaf to what can be ignored."""
    if os.fork():
        return False
    os.setsid()
    if os.fork():
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    return True


def _linger():
    time.sleep(LINGER_S)
    os._exit(0)


def background(_):
    subprocess.Popen(["/bin/sh", "-c", f"sleep {LINGER_S}"], stdout=subprocess.DEVNULL)


def daemon(_):
    if _detach():
        _linger()


def respawn(_):
    """Two that start each other again, as cron does, and write when they do."""
    if not _detach():
        return
    while True:
        parent = os.getpid()
        if os.fork() == 0:
            while os.getppid() == parent:
                time.sleep(0.001)
            with contextlib.suppress(OSError), open("/tmp/respawned", "a") as file:
                file.write("again")
        else:
            os.wait()


def writer(path):
    if not _detach():
        return
    while True:
        with contextlib.suppress(OSError), open(path + "/written", "a") as file:
            file.write("x")
        time.sleep(0.001)


def held(path):
    """A deleted file, a working folder, a lock and a watch, all held by a process."""
    if not _detach():
        return
    os.chdir(path)
    os.write(os.open("held", os.O_CREAT | os.O_WRONLY), b"x" * 100_000)
    os.unlink("held")
    fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)
    watch = LIBC.inotify_init()
    LIBC.inotify_add_watch(watch, path.encode(), 0xFFF)
    _linger()


def tcp(port):
    listener = socket.create_server(("127.0.0.1", 20000 + port))
    listener.set_inheritable(True)
    if _detach():
        _linger()


def connected(port):
    server = socket.create_server(("127.0.0.1", 30000 + port))
    client = socket.create_connection(("127.0.0.1", 30000 + port))
    server.accept()[0].close()
    client.close()


def abstract(name):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + name)
    listener.listen()
    if _detach():
        _linger()


def unix(path):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    if _detach():
        _linger()


def terminal(mode):
    _, other = os.openpty()
    os.fchmod(other, mode)
    if _detach():
        _linger()


# What belongs to no file.


def shm(key):
    LIBC.shmget(key, 4096, 0o1666)


def msg(key):
    LIBC.syscall(SYSCALLS["msgget"], key, 0o1666)


def sem(key):
    LIBC.syscall(SYSCALLS["semget"], key, 2, 0o1666)


def mqueue(name):
    LIBC.syscall(SYSCALLS["mq_open"], name.encode(), os.O_CREAT | os.O_RDWR, 0o666, None)


def key(name):
    text = name.encode()
    persistent = LIBC.syscall(SYSCALLS["keyctl"], 22, -1, -4)
    for ring in (-3, -4, -5, persistent):
        LIBC.syscall(SYSCALLS["add_key"], b"user", text, text, len(text), ring)


def limit(value):
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU, resource.RLIMIT_CORE):
        with contextlib.suppress(OSError, ValueError):
            _, hard = resource.prlimit(1, kind)
            resource.prlimit(1, kind, (min(value, hard) if hard >= 0 else value, hard))


def priority(value):
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 1, value % 20)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(1, os.SCHED_BATCH, os.sched_param(0))
    LIBC.syscall(SYSCALLS["ioprio_set"], 1, 1, 3 << 13)


def affinity(_):
    for thread in os.listdir("/proc/1/task"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread), {0})


def of_the_daemon(value):
    for name in ("oom_score_adj", "coredump_filter", "timerslack_ns", "autogroup", "comm", "clear_refs"):
        with contextlib.suppress(OSError), open(f"/proc/1/{name}", "w") as file:
            file.write(str(value % 20))


def sysctl(value):
    for name in ("kernel/msgmax", "kernel/domainname", "net/ipv4/ip_forward", "fs/mqueue/msg_max"):
        with contextlib.suppress(OSError), open(f"/proc/sys/{name}", "w") as file:
            file.write(str(value))


def setting(name, value):
    """What only a privileged holder can: make the settings writable, change one, and shut them again."""
    remount, read_only, bind = 32, 1, 4096
    flags = 2 | 4 | 8  # nosuid, nodev, noexec
    LIBC.mount(None, b"/proc", None, remount | bind | flags, None)
    with contextlib.suppress(OSError), open(f"/proc/sys/{name}", "w") as file:
        file.write(value)
    LIBC.mount(None, b"/proc", None, remount | bind | flags | read_only, None)


def host_name(name):
    LIBC.sethostname(name.encode(), len(name))


def mount(path):
    LIBC.mount(b"none", path.encode(), b"tmpfs", 0, None)
    LIBC.mount(path.encode(), b"/srv", None, 4096, None)
    LIBC.mount(b"none", b"/", None, (1 << 5) | (1 << 12), b"")


def umount(path):
    LIBC.umount2(path.encode(), 2)


def namespaces(_):
    LIBC.unshare(0x10000000 | 0x00020000)


def clock(seconds):
    with contextlib.suppress(OSError):
        time.clock_settime(time.CLOCK_REALTIME, seconds)


def stop(number):
    os.kill(1, number)


def main():
    operations = {name: thing for name, thing in globals().items() if callable(thing) and name[0] != "_"}
    for name, *arguments in json.loads(sys.argv[1]):
        if name not in operations or name == "main":
            raise SystemExit(f"no operation is named {name}")
        os.chdir("/")
        with contextlib.suppress(OSError, ValueError, RecursionError):
            operations[name](*arguments)
    sys.stdout.flush()
    os._exit(0)


main()
