from itertools import islice

import pytest

from agentfly.errors import AgentflyError
from agentfly.tasks import read_tasks

MODULE = """
def endless(seed):
    while True:
        seed += 1
        yield {"id": seed}

def numbers(seed):
    yield 7

def sets(seed):
    yield {"keys": {1, 2}}
"""


@pytest.fixture
def base(tmp_path):
    (tmp_path / "source.py").write_text(MODULE)
    return tmp_path


def rows(base, name):
    return list(islice(read_tasks(f"source.py:{name}", None, base, 40), 2))


def test_a_function_gets_the_seed_and_may_be_endless(base):
    assert rows(base, "endless") == [{"id": 41}, {"id": 42}]


def test_a_file_gives_its_lines_without_the_empty_ones(base):
    (base / "tasks.jsonl").write_text('{"id": 1}\n\n{"id": 2}\n')
    assert list(read_tasks(None, base / "tasks.jsonl", base, 0)) == [{"id": 1}, {"id": 2}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("numbers", "tasks: source.py:numbers: row 1 is a int, not an object with fields"),
        ("sets", "tasks: source.py:sets: row 1 is no JSON: Object of type set is not JSON serializable"),
    ],
)
def test_a_row_that_is_no_json_object_is_refused(base, name, text):
    with pytest.raises(AgentflyError) as caught:
        rows(base, name)
    assert caught.value.message == text


def test_a_broken_line_is_named(base):
    (base / "tasks.jsonl").write_text('{"id": 1}\n{"id": \n')
    with pytest.raises(AgentflyError, match=r"tasks\.jsonl:2 is no JSON"):
        list(read_tasks(None, base / "tasks.jsonl", base, 0))
