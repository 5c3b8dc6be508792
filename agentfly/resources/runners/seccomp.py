"""The system calls that no command in a sandbox may make, as a filter for bubblewrap.

Guarantees:
1. Keyrings are shut: they belong to the user, not to a namespace, so they would carry secrets of this machine
   in, and residue from one lease to the next.
2. Calls that widen the kernel's attack surface and that no tool needs (bpf, perf events, userfaultfd,
   io_uring, the kernel log) are refused with EPERM; programs fall back.
3. Calls of another architecture or of the x32 table are refused too: their numbers mean something else.
"""

import errno
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_OFFSET_NUMBER, _OFFSET_ARCHITECTURE = 0, 4
_X32 = 0x40000000


@dataclass(frozen=True, slots=True)
class _Architecture:
    audit: int
    refused: tuple[int, ...]


# In the order: add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd, io_uring_setup,
# io_uring_enter, io_uring_register, syslog.
_ARCHITECTURES = {
    "x86_64": _Architecture(0xC000003E, (248, 249, 250, 321, 298, 323, 425, 426, 427, 103)),
    "aarch64": _Architecture(0xC00000B7, (217, 218, 219, 280, 241, 282, 425, 426, 427, 116)),
}


def program(machine: str = "") -> bytes | None:
    """The filter for this machine as the kernel's ``sock_filter`` array, or None if it is not known."""
    architecture = _ARCHITECTURES.get(machine or platform.machine())
    return None if architecture is None else _assemble(architecture.audit, architecture.refused)


def _assemble(audit: int, refused: Sequence[int]) -> bytes:
    deny_at = 4 + len(refused) + 1  # behind the checks and the one ALLOW
    code = [
        (_LOAD, 0, 0, _OFFSET_ARCHITECTURE),
        (_JUMP_EQUAL, 0, deny_at - 2, audit),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
        (_JUMP_GREATER_EQUAL, deny_at - 4, 0, _X32),
    ]
    for position, number in enumerate(refused, start=len(code)):
        code.append((_JUMP_EQUAL, deny_at - position - 1, 0, number))
    code += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
