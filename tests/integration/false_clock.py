"""A wall clock of a process that jumps; its monotonic clock does not, as on a machine whose time is set."""

import time
from datetime import datetime
from pathlib import Path

from tests.cluster import debian

_LIBRARY = "libfaketimeMT.so.1"


class FalseClock:
    """The clock of processes that are started with ``env``.

    Raises:
        Unavailable: this machine has no package of libfaketime.
    """

    def __init__(self, folder: Path) -> None:
        (library,) = debian.unpacked("libfaketime").glob(f"usr/lib/*/faketime/{_LIBRARY}")
        self._file = folder / "clock"
        self.jump(0)
        self.env = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def jump(self, seconds: int) -> None:
        """Sets it to so many seconds from the true time."""
        fresh = self._file.with_suffix(".new")
        fresh.write_text(f"{seconds:+d}s\n")
        fresh.rename(self._file)

    @staticmethod
    def off_by(said: str) -> float:
        """The seconds by which a time that was said just now is ahead."""
        return datetime.fromisoformat(said).timestamp() - time.time()
