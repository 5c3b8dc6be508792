"""YAML with lines; the sections have the numbers of the guarantees in agentfly.api.tree."""

import errno
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.api import tree
from agentfly.api.tree import Flaw, Where

WORDS = st.text("abcxyz", min_size=1, max_size=4)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.integers(-5, 5), WORDS, st.booleans(), st.none(), st.floats(0.5, 4, width=16)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=12,
)


INDENT = "indent it like the line above, or two spaces further for what belongs to that line"
NOTHING = Flaw(None, (), "has no objects", ("begin an object with apiVersion: agentfly.dev/v1alpha1",))


def one(text: str) -> tree.Document:
    reading = tree.read(text)
    assert reading.flaws == []
    (document,) = reading.documents
    return document


def flaws(text: str) -> list[Flaw]:
    return tree.read(text).flaws


def places(value: Any, where: Where = ()) -> list[Where]:
    """Every key and item of a value."""
    found: list[Where] = []
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, inner in steps:
        found += [(*where, part), *places(inner, (*where, part))]
    return found


# 1. Lines.


def test_keys_and_items_have_their_lines() -> None:
    document = one("a: 1\nb:\n  - x\n  - c: 2\n    d: [3,\n        4]\ne: {f: 5}\n")
    assert document.lines == {
        ("a",): 1,
        ("b",): 2,
        ("b", 0): 3,
        ("b", 1): 4,
        ("b", 1, "c"): 4,
        ("b", 1, "d"): 5,
        ("b", 1, "d", 0): 5,
        ("b", 1, "d", 1): 6,
        ("e",): 7,
        ("e", "f"): 7,
    }


def test_a_later_document_counts_from_the_top_of_the_file() -> None:
    first, second = tree.read("# remark\na: 1\n---\nb: 2\n").documents
    assert (first.line, first.lines) == (2, {("a",): 2})
    assert (second.line, second.lines) == (4, {("b",): 4})


@settings(deadline=None)  # the machine may be busy
@given(st.dictionaries(WORDS, VALUES, min_size=1))
def test_every_place_in_a_document_has_a_line_within_it(value: dict[str, Any]) -> None:
    text = yaml.safe_dump(value)
    document = one(text)
    assert document.value == value
    assert set(document.lines) == set(places(value))
    assert all(1 <= line <= text.count("\n") for line in document.lines.values())


def test_what_is_merged_has_the_line_it_was_written_on() -> None:
    document = one("base: &base\n  a: 1\n  b: 2\nuse:\n  <<: *base\n  b: 3\n")
    assert document.value["use"] == {"a": 1, "b": 3}
    assert document.lines["use", "a"] == 2
    assert document.lines["use", "b"] == 6


def test_of_several_merged_mappings_the_first_wins() -> None:
    document = one("x: &x {a: 1}\ny: &y {a: 2, b: 2}\nz: {<<: [*x, *y], c: 3}\n")
    assert document.value["z"] == {"a": 1, "b": 2, "c": 3}


# 2. Scalars.


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-12", -12),
        ("1e-6", 1e-6),
        ("1.0e-6", 1e-6),
        ("3E2", 300.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("true", True),
        ("yes", True),
        ("off", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("2026-11-30", "2026-11-30"),
        ("12:30:00", "12:30:00"),
        ("012", "012"),
        ("0x1F", "0x1F"),
        ("1_000", "1_000"),
        ("500m", "500m"),
        ("y", "y"),
        ("'1'", "1"),
        ('"null"', "null"),
        ("=", "="),
    ],
)
def test_scalars_mean_what_they_mean_to_kubectl(text: str, value: object) -> None:
    found = one(f"a: {text}\n").value["a"]
    assert found == value
    assert type(found) is type(value)


def test_keys_are_text() -> None:
    assert one("1: a\nyes: b\n").value == {"1": "a", "yes": "b"}


def test_an_integer_of_any_length_is_read() -> None:
    assert one(f"a: {'9' * 5000}\n").value["a"] == "9" * 5000


# 3. Flaws.


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        ("", NOTHING),
        ("# nothing\n", NOTHING),
        ("a: 1\na: 2\n", Flaw(2, ("a",), "is given twice; first on line 1", ("remove one of the two",))),
        (
            "a:\n- b: 1\n  b: 2\n",
            Flaw(3, ("a", 0, "b"), "is given twice; first on line 2", ("remove one of the two",)),
        ),
        ("a: 1\n---\n", Flaw(2, (), "document 2 is empty", ("remove the --- that begins it",))),
        (
            "- a\n",
            Flaw(
                1,
                (),
                "document 1 is a list, not an object",
                ("begin it with apiVersion: agentfly.dev/v1alpha1",),
            ),
        ),
        ("a:\n\tb: 1\n", Flaw(2, (), "is indented with a tab", ("use spaces",))),
        ("a: \x00\n", Flaw(1, (), "not YAML: character 0x0 is not allowed", ("remove the character",))),
        ("a: 1\nb: \x07\n", Flaw(2, (), "not YAML: character 0x7 is not allowed", ("remove the character",))),
        (
            "a: *b\n",
            Flaw(
                1, (), "not YAML: found undefined alias 'b'", ("put quotes around text that begins with *",)
            ),
        ),
        (
            "a: !secret x\n",
            Flaw(1, ("a",), "has the tag !secret, which is not supported", ("remove !secret",)),
        ),
        (
            "a: !!binary x\n",
            Flaw(1, ("a",), "has the tag !!binary, which is not supported", ("remove !!binary",)),
        ),
        (
            "{[a]: 1}\n",
            Flaw(
                1,
                (),
                "has a key that is a list or a mapping",
                ("put quotes around text that begins with { or [",),
            ),
        ),
        (
            "a: {<<: 1}\n",
            Flaw(1, ("a",), "<< needs a mapping", ("give it the alias of a mapping, as in <<: *base",)),
        ),
    ],
)
def test_what_is_no_object_is_a_flaw_with_its_line(text: str, flaw: Flaw) -> None:
    assert flaws(text) == [flaw]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ('a: "x\n', "end the text with the quote it begins with"),
        ('a: "\\d"\n', "write \\\\ for each backslash between double quotes"),
        ("a: *\n", "put quotes around text that begins with *"),
        ("a: &\n", "put quotes around text that begins with &"),
        ("a: {{ x }}\n", "put quotes around text that begins with { or ["),
        ("a: @x\n", "put quotes around the text that begins with this character"),
        ("a: b: c\n", "put quotes around text that has ': ' inside"),
        ("a: 1\nb\nc: 1\n", "put ': ' between the name of the field and its value"),
        ("a: {b: 1\n", "put , between its entries and } at its end"),
        ("a: [b c\n", "put , between its entries and ] at its end"),
        ("a: [\n", "end each { with } and each [ with ]"),
        ("{a: 1}\nb: 1\n", "begin the next document with ---"),
        ("a: 1\n b: 2\n", INDENT),
        ("a:\n  b: 1\n c: 1\n", INDENT),
    ],
)  # fmt: skip
def test_what_is_not_yaml_has_its_remedy(text: str, hint: str) -> None:
    (flaw,) = flaws(text)
    assert flaw.hints == (hint,)


def test_unfinished_text_is_reported_where_it_begins() -> None:
    (flaw,) = flaws("a: 1\nb: {c: 1\n\n\n")
    assert flaw.line == 2
    assert flaw.problem.startswith("not YAML: while parsing a flow mapping: expected ',' or '}'")


def test_documents_before_a_flaw_are_read() -> None:
    reading = tree.read("a: 1\n---\nb: [\n")
    assert [document.value for document in reading.documents] == [{"a": 1}]
    assert [flaw.line for flaw in reading.flaws] == [3]


def test_documents_after_a_flawed_one_are_read() -> None:
    reading = tree.read("a: !x 1\n---\nb: 1\n")
    assert [document.value for document in reading.documents] == [{"b": 1}]


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert tree.read_file(tmp_path / "a.yaml").documents[0].value == {"a": 1}


def test_a_file_in_another_encoding_has_the_line_of_the_byte(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"a: 1\nb: caf\xe9\n")
    assert tree.read_file(tmp_path / "a.yaml").flaws == [
        Flaw(2, (), "byte 0xe9 is not UTF-8", ("save the file as UTF-8",))
    ]


@pytest.mark.parametrize(
    ("name", "reason", "hint"),
    [
        ("rnu.yaml", "No such file or directory", "did you mean {here}/run.yaml?"),
        ("no.yaml", "No such file or directory", "name a file that is in {here}"),
        (
            "runs/run.yaml",
            "No such file or directory",
            "name a file in a folder that exists; {here}/runs does not",
        ),
        (
            "run.yaml/run.yaml",
            "Not a directory",
            "name a file in a folder that exists; {here}/run.yaml does not",
        ),
        ("", "Is a directory", "name a file in it, such as {here}/run.yaml"),
        ("empty", "Is a directory", "name a file in it, such as {here}/empty/run.yaml"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, name: str, reason: str, hint: str) -> None:
    (tmp_path / "run.yaml").touch()
    (tmp_path / "rnu.py").touch()
    (tmp_path / "empty").mkdir()
    assert tree.read_file(tmp_path / name).flaws == [
        Flaw(None, (), f"cannot be read: {reason}", (hint.format(here=tmp_path),))
    ]


def test_a_file_that_is_not_readable_says_how_to_make_it_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert tree.read_file(tmp_path / "a.yaml").flaws == [
        Flaw(
            None,
            (),
            "cannot be read: Permission denied",
            (f"make it readable: chmod u+r {tmp_path / 'a.yaml'}",),
        )
    ]


# 4. Bounds.


@pytest.mark.parametrize(
    "text",
    [
        "a: &a\n  b: *a\n",
        "a: &a [*a]\n",
        "a: " + "[" * 70 + "]" * 70 + "\n",
        "a: " + "[" * 5000,
        "l0: &l0 [x]\n" + "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 9)),
    ],
    ids=["a mapping in itself", "a list in itself", "deep", "deeper than the stack", "a billion laughs"],
)
def test_what_grows_without_end_is_refused(text: str) -> None:
    reading = tree.read(text)
    assert [(flaw.problem, flaw.hints) for flaw in reading.flaws] == [
        ("is nested too deep or too large", ("keep a document below 64 levels and 100000 values",))
    ]
    assert reading.documents == []


@settings(deadline=None)  # the machine may be busy
@given(st.text("ab:-[]{}&*!|>'\"#%@`,? \n\t\x00é", max_size=40))
def test_no_text_makes_it_raise(text: str) -> None:
    reading = tree.read(text)
    assert reading.documents or reading.flaws
    lines = len(text.splitlines()) + 1
    assert all(flaw.line is None or 1 <= flaw.line <= lines for flaw in reading.flaws)
    assert all(flaw.hints for flaw in reading.flaws)


@settings(deadline=None)  # the machine may be busy
@given(st.binary(max_size=40))
def test_no_bytes_make_it_raise(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("t") / "a.yaml"
    path.write_bytes(data)
    reading = tree.read_file(path)
    assert reading.documents or reading.flaws


# Values on a command line.


@pytest.mark.parametrize(
    ("text", "value"), [("4", 4), ("1e-6", 1e-6), ("", None), ("[a, b]", ["a", "b"]), ("{a: 1}", {"a": 1})]
)
def test_a_value_is_yaml(text: str, value: object) -> None:
    assert tree.read_value(text) == value


@pytest.mark.parametrize("text", ["[", "!x 1", "*a", "\x00", "[" * 5000])
def test_what_is_no_value_is_refused_with_its_remedy(text: str) -> None:
    with pytest.raises(tree.Wrong, match=r"not YAML|not supported|too deep") as caught:
        tree.read_value(text)
    assert caught.value.flaw.hints
