"""Tools: what the model sees, what a definition must have, what a call does."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from agentfly.agent import Tool, ToolDefinitionError, tool
from agentfly.agent.tool import class_init, tools_of_class
from agentfly.context import Context
from tests.unit.rollout.toys import FakeResources


class Unit(Enum):
    METRE = "m"
    FOOT = "ft"


class Point(BaseModel):
    x: int
    y: int = 0


@dataclass
class Span:
    start: int
    end: int | None = None


class Entry(TypedDict):
    name: str
    sizes: list[int]


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
    "annotation",
    [Unit, Point, list[Point], Tree, Point | Unit, dict[str, list[Point | None]], Span, Entry, date],
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

    @tool
    def cut(span: Span, entry: Entry) -> str:
        """Cut an entry."""
        seen.append((span, entry))
        return ""

    await cut.run({"span": {"start": 1}, "entry": {"name": "a", "sizes": ["2"]}}, context())
    assert seen.pop() == (Span(1), {"name": "a", "sizes": [2]})
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


def misnamed(path: str, context: Context | None = None) -> str:
    """Read a file."""
    return ""


def called_back(done: "asyncio.Future[int]") -> str:
    """Use a future."""
    return ""


def takes_act(act: Callable[[], int]) -> str:
    """Call it."""
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
        (opaque, "tool opaque: parameter lock: threading.Thread has no JSON schema", "a pydantic model"),
        (called_back, "tool called_back: parameter done: _asyncio.Future[int] has no JSON", "a pydantic"),
        (takes_act, "tool takes_act: parameter act: collections.abc.Callable[[], int] has no JSON", "model"),
        (misnamed, "tool misnamed: parameter context is a Context, which is injected as ctx", "name it ctx"),
        (misdocumented, "tool misdocumented: the docstring describes file, which is not a parameter (has: p",
         "rename or remove file"),
        (unresolved, "tool unresolved: an annotation cannot be resolved", "import the type at module level"),
        (lambda path: path, "tool: <function <lambda>", "write it as `def name(...)`"),
        (str, "tool str: has no method that is a tool", "put @tool on the methods"),
        (len, "tool: <built-in function len> is not a function with a name", "with @tool"),
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


async def test_mutable_default_is_fresh_in_every_call() -> None:
    @tool
    def gather(item: str, into: list[str] = []) -> str:  # noqa: B006
        """Gather items."""
        into.append(item)
        return ",".join(into)

    assert [(await gather.run({"item": item}, context())).observation for item in "ab"] == ["a", "b"]


# 4. a tool is still the function


async def test_calling_the_tool_calls_the_function() -> None:
    assert await search("x", context(), tags=["t"]) == "x 10 ['t']"
    assert (search.__name__, search.__doc__ and search.__doc__.splitlines()[0]) == (  # type: ignore[attr-defined]
        "search",
        "Search the index.",
    )
    assert repr(search).startswith("<tool search(query: str, ctx:")


# 5. plain tools run in a thread


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


# 6. methods and classes


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    @tool
    def add(self, by: int) -> str:
        """Count on.

        Args:
            by: so many.
        """
        self.count += by
        return str(self.count)

    @tool
    async def where(self, ctx: Context) -> str:
        """Tell the rollout and the count."""
        return f"{ctx.rollout_id} {self.count}"

    def twice(self, by: int) -> str:
        self.add(by)
        return self.add(by)


def test_method_has_the_schema_of_its_own_parameters() -> None:
    assert Counter.add.parameters == {
        "type": "object",
        "properties": {"by": {"type": "integer", "description": "so many."}},
        "required": ["by"],
        "additionalProperties": False,
    }
    assert (Counter.add.lacks_object, Counter().add.lacks_object) == (True, False)


async def test_method_is_a_tool_of_the_object_that_it_is_taken_from() -> None:
    one, other = Counter(), Counter(10)
    assert (await one.add.run({"by": "2"}, context())).observation == "2"
    assert (await other.add.run({"by": 2}, context())).observation == "12"
    assert (await other.where.run({}, context())).observation == "r 12"
    assert (one.count, other.count) == (2, 12)


def test_calling_a_method_calls_the_method() -> None:
    counter = Counter()
    assert (counter.add(2), counter.twice(3)) == ("2", "8")


def test_class_with_tools_is_still_the_class() -> None:
    marked = tool(Counter)
    assert marked is Counter
    assert [found.name for found in tools_of_class(marked)] == ["add", "where"]
    assert not any(found.lacks_object for found in tools_of_class(marked))


def test_subclass_is_no_class_of_tools_before_it_says_so() -> None:
    class Faster(tool(Counter)):  # type: ignore[misc]
        @tool
        def add(self, by: int) -> str:
            """Count twice as fast."""
            return str(by)

    assert class_init(Counter) is not None
    assert class_init(Faster) is None
    assert next(found.description for found in tools_of_class(Faster)) == "Count twice as fast."


def test_class_that_cannot_be_made_from_a_row_is_told() -> None:
    class Open:
        def __init__(self, **options: str) -> None: ...

        @tool
        def look(self) -> str:
            """Look."""
            return ""

    with pytest.raises(ToolDefinitionError, match=r"tool class Open: parameter \*\*options: str"):
        tool(Open)
