"""Tasks as rows: from a function or from a file of JSON lines.

Guarantees:
1. A row is a JSON object; anything else is an error that names the source and, in a file, the line.
2. Rows are read one at a time: a source may be endless.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from agentfly.errors import AgentflyError
from agentfly.refs import load


def read_tasks(
    entrypoint: str | None, path: Path | None, base_dir: Path, seed: int
) -> Iterator[dict[str, Any]]:
    """The rows of a source.

    Args:
        entrypoint: reference to a function that is called with ``seed`` and yields rows; or None.
        path: file of JSON lines, used when there is no entrypoint.
        base_dir: what relative references start from.
        seed: of the function.

    Raises:
        AgentflyError: a row is no JSON object.
    """
    if entrypoint is not None:
        rows: Iterable[object] = load(entrypoint, base_dir)(seed=seed)
        for number, row in enumerate(rows, start=1):
            yield _checked(row, f"{entrypoint}: row {number}")
    elif path is not None:
        with (base_dir / path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _checked(_parsed(line, f"{path}:{number}"), f"{path}:{number}")


def _parsed(line: str, where: str) -> object:
    try:
        value: object = json.loads(line)
    except json.JSONDecodeError as error:
        raise AgentflyError(f"tasks: {where} is no JSON: {error}") from None
    return value


def _checked(row: object, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise AgentflyError(
            f"tasks: {where} is a {type(row).__name__}, not an object with fields",
            hints=['write {"field": value}'],
        )
    try:
        json.dumps(row)
    except (TypeError, ValueError) as error:
        raise AgentflyError(f"tasks: {where} is no JSON: {error}") from None
    return row
