"""Why a role failed, read from what it left behind: its exit code and its log.

Guarantees:
1. The reason is one line, the one that most likely says why.
2. Only the end of a log is read, however long it is.
"""

import re
from pathlib import Path

from agentfly.api.reasons import Reason
from agentfly.roles.trainer import EXIT_STALLED

_READ_BYTES = 65536
_LINE_MAX = 500
# Lines that good runs of verl print too: engines that are not installed.
_HARMLESS = re.compile(r"engine is not available|UserWarning|FutureWarning|DeprecationWarning")
_ERROR = re.compile(r"\b\w*(Error|Exception|Killed)\b[:(]")


def why(code: int, log: Path) -> tuple[Reason, str]:
    """Why a trainer ended with an exit code that it did not explain itself; negative for a signal."""
    if code == EXIT_STALLED:
        reason = Reason.NoProgress
    else:
        reason = Reason.Interrupted if code < 0 or code > 128 else Reason.AttemptFailed
    return reason, f"trainer: exit code {code}: {reason_in(log)}; read {log}"


def reason_in(log: Path) -> str:
    """The line of a log that most likely says why a role failed: the last error, else the last line.

    Hints are no reason: an error of agentfly ends with them.
    """
    if not log.exists():
        return "it printed nothing"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _READ_BYTES))
        text = file.read().decode(errors="replace")
    lines = [line for row in text.splitlines() if (line := row.strip()) and not line.startswith("hint:")]
    errors = [line for line in lines if _ERROR.search(line) and not _HARMLESS.search(line)]
    candidates = errors or lines
    return candidates[-1][:_LINE_MAX] if candidates else "it printed nothing"
