"""docs/security.md and the tests it names: each exists, and no attack that is tested is left out."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TEXT = (TESTS.parent / "docs" / "security.md").read_text()


def defined(file: str) -> set[str]:
    """The tests in files of this name."""
    text = "\n".join(path.read_text() for path in TESTS.rglob(file))
    return set(re.findall(r"^(?:async )?def (test_\w+)\(", text, re.MULTILINE))


def test_every_test_it_names_exists() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", TEXT)
    assert len(named) > 40
    assert [f"{file}::{name}" for file, name in named if name not in defined(file)] == []


def test_every_test_of_an_attack_is_named() -> None:
    paths = [*TESTS.glob("local/test_attacks*.py"), *TESTS.glob("e2e/test_attackers*.py")]
    assert len(paths) >= 4
    for path in paths:
        assert [name for name in sorted(defined(path.name)) if f"`{path.name}::{name}`" not in TEXT] == []


def test_every_row_has_a_test() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| attack")]
    assert len(rows) > 25
    assert [row for row in rows if "::test_" not in row] == []
