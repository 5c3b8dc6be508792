"""Parsers of vLLM's own, where vLLM is: what they read is what an agent with ``parser="vllm:NAME"`` gets."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentfly.local import environments

pytestmark = pytest.mark.timeout(1000)  # vLLM takes its time to be imported
CALL = ["shell", {"command": "ls -l", "seconds": 5}]
HERMES = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls -l", "seconds": 5}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=shell>\n<parameter=command>\nls -l\n</parameter>\n<parameter=seconds>\n5\n"
    "</parameter>\n</function>\n</tool_call>"
)
LLAMA = '{"name": "shell", "parameters": {"command": "ls -l", "seconds": 5}}'
PYTHONIC = '[shell(command="ls -l", seconds=5)]'
TEXTS = {
    "hermes": [HERMES, f"I look.\n{HERMES}", "done", f"<think>{HERMES}</think>done"],
    "qwen3_coder": [CODER, "done"],
    "llama3_json": [LLAMA, "done"],
    "pythonic": [PYTHONIC, "done", "[shell(command=open('x'))]"],
    "nobody": ["x"],
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    python = environments.build("inference")
    done = subprocess.run(
        [python, Path(__file__).parent / "vllm_parsers.py"],
        input=json.dumps(TEXTS),
        env={"PYTHONPATH": str(environments.agentfly_path()), "PATH": "/usr/bin:/bin", "HOME": "/tmp"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "llama3_json", "pythonic"])
def test_call_is_read_and_an_answer_is_one(found: dict[str, Any], name: str) -> None:
    call, *_ = found[name]
    assert call[1:] == [[CALL], []]
    answer = found[name][TEXTS[name].index("done")]
    assert answer == ["done", [], []]


def test_text_around_a_call_is_content(found: dict[str, Any]) -> None:
    content, calls, _ = found["hermes"][1]
    assert (content.strip(), calls) == ("I look.", [CALL])


def test_thoughts_make_no_calls(found: dict[str, Any]) -> None:
    assert found["hermes"][3][1:] == [[], []]


def test_what_cannot_be_read_is_no_exception(found: dict[str, Any]) -> None:
    assert found["pythonic"][2][1] == []


def test_unknown_name_is_told_with_the_known_ones(found: dict[str, Any]) -> None:
    assert found["nobody"].startswith("parser: vLLM has no tool parser nobody (has: ")
    assert "qwen3_coder" in found["nobody"]
