"""The forms of answers and observations."""

from typing import Any

import pytest

from agentfly.agent import HermesParser
from agentfly.rollout.dialect import FORMS, Form, as_user, plain, with_calls
from tests.unit.rollout import toys

PARSE = HermesParser().parse
USER = {"role": "user", "content": "go"}
SAID = {"role": "assistant", "content": "both: " + toys.call("shell", command="a") + toys.call("look", at=1)}
SEEN = [{"role": "tool", "name": "shell", "content": "A"}, {"role": "tool", "name": "look", "content": "B"}]
BAD = {"role": "tool", "name": "error", "content": "malformed"}


def called(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_plain_is_what_was_said() -> None:
    assert plain([USER, SAID, *SEEN], PARSE) == [USER, SAID, *SEEN]


def test_calls_and_what_they_gave_name_one_another() -> None:
    assert with_calls([USER, SAID, *SEEN, BAD, SAID, SEEN[0]], PARSE) == [
        USER,
        {
            "role": "assistant",
            "content": "both:",
            "tool_calls": [called(0, "shell", command="a"), called(1, "look", at=1)],
        },
        {**SEEN[0], "tool_call_id": "call00000"},
        {**SEEN[1], "tool_call_id": "call00001"},
        {"role": "user", "content": "malformed"},
        {
            "role": "assistant",
            "content": "both:",
            "tool_calls": [called(2, "shell", command="a"), called(3, "look", at=1)],
        },
        {**SEEN[0], "tool_call_id": "call00002"},
    ]


def test_answer_without_calls_is_what_the_parser_reads() -> None:
    messages = [USER, {"role": "assistant", "content": " done "}]
    assert with_calls(messages, PARSE) == [USER, {"role": "assistant", "content": "done"}]


def test_answer_with_a_call_that_cannot_be_read_stays_text() -> None:
    wrong = {"role": "assistant", "content": "<tool_call>{]</tool_call>"}
    assert with_calls([USER, wrong, BAD], PARSE) == [USER, wrong, {"role": "user", "content": "malformed"}]


def test_observations_and_the_user_behind_them_are_one_message() -> None:
    assert as_user([USER, SAID, *SEEN, USER, SAID, BAD], PARSE) == [
        USER,
        SAID,
        {"role": "user", "content": "A\nB\ngo"},
        SAID,
        {"role": "user", "content": "malformed"},
    ]


@pytest.mark.parametrize("form", FORMS)
def test_form_changes_nothing_that_it_was_given(form: Form) -> None:
    messages = [dict(USER), dict(SAID), *map(dict, SEEN)]
    form(messages, PARSE)
    assert messages == [USER, SAID, *SEEN]
