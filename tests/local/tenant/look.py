"""All that a holder can see of a sandbox, as one JSON object; runs inside, under any Python 3.

Usage: look.py SECONDS [FOLDER...]: times after SECONDS show as "new"; with folders, access times outside of
them are left out.
"""

import ctypes
import fcntl
import hashlib
import json
import os
import resource
import stat
import struct
import sys
import time

SINCE = float(sys.argv[1])
FOLDERS = sys.argv[2:] or ["/"]
SKIPPED = ("/proc", "/sys", "/.agentfly-workspace", "/home/.agentfly-dev")
"""The last two hold the daemon's copies, under names of chance; only privileged holders can list them."""
TMPFS = 0x01021994
LIBC = ctypes.CDLL(None, use_errno=True)
KEYCTL, IOPRIO_GET = {"x86_64": (250, 252), "aarch64": (219, 31)}[os.uname().machine]


def read(path, size=1 << 20):
    try:
        with open(path, "rb") as file:
            return file.read(size).decode("utf-8", "backslashreplace")
    except OSError as error:
        return f"errno {error.errno}"


def shown(name):
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def when(seconds):
    """A time exactly, unless it is of this sandbox's own life; one in the future is a message."""
    return "new" if SINCE <= seconds <= time.time() + 1 else repr(seconds)


def extended(path):
    """But for the random number that the kernel gives each overlay."""
    try:
        names = sorted(set(os.listxattr(path, follow_symlinks=False)) - {"user.overlay.uuid"})
        return {name: os.getxattr(path, name, follow_symlinks=False).hex() for name in names}
    except OSError as error:
        return error.errno


def chattr(path):
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        return f"errno {error.errno}"
    try:
        return struct.unpack("L", fcntl.ioctl(fd, 0x80086601, bytes(8)))[0] & ~0x00080000  # but extents
    except OSError as error:
        return f"errno {error.errno}"
    finally:
        os.close(fd)


def entry(path):
    st = os.lstat(path)
    kind = stat.S_IFMT(st.st_mode)
    facts = [oct(st.st_mode), st.st_uid, st.st_gid, when(st.st_mtime), extended(path)]
    if path.startswith(tuple(FOLDERS)):
        facts.append(when(st.st_atime))
    if kind == stat.S_IFREG:
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read(1 << 16)).hexdigest() if st.st_size else ""
        facts += [st.st_size, st.st_nlink, digest]
    elif kind == stat.S_IFLNK:
        facts.append(os.readlink(path))
    elif kind in (stat.S_IFCHR, stat.S_IFBLK):
        facts.append(st.st_rdev)
    if kind in (stat.S_IFREG, stat.S_IFDIR):
        facts.append(chattr(path))
    return facts


def tree():
    seen = {}
    pending = ["/"]
    while pending:
        path = pending.pop()
        try:
            seen[shown(path)] = entry(path)
            if stat.S_ISDIR(os.lstat(path).st_mode) and path not in SKIPPED:
                pending += [os.path.join(path, name) for name in os.listdir(path)]
        except OSError as error:
            seen[shown(path)] = f"errno {error.errno}"
    return seen


def mounts():
    """Without the numbers and the places on the machine that each sandbox has of its own."""
    found = []
    for line in read("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        kind, _, options = right.split()
        places = ("upper", "work", "lower")
        found.append(
            [fields[4], fields[5], kind, [o for o in options.split(",") if not o.startswith(places)]]
        )
    return found


def space():
    """What is left on every file system in memory: a file without a name takes room too."""
    return {
        place: [status.f_blocks, status.f_bfree, status.f_files, status.f_ffree]
        for place, _, kind, _ in mounts()
        if kind == "tmpfs"
        for status in [os.statvfs(place)]
    }


def processes():
    """Of all that stay: what the daemon starts has the daemon's arguments until it is another program."""
    before, now = None, arguments()
    for _ in range(20):
        if before == now:
            break
        time.sleep(0.05)
        before, now = now, arguments()
    return now


def arguments():
    """Of all processes but this one; the daemon's have numbers of descriptors in them."""
    pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    return [
        read(f"/proc/{pid}/cmdline").partition("\0" if pid == 1 else "\n")[0]
        for pid in pids
        if pid != os.getpid()
    ]


def status():
    wanted = ("Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Umask", "TracerPid")
    lines = dict(line.split(":\t") for line in read("/proc/self/status").splitlines() if ":\t" in line)
    signals = ("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd")
    return {name: lines[name] for name in lines if name.startswith("Cap") or name in (*signals, *wanted)}


def own():
    files = ("oom_score_adj", "coredump_filter", "timerslack_ns", "timens_offsets", "uid_map", "gid_map")
    return {
        "files": {name: read(f"/proc/self/{name}") for name in files},
        "autogroup": read("/proc/self/autogroup").partition(" ")[2],
        "daemon": {name: read(f"/proc/1/{name}") for name in ("comm", "oom_score_adj", "coredump_filter")},
        "status": status(),
        "limits": [resource.getrlimit(kind) for kind in range(16)],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "umask": os.umask(0),
        "nice": [os.getpriority(os.PRIO_PROCESS, 0), os.getpriority(os.PRIO_PROCESS, 1)],
        "disk priority": LIBC.syscall(IOPRIO_GET, 1, 0),
        "scheduler": [os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))],
        "personality": LIBC.personality(0xFFFFFFFF),
        "uname": list(os.uname()),
        "domain": read("/proc/sys/kernel/domainname"),
        "descriptors": sorted(os.listdir("/proc/self/fd")),
    }


def keyrings():
    """How much is in each: of the session, of the user, of its sessions, and the one that stays."""
    persistent = LIBC.syscall(KEYCTL, 22, -1, -5)
    sizes = [LIBC.syscall(KEYCTL, 11, ring, None, 0) for ring in (-3, -4, persistent)]
    LIBC.syscall(KEYCTL, 9, persistent, -5)
    return [*sizes, LIBC.syscall(KEYCTL, 11, -5, None, 0)]


def locks():
    """Of processes; those of descriptors are shown of the whole machine."""
    return [line.partition(" ")[2] for line in read("/proc/locks").splitlines() if "OFDLCK" not in line]


def kernel():
    tables = ("sysvipc/shm", "sysvipc/msg", "sysvipc/sem", "swaps")
    sockets = ("unix", "tcp", "tcp6", "udp", "udp6", "raw", "dev", "arp", "route")
    settings = ("kernel/msgmax", "kernel/shmmax", "net/ipv4/ip_forward", "fs/mqueue/msg_max")
    return {
        "tables": {name: read(f"/proc/{name}") for name in tables},
        "network": {name: read(f"/proc/net/{name}") for name in sockets},
        "locks": locks(),
        "settings": {name: read(f"/proc/sys/{name}") for name in settings},
        "keyrings": keyrings(),
        "cgroup": [os.access(path, os.W_OK) for path in ("/sys/fs/cgroup", "/proc/sys", "/proc/1")],
        "clock": abs(time.time() - SINCE) < 3600,
    }


PARTS = (processes, own, kernel, mounts, space, tree)
json.dump({part.__name__: part() for part in PARTS}, sys.stdout)
