"""The system calls that no command in a sandbox may make, as a filter for bubblewrap.

Guarantees:
1. Keyrings are shut: they belong to the user, not to a namespace, so they would carry secrets of this machine
   in, and residue from one lease to the next.
2. Calls that widen the kernel's attack surface and that no tool needs (bpf, perf events, userfaultfd,
   io_uring, fanotify, the kernel log) are refused with EPERM; programs fall back. So is the older
   asynchronous I/O, of which the whole machine has only so much.
3. Sockets are those of a network namespace: unix, IPv4, IPv6 and netlink. Others lead out of the sandbox
   (vsock, to the machine's host) or make the kernel load a module.
4. Calls of another architecture or of the x32 table are refused too: their numbers mean something else.
"""

import errno
import platform
import struct
from dataclasses import dataclass

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_OFFSET_NUMBER, _OFFSET_ARCHITECTURE, _OFFSET_FIRST_ARGUMENT = 0, 4, 16
_X32 = 0x40000000
_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK."""


@dataclass(frozen=True, slots=True)
class _Architecture:
    audit: int
    refused: tuple[int, ...]
    sockets: tuple[int, int]


# In the order: add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd, io_uring_setup,
# io_uring_enter, io_uring_register, syslog, fanotify_init, io_setup; then socket, socketpair.
_ARCHITECTURES = {
    "x86_64": _Architecture(
        0xC000003E, (248, 249, 250, 321, 298, 323, 425, 426, 427, 103, 300, 206), (41, 53)
    ),
    "aarch64": _Architecture(
        0xC00000B7, (217, 218, 219, 280, 241, 282, 425, 426, 427, 116, 262, 0), (198, 199)
    ),
}


def program(machine: str = "") -> bytes | None:
    """The filter for this machine as the kernel's ``sock_filter`` array, or None if it is not known."""
    architecture = _ARCHITECTURES.get(machine or platform.machine())
    return None if architecture is None else _assemble(architecture)


def _assemble(architecture: _Architecture) -> bytes:
    refused, families = len(architecture.refused), len(_FAMILIES)
    # Places: 4 checks, the refused calls, 2 for sockets, ALLOW, the family and its checks, two refusals.
    allow_at = 4 + refused + 2
    family_at = allow_at + 1
    no_family_at = family_at + 1 + families
    deny_at = no_family_at + 1
    code = [
        (_LOAD, 0, 0, _OFFSET_ARCHITECTURE),
        (_JUMP_EQUAL, 0, deny_at - 2, architecture.audit),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
        (_JUMP_GREATER_EQUAL, deny_at - 4, 0, _X32),
    ]
    for number in architecture.refused:
        code.append((_JUMP_EQUAL, deny_at - len(code) - 1, 0, number))
    for number in architecture.sockets:
        code.append((_JUMP_EQUAL, family_at - len(code) - 1, 0, number))
    code += [(_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, _OFFSET_FIRST_ARGUMENT)]
    for family in _FAMILIES:
        # Backward jumps are not allowed, so an own ALLOW follows the refusals.
        code.append((_JUMP_EQUAL, deny_at + 1 - len(code) - 1, 0, family))
    code += [(_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
