"""Tools: what the model sees, what a definition must have, what a call does."""

import asyncio
import threading
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from agentfly.agent import Tool, ToolDefinitionError, ToolResult, ToolResultInvalid, tool
from agentfly.agent.tool import normalise
from agentfly.context import Context
from agentfly.sandbox import ExecResult
from tests.unit.rollout.toys import FakeResources


class Unit(Enum):
    METRE = "m"
    FOOT = "ft"


class Point(BaseModel):
    x: int
    y: int = 0


class Tree(BaseModel):
    value: int
    children: "list[Tree]" = []


def context() -> Context:
    return Context("r", {}, FakeResources())


@tool
async def search(query: str, ctx: Context, limit: int = 10, tags: list[str] | None = None) -> str:
    """Search the index.

    Looks at titles
    and bodies.

    Args:
        query: what to look for,
            in any language.
        limit (int): at most so many results.
        tags: only these.

    Returns:
        One result a line.
    """
    return f"{query} {limit} {tags}"


# 1. the schema comes from the signature and the docstring


def test_schema_is_what_chat_templates_take() -> None:
    assert search.schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the index.\n\nLooks at titles and bodies.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for, in any language."},
                    "limit": {"type": "integer", "default": 10, "description": "at most so many results."},
                    "tags": {
                        "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
                        "default": None,
                        "description": "only these.",
                    },
                },
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    }


def one(annotation: Any) -> Tool[..., Any]:
    def use(value: Any) -> str:
        """Use a value."""
        return repr(value)

    use.__annotations__["value"] = annotation
    return tool(use)


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        (str, {"type": "string"}),
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
        (Literal["a", "b"], {"enum": ["a", "b"], "type": "string"}),
        (Annotated[int, Field(ge=1, le=9)], {"type": "integer", "minimum": 1, "maximum": 9}),
        (Annotated[int, Field(description="a count")], {"type": "integer", "description": "a count"}),
        (tuple[int, str], {
            "type": "array", "minItems": 2, "maxItems": 2,
            "prefixItems": [{"type": "integer"}, {"type": "string"}],
        }),
        (Any, {}),
    ],
)  # fmt: skip
def test_types_become_their_json_schema(annotation: Any, schema: dict[str, Any]) -> None:
    assert one(annotation).parameters["properties"]["value"] == schema


@pytest.mark.parametrize(
    "annotation", [Unit, Point, list[Point], Tree, Point | Unit, dict[str, list[Point | None]]]
)
def test_nested_types_become_a_valid_schema(annotation: Any) -> None:
    Draft202012Validator.check_schema(one(annotation).parameters)


async def test_nested_model_arrives_as_the_model() -> None:
    seen: list[Any] = []

    @tool
    def plot(points: list[Point], unit: Unit = Unit.METRE) -> str:
        """Plot points."""
        seen.append((points, unit))
        return ""

    await plot.run({"points": [{"x": 1}], "unit": "ft"}, context())
    await plot.run({"points": []}, context())
    assert seen == [([Point(x=1, y=0)], Unit.FOOT), ([], Unit.METRE)]


@pytest.mark.parametrize(
    "name", ["schema", "json", "copy", "model_config", "model_fields", "self", "_private", "title"]
)
async def test_argument_may_have_any_name(name: str) -> None:
    space: dict[str, Any] = {}
    exec(f'def use({name}: str) -> str:\n    """Use it."""\n    return {name}', space)
    used = tool(space["use"])
    assert list(used.parameters["properties"]) == [name]
    assert (await used.run({name: "x"}, context())).observation == "x"


def test_context_is_hidden_whatever_it_is_annotated_as() -> None:
    @tool
    def look(ctx) -> str:  # type: ignore[no-untyped-def]
        """Look."""
        return str(ctx.rollout_id)

    assert look.parameters["properties"] == {}


def test_postponed_annotations_are_resolved() -> None:
    space: dict[str, Any] = {}
    future = "from __future__ import annotations\n"
    exec(future + 'def use(n: int | None) -> str:\n    """Use."""\n    return ""', space)
    assert tool(space["use"]).parameters["properties"]["n"] == {
        "anyOf": [{"type": "integer"}, {"type": "null"}]
    }


# 2. a wrong definition fails at decoration


def untyped(path) -> str:  # type: ignore[no-untyped-def]
    """Read a file."""
    return str(path)


def silent(path: str) -> str:
    return path


def starred(*paths: str) -> str:
    """Read files."""
    return ""


def open_ended(**options: str) -> str:
    """Read files."""
    return ""


def positional(path: str, /) -> str:
    """Read a file."""
    return path


def opaque(lock: threading.Thread) -> str:
    """Use a thread."""
    return ""


def called_back(done: "asyncio.Future[int]") -> str:
    """Use a future."""
    return ""


def misdocumented(path: str) -> str:
    """Read a file.

    Args:
        file: the path.
    """
    return path


def unresolved(path: "Nowhere") -> str:  # type: ignore[name-defined]  # noqa: F821
    """Read a file."""
    return ""


@pytest.mark.parametrize(
    ("function", "message", "hint"),
    [
        (untyped, "tool untyped: parameter path has no type", "annotate it, for example `path: str`"),
        (silent, "tool silent: has no docstring, so the model would not know what it is for",
         "What silent does"),
        (starred, "tool starred: parameter *paths: str has no schema", "*paths: str by named parameters"),
        (open_ended, "tool open_ended: parameter **options: str has no schema", "named parameters"),
        (positional, "tool positional: parameter path is positional-only", "remove the `/` after path"),
        (opaque, "tool opaque: an argument's type has no JSON schema", "a pydantic model"),
        (called_back, "tool called_back: an argument's type has no JSON schema", "a pydantic model"),
        (misdocumented, "tool misdocumented: the docstring describes file, which is not a parameter (has: p",
         "rename or remove file"),
        (unresolved, "tool unresolved: an annotation cannot be resolved", "import the type at module level"),
        (lambda path: path, "tool: <function <lambda>", "write it as `def name(...)`"),
        (str, "tool: <class 'str'> is not a function", "with @tool"),
    ],
)  # fmt: skip
def test_wrong_definition_is_told_with_its_remedy(function: Any, message: str, hint: str) -> None:
    with pytest.raises(ToolDefinitionError) as error:
        tool(function)
    assert error.value.message.startswith(message)
    assert any(hint in given for given in error.value.hints)


# 3. wrong arguments become an observation


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "- query: Field required"),
        ({"query": 5}, "- query: Input should be a valid string"),
        (
            {"query": "x", "limit": "many"},
            "- limit: Input should be a valid integer, unable to parse string as an integer",
        ),
        ({"query": "x", "tags": ["a", 3]}, "- tags.1: Input should be a valid string"),
        ({"query": "x", "depth": 1}, "- depth: Extra inputs are not permitted"),
        ({"query": "x", "ctx": 1}, "- ctx: Extra inputs are not permitted"),
    ],
)
async def test_wrong_arguments_are_an_observation(arguments: dict[str, Any], problem: str) -> None:
    result = await search.run(arguments, context())
    assert result.observation == f"invalid arguments for search:\n{problem}"
    assert result.metrics == {"invalid_arguments": 1}


async def test_every_wrong_argument_is_told() -> None:
    result = await search.run({"limit": None, "x": 1}, context())
    assert len(result.observation.splitlines()) == 4


@settings(max_examples=30)
@given(
    st.dictionaries(st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
)
def test_no_arguments_raise(arguments: dict[str, Any]) -> None:
    result = asyncio.run(search.run(arguments, context()))
    assert result.observation


async def test_number_written_as_text_is_understood() -> None:
    assert (await search.run({"query": "x", "limit": "3"}, context())).observation == "x 3 None"


# 4. what a tool returns


@pytest.mark.parametrize(
    ("value", "observation"),
    [
        ("text", "text"),
        ("", ""),
        (None, ""),
        (3, "3"),
        (2.5, "2.5"),
        (True, "true"),
        ({"a": [1, None]}, '{"a":[1,null]}'),
        ({"name": "é"}, '{"name":"é"}'),
        ([1, "b"], '[1,"b"]'),
        (Point(x=1), '{"x":1,"y":0}'),
        (float("nan"), "NaN"),
        ({1: object}, '{"1":"<class \'object\'>"}'),
    ],
)
def test_values_are_normalised(value: Any, observation: str) -> None:
    assert normalise(value) == ToolResult(observation)


def test_tool_result_is_taken_as_it_is() -> None:
    result = ToolResult("x", metrics={"files": 2}, control="end")
    assert normalise(result) is result


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (ToolResult({"a": 1}), "observation is dict, not text"),  # type: ignore[arg-type]
        (ToolResult(None), "observation is NoneType, not text"),  # type: ignore[arg-type]
        (ToolResult("x", control="stop"), "control 'stop' is unknown"),  # type: ignore[arg-type]
        (ToolResult("x", metrics=[1]), "metrics is list, not a dict"),  # type: ignore[arg-type]
        (ToolResult("x", metrics={"loss": float("nan")}), "metric 'loss' is nan, not a finite number"),
        (ToolResult("x", metrics={"loss": float("inf")}), "metric 'loss' is inf, not a finite number"),
        (ToolResult("x", metrics={"loss": "1"}), "metric 'loss' is '1', not a finite number"),  # type: ignore[dict-item]
        (ToolResult("x", metrics={"exit_code": None}), "metric 'exit_code' is None"),  # type: ignore[dict-item]
        (ToolResult("x", metrics={7: 1}), "metric 7 is not a name"),  # type: ignore[dict-item]
        (ToolResult("x", metrics={"caf\udce9": 1}), "is not a name"),
    ],
)
def test_wrong_tool_result_is_refused(result: ToolResult, problem: str) -> None:
    with pytest.raises(ToolResultInvalid, match=problem) as error:
        normalise(result, "search")
    assert error.value.message.startswith("tool search: ToolResult: ")
    assert error.value.hints


def test_integer_beyond_floats_is_no_metric() -> None:
    with pytest.raises(ToolResultInvalid, match="not a finite number"):
        normalise(ToolResult("x", metrics={"n": 10**400}))


def test_command_result_gives_its_text_and_exit_code() -> None:
    ran = ExecResult(
        exit_code=2, signal=None, stdout="out\n", stderr="no such file\n", stdout_truncated=False,
        stderr_truncated=False, timed_out=False, oom=False, wall_s=0.1, cpu_s=0.1,
    )  # fmt: skip
    assert normalise(ran) == ToolResult("out\nno such file", metrics={"exit_code": 2})


async def test_mutable_default_is_fresh_in_every_call() -> None:
    @tool
    def gather(item: str, into: list[str] = []) -> str:  # noqa: B006
        """Gather items."""
        into.append(item)
        return ",".join(into)

    assert [(await gather.run({"item": item}, context())).observation for item in "ab"] == ["a", "b"]


# 5. a tool is still the function


async def test_calling_the_tool_calls_the_function() -> None:
    assert await search("x", context(), tags=["t"]) == "x 10 ['t']"
    assert (search.__name__, search.__doc__ and search.__doc__.splitlines()[0]) == (
        "search",
        "Search the index.",
    )
    assert repr(search).startswith("<tool search(query: str, ctx:")


# 6. plain tools run in a thread


async def test_plain_tool_runs_beside_the_loop() -> None:
    @tool
    def where() -> str:
        """Tell the thread."""
        return threading.current_thread().name

    assert (await where.run({}, context())).observation == "agentfly-call"


async def test_context_is_injected_by_name() -> None:
    @tool
    async def who(ctx: Context) -> str:
        """Tell the rollout."""
        return ctx.rollout_id

    assert (await who.run({}, context())).observation == "r"
