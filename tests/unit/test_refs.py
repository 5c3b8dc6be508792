"""References to Python objects; the sections have the numbers of the guarantees in agentfly.refs."""

import inspect
import pickle
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentfly.errors import AgentflyError
from agentfly.refs import load


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Modules and search path as they were before the test."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def refusal(reference: str, base: Path) -> str:
    with pytest.raises(AgentflyError) as caught:
        load(reference, base)
    return caught.value.render()


# 1. One run for each file and content.


def test_a_file_gives_its_object(tmp_path: Path) -> None:
    write(tmp_path / "agent.py", "agent = 41 + 1")
    assert load("agent.py:agent", tmp_path) == 42


def test_an_absolute_path_needs_no_base(tmp_path: Path) -> None:
    path = write(tmp_path / "agent.py", "agent = 1")
    assert load(f"{path}:agent", Path("/nowhere")) == 1


def test_two_files_of_one_name_do_not_meet(tmp_path: Path) -> None:
    write(tmp_path / "a" / "agent.py", "agent = 'a'")
    write(tmp_path / "b" / "agent.py", "agent = 'b'")
    assert [load("agent.py:agent", tmp_path / "a"), load("agent.py:agent", tmp_path / "b")] == ["a", "b"]


def test_two_references_into_one_file_run_it_once(tmp_path: Path) -> None:
    write(tmp_path / "agent.py", "agent = object()\ntasks = agent\n")
    assert load("agent.py:agent", tmp_path) is load("agent.py:tasks", tmp_path)


def test_an_edited_file_is_run_anew(tmp_path: Path) -> None:
    write(tmp_path / "agent.py", "agent = 1")
    assert load("agent.py:agent", tmp_path) == 1
    write(tmp_path / "agent.py", "agent = 2")
    assert load("agent.py:agent", tmp_path) == 2


# 2. The module is a module.


def test_what_a_file_defines_can_be_inspected_and_pickled(tmp_path: Path) -> None:
    write(tmp_path / "agent.py", "def agent():\n    return 'pickled'\n")
    agent = load("agent.py:agent", tmp_path)
    assert inspect.getsource(agent) == "def agent():\n    return 'pickled'\n"
    assert pickle.loads(pickle.dumps(agent)) is agent


def test_a_module_that_failed_does_not_stay(tmp_path: Path) -> None:
    write(tmp_path / "agent.py", "agent = 1\nraise ValueError('no')\n")
    before = set(sys.modules)
    refusal("agent.py:agent", tmp_path)
    assert set(sys.modules) == before


def test_an_interrupt_passes_through_and_leaves_no_module(tmp_path: Path) -> None:
    write(tmp_path / "agent.py", "raise KeyboardInterrupt\n")
    before = set(sys.modules)
    with pytest.raises(KeyboardInterrupt):
        load("agent.py:agent", tmp_path)
    assert set(sys.modules) == before


# 3. Neighbours.


def test_a_file_imports_what_stands_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "my_world.py", "tasks = ['t']")
    write(tmp_path / "agent.py", "from my_world import tasks")
    assert load("agent.py:tasks", tmp_path) == ["t"]


def test_an_importable_module_gives_its_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "my_pkg" / "__init__.py", "")
    write(tmp_path / "my_pkg" / "mod.py", "agent = 'm'")
    monkeypatch.syspath_prepend(tmp_path)
    assert load("my_pkg.mod:agent", Path("/nowhere")) == "m"


# 4. What is wrong.


@pytest.mark.parametrize("reference", ["agent.py", "agent.py:", ":agent", "agent.py:a-b", ""])
def test_another_form_is_refused(reference: str, tmp_path: Path) -> None:
    assert refusal(reference, tmp_path) == (
        f"{reference}: is not a reference to Python\n"
        "  hint: write file.py:name or package.module:name, as in agent.py:agent"
    )


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path / "agent.py", "")
    assert refusal("agnt.py:agent", tmp_path) == (
        f"agnt.py:agent: {tmp_path}/agnt.py is not a file\n  hint: did you mean agent.py?"
    )


def test_a_hint_of_a_path_keeps_its_folder(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    write(tmp_path / "m" / "good.py", "")
    assert refusal("m/god.py:agent", tmp_path).endswith("hint: did you mean m/good.py?")


def test_a_missing_file_without_neighbours_says_what_to_make(tmp_path: Path) -> None:
    assert refusal("sub/agent.py:agent", tmp_path) == (
        f"sub/agent.py:agent: {tmp_path}/sub/agent.py is not a file\n"
        "  hint: make sub/agent.py, or correct the reference"
    )


def test_a_missing_name_has_the_nearest_one(tmp_path: Path) -> None:
    write(tmp_path / "agent.py", "agent = 1")
    assert refusal("agent.py:agnt", tmp_path) == (
        "agent.py:agnt: agent.py has no agnt\n  hint: did you mean agent.py:agent?"
    )


def test_a_missing_name_without_a_near_one_says_what_to_define(tmp_path: Path) -> None:
    write(tmp_path / "agent.py", "x = 1")
    assert refusal("agent.py:agent", tmp_path) == (
        "agent.py:agent: agent.py has no agent\n  hint: define agent at the top level of agent.py"
    )


def test_an_exception_has_its_type_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "agent.py", "import json\n\nagent = json.loads('{}')['key']\n")
    assert refusal("agent.py:agent", tmp_path) == f"agent.py:agent: {path}:3 raised KeyError: 'key'"


def test_an_exception_in_a_neighbour_has_the_neighbours_line(tmp_path: Path) -> None:
    path = write(tmp_path / "my_world.py", "\nraise RuntimeError('no world')\n")
    write(tmp_path / "agent.py", "import my_world\n")
    assert refusal("agent.py:agent", tmp_path) == f"agent.py:agent: {path}:2 raised RuntimeError: no world"


def test_a_syntax_error_has_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "agent.py", "x = 1\ndef agent(:\n")
    assert (
        refusal("agent.py:agent", tmp_path) == f"agent.py:agent: {path}:2 raised SyntaxError: invalid syntax"
    )


def test_a_module_that_exits_is_an_error_and_no_exit(tmp_path: Path) -> None:
    path = write(tmp_path / "agent.py", "import sys\nsys.exit(3)\n")
    assert refusal("agent.py:agent", tmp_path) == f"agent.py:agent: {path}:2 raised SystemExit: 3"


def test_the_first_cause_is_kept(tmp_path: Path) -> None:
    write(tmp_path / "agent.py", "raise LookupError('why')\n")
    with pytest.raises(AgentflyError) as caught:
        load("agent.py:agent", tmp_path)
    assert isinstance(caught.value.__cause__, LookupError)


def test_a_missing_module_is_named(tmp_path: Path) -> None:
    assert refusal("no_such_pkg.mod:agent", tmp_path) == (
        "no_such_pkg.mod:agent: Python finds no module no_such_pkg\n"
        "  hint: install it, or write file.py:name for a file beside the manifest"
    )


def test_a_module_that_misses_another_is_an_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "my_mod.py", "import no_such_thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert refusal("my_mod:agent", tmp_path) == (
        f"my_mod:agent: {path}:1 raised ModuleNotFoundError: No module named 'no_such_thing'"
    )


def test_a_module_that_raises_is_an_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "my_mod.py", "raise OSError('disk')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert refusal("my_mod:agent", tmp_path) == f"my_mod:agent: {path}:1 raised OSError: disk"


def test_an_error_of_agentfly_has_its_own_words_and_the_line_of_the_user(tmp_path: Path) -> None:
    text = """\
    from agentfly import tool

    @tool
    def shell(command):
        '''Run.'''
    """
    path = write(tmp_path / "agent.py", text)
    assert refusal("agent.py:agent", tmp_path) == (
        f"agent.py:agent: {path}:3: tool shell: parameter command has no type\n"
        "  hint: annotate it, for example `command: str`\n"
        "  hint: a Context is injected as `ctx`"
    )


def test_an_exception_of_many_lines_is_told_in_one(tmp_path: Path) -> None:
    path = write(tmp_path / "agent.py", "raise ValueError('first\\nsecond')\n")
    assert refusal("agent.py:agent", tmp_path) == f"agent.py:agent: {path}:1 raised ValueError: first"
