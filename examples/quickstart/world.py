"""The world of the quickstart: small configuration files, one of them with a wrong value.

A task follows from its seed alone: four files of two ``key=value`` lines each. The user names a key and the
value it should have, but neither the file nor the value that stands there now: the agent has to look before
it edits.
Exactly one line of one file must change; a wrong edit is as bad as none.
"""

import random
from collections.abc import Iterator
from typing import Any

KEYS = ["port", "host", "mode", "size", "user", "rate", "zone", "path"]
FILES = [f"{name}.conf" for name in ["web", "db", "cache", "auth", "mail", "log", "job", "api"]]
VALUES = [str(value) for value in range(10, 60)]


def task(seed: int) -> dict[str, Any]:
    """The task of a seed: ``request`` for the prompt, ``files`` as found, ``wanted`` as they should be."""
    rng = random.Random(seed)
    names, keys, values = rng.sample(FILES, 4), rng.sample(KEYS, 8), rng.sample(VALUES, 9)
    lines = {
        name: list(zip(keys[2 * i : 2 * i + 2], values[2 * i : 2 * i + 2], strict=True))
        for i, name in enumerate(names)
    }
    name = rng.choice(names)
    key, old = rng.choice(lines[name])
    new = values[8]
    files = {file: "".join(f"{k}={v}\n" for k, v in pairs) for file, pairs in lines.items()}
    wanted = {**files, name: files[name].replace(f"{key}={old}\n", f"{key}={new}\n")}
    return {
        "id": f"repair-{seed}",
        "request": f"set {key} to {new}",
        "files": files,
        "wanted": wanted,
        "key": key,
        "file": name,
        "old": old,
        "new": new,
    }


def tasks(seed: int) -> Iterator[dict[str, Any]]:
    """Training tasks without end: each seed has its own, none comes twice."""
    number = seed * 1_000_000
    while True:
        yield task(number)
        number += 1
