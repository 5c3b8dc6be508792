"""Objects for in-process pools: what people write, and what goes wrong with it."""

import asyncio
import os
import subprocess
import time
from typing import Any


class Counter:
    """Counts; its reset brings it back, unless it was told to leave something."""

    def __init__(self, start: int = 0) -> None:
        self.start = self.value = start
        self.notes: list[str] = []
        self.closed = False

    def add(self, n: int = 1) -> int:
        before = self.value
        time.sleep(0.01)  # long enough for a second call to come in between
        self.value = before + n
        return self.value

    async def add_later(self, n: int = 1) -> int:
        before = self.value
        await asyncio.sleep(0.01)
        self.value = before + n
        return self.value

    def note(self, text: str) -> None:
        self.notes.append(text)

    def see(self) -> dict[str, Any]:
        return {"value": self.value, "notes": self.notes}

    def fail(self) -> None:
        raise ValueError("no such move")

    def end(self) -> None:
        raise SystemExit(3)

    def late(self) -> None:
        raise TimeoutError("the opponent did not answer")

    def pair(self) -> tuple[int, int]:
        return 1, 2

    def thing(self) -> object:
        return object()

    def hang(self) -> None:
        time.sleep(2)

    def _secret(self) -> str:
        return "secret"


class Careful(Counter):
    """Says what it looks like, and forgets the count but not the notes."""

    made = 0

    def __init__(self, start: int = 0) -> None:
        super().__init__(start)
        type(self).made += 1

    def reset(self) -> None:
        self.value = self.start

    def fingerprint(self) -> dict[str, Any]:
        return self.see()


class Closing(Counter):
    """Keeps a list of those that were closed."""

    ended: list[int] = []  # noqa: RUF012

    def close(self) -> None:
        self.ended.append(self.value)


async def later(start: int = 0) -> Counter:
    await asyncio.sleep(0)
    return Counter(start)


def broken() -> None:
    raise RuntimeError("no board")


def slow() -> Counter:
    time.sleep(1)
    return Counter()


class Heavy(Counter):
    """Holds memory, starts processes, dies."""

    def hold(self, mib: int) -> None:
        self.ballast = b"x" * (mib << 20)

    def spawn(self) -> int:
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    def variables(self, *names: str) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    def pid(self) -> int:
        return os.getpid()

    def die(self) -> None:
        os._exit(9)
