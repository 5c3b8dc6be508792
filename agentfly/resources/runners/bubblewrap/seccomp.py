"""The system calls that no command in a sandbox may make, as a filter for bubblewrap.

Guarantees:
1. Keyrings are shut: they belong to the user, not to a namespace, so they would carry secrets of this machine
   in, and residue from one lease to the next.
2. Calls that widen the kernel's attack surface and that no tool needs (bpf, perf events, userfaultfd,
   io_uring, fanotify, the kernel log) are refused with EPERM; programs fall back. So is the older
   asynchronous I/O, of which the whole machine has only so much.
3. Sockets are those of a network namespace: unix, the usual protocols over IPv4 and IPv6, and the netlink
   that tools list addresses and sockets with. Others lead out of the sandbox (vsock, to the machine's host),
   or make the kernel load a module for anybody who asks.
4. Scheduling and limits are a process's own to change: the daemon is one of the same user, and could be
   starved, or left without memory or descriptors.
5. Writing out everybody's files to disk does nothing, and there are no huge pages, of which the machine has a
   fixed number: no control group of ours bounds either.
6. Calls of another architecture or of the x32 table are refused too: their numbers mean something else.
"""

import errno
import platform
import struct
from collections.abc import Sequence

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT = 0x15, 0x35, 0x45
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_OFFSET_NUMBER, _OFFSET_ARCHITECTURE, _OFFSET_ARGUMENTS = 0, 4, 16
_X32 = 0x40000000
_FAMILIES = {1: "allow", 2: "type", 10: "type", 16: "netlink"}
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK, each with the block that decides further."""
_TYPE, _OTHER_TYPES = 0xF, 4
"""The bits of a socket's type without its flags; streams, datagrams and raw lie below the others."""
_INTERNET = (0, 1, 6, 17, 58, 262)
"""The usual one, ICMP, TCP, UDP, ICMPv6, MPTCP."""
_NETLINK = (0, 4, 15)
"""Addresses and routes, lists of sockets, events of devices."""

_MAP_HUGETLB, _MFD_HUGETLB = 0x40000, 0x4

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# (call, its numbers in the order of _AUDIT, the block of the program that decides about it)
_CALLS = (
    ("add_key", (248, 217), "refuse"),
    ("request_key", (249, 218), "refuse"),
    ("keyctl", (250, 219), "refuse"),
    ("bpf", (321, 280), "refuse"),
    ("perf_event_open", (298, 241), "refuse"),
    ("userfaultfd", (323, 282), "refuse"),
    ("io_uring_setup", (425, 425), "refuse"),
    ("io_uring_enter", (426, 426), "refuse"),
    ("io_uring_register", (427, 427), "refuse"),
    ("syslog", (103, 116), "refuse"),
    ("fanotify_init", (300, 262), "refuse"),
    ("io_setup", (206, 0), "refuse"),
    ("socket", (41, 198), "family"),
    ("socketpair", (53, 199), "family"),
    ("sched_setparam", (142, 118), "own"),
    ("sched_setscheduler", (144, 119), "own"),
    ("sched_setattr", (314, 274), "own"),
    ("setpriority", (141, 140), "priority"),
    ("ioprio_set", (251, 30), "ioprio"),
    ("prlimit64", (302, 261), "limit"),
    ("sync", (162, 81), "nothing"),
    ("syncfs", (306, 267), "nothing"),
    ("mmap", (9, 222), "map"),
    ("memfd_create", (319, 279), "memory file"),
)

# One instruction: what it does, its constant, and where it goes on if it compared and found that or not:
# a label, or "" for the next one.
_Step = tuple[int, int, str, str]


def program(machine: str = "") -> bytes | None:
    """The filter for this machine as the kernel's ``sock_filter`` array, or None if it is not known."""
    machine = machine or platform.machine()
    return _assemble(_blocks(machine)) if machine in _AUDIT else None


def _blocks(machine: str) -> list[tuple[str, list[_Step]]]:
    """The program as blocks with labels; jumps lead forward alone, as the kernel wants it."""
    column = list(_AUDIT).index(machine)
    start: list[_Step] = [
        (_LOAD, _OFFSET_ARCHITECTURE, "", ""),
        (_JUMP_EQUAL, _AUDIT[machine], "", "refuse"),
        (_LOAD, _OFFSET_NUMBER, "", ""),
        (_JUMP_GREATER_EQUAL, _X32, "refuse", ""),
        *((_JUMP_EQUAL, numbers[column], label, "") for _, numbers, label in _CALLS),
        (_RETURN, _ALLOW, "", ""),
    ]
    return [
        ("start", start),
        (
            "family",
            [
                _argument(0),
                *((_JUMP_EQUAL, family, label, "") for family, label in _FAMILIES.items()),
                (_RETURN, _ERRNO | errno.EAFNOSUPPORT, "", ""),
            ],
        ),
        ("type", [_argument(1), (_AND, _TYPE, "", ""), (_JUMP_GREATER_EQUAL, _OTHER_TYPES, "none", "")]),
        ("internet", [_argument(2), *((_JUMP_EQUAL, protocol, "allow", "") for protocol in _INTERNET)]),
        ("none", [(_RETURN, _ERRNO | errno.EPROTONOSUPPORT, "", "")]),
        (
            "netlink",
            [
                _argument(2),
                *((_JUMP_EQUAL, protocol, "allow", "") for protocol in _NETLINK),
                (_RETURN, _ERRNO | errno.EPROTONOSUPPORT, "", ""),
            ],
        ),
        # (which, who): of processes, groups or users; the caller's own is process 0.
        ("ioprio", [_argument(0), (_JUMP_EQUAL, 1, "who", "refuse")]),
        ("priority", [_argument(0), (_JUMP_EQUAL, 0, "", "refuse")]),
        ("who", [_argument(1), (_JUMP_EQUAL, 0, "allow", "refuse")]),
        # (pid, resource, new, old): whoever gives no new limit only reads.
        ("limit", [_argument(0), (_JUMP_EQUAL, 0, "allow", "")]),
        ("new", [_argument(2), (_JUMP_EQUAL, 0, "", "refuse")]),
        ("new, upper half", [_argument(2, upper=True), (_JUMP_EQUAL, 0, "allow", "refuse")]),
        ("own", [_argument(0), (_JUMP_EQUAL, 0, "allow", "refuse")]),
        ("nothing", [(_RETURN, _ERRNO, "", "")]),  # with no error: the call says that it was done
        ("map", [_argument(3), (_JUMP_ANY_BIT, _MAP_HUGETLB, "no pages", "allow")]),
        ("memory file", [_argument(1), (_JUMP_ANY_BIT, _MFD_HUGETLB, "no pages", "allow")]),
        ("no pages", [(_RETURN, _ERRNO | errno.ENOMEM, "", "")]),
        ("refuse", [(_RETURN, _ERRNO | errno.EPERM, "", "")]),
        ("allow", [(_RETURN, _ALLOW, "", "")]),
    ]


def _argument(number: int, *, upper: bool = False) -> _Step:
    """Load half of an argument; of numbers the kernel takes the lower one, which lies first in memory."""
    return (_LOAD, _OFFSET_ARGUMENTS + 8 * number + 4 * upper, "", "")


def _assemble(blocks: Sequence[tuple[str, Sequence[_Step]]]) -> bytes:
    labels: dict[str, int] = {}
    steps: list[_Step] = []
    for label, block in blocks:
        labels[label] = len(steps)
        steps += block

    def distance(place: int, label: str) -> int:
        return labels[label] - place - 1 if label else 0

    return b"".join(
        struct.pack("=HBBI", code, distance(place, found), distance(place, otherwise), constant)
        for place, (code, constant, found, otherwise) in enumerate(steps)
    )
