"""What the guides show is true: manifests are accepted, objects work, links lead somewhere."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from agentfly import Agent, AgentflyError, Context, Step, ToolResult
from agentfly.agent.parsers import PARSERS
from agentfly.api import ResourcePool, Rollout
from agentfly.api.load import load_manifests
from agentfly.api.reasons import ConditionType, Reason, RolloutJobPhase, TrainingRunPhase
from agentfly.broker.pools import pool_spec
from agentfly.cli import _parser
from agentfly.context import Deadlines
from agentfly.refs import load
from agentfly.resources.nothing import NoPools
from agentfly.rollout import StepTurn, StepView

DOCS = Path(__file__).parents[2] / "docs"
POOLS = (DOCS / "pools.md").read_text()
AGENTS = (DOCS / "agents.md").read_text()


BEFORE, CLUSTER = POOLS.split("## In a cluster")


def blocks(language: str, text: str = POOLS) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


POOL_BLOCKS = [(text, "local") for text in blocks("yaml", BEFORE)]
POOL_BLOCKS += [(text, "kubernetes") for text in blocks("yaml", CLUSTER)]


def pool_of(folder: Path, text: str) -> ResourcePool:
    file = folder / "pool.yaml"
    file.write_text(text)
    (pool,) = load_manifests(file).pools
    return pool


@pytest.mark.parametrize(
    ("text", "platform"), POOL_BLOCKS, ids=[re.search(r"name: ([\w-]+)", text)[1] for text, _ in POOL_BLOCKS]
)
def test_every_pool_of_the_guide_is_one(tmp_path, text, platform):
    pool = pool_of(tmp_path, text)
    assert pool_spec(pool, platform=platform).name == pool.metadata.name


def test_the_quota_of_the_guide_is_worth_what_it_says(tmp_path):
    (text,) = [text for text in blocks("yaml") if "name: swe-envs" in text]
    found = re.search(r"here (\d+) of the (\d+) that `max` allows", POOLS)
    pool = pool_of(tmp_path, text)
    assert pool.spec.capacity.max == int(found[2])
    assert pool_spec(pool, platform="kubernetes").max == int(found[1])


def test_the_conditions_of_the_guide_are_those_of_pools():
    told = set(re.findall(r"^\| `(\w+)` \|", POOLS.partition("| condition |")[2], re.M))
    others = {"RolesReady", "Admitted", "Running", "Suspended", "Checkpointed"}
    others |= {"Succeeded", "Failed", "Finished"}
    assert told == set(ConditionType) - others


def test_the_words_of_the_guide_to_runs_are_those_of_status():
    text = (DOCS / "training.md").read_text()
    table = text.partition("| condition | reason |")[2].partition("\n\n")[0]
    for types, reasons in re.findall(r"^\| (`\w+`) \| (`[^|]+`)[^|]*\|", table, re.M):
        assert set(re.findall(r"`(\w+)`", types)) <= set(ConditionType)
        assert set(re.findall(r"`(\w+)`", reasons)) <= set(Reason)
    phases = set(
        re.findall(r"`([A-Z][a-z]+)`", text.partition("## What it goes through")[2].partition("\n- ")[0])
    )
    assert phases == set(TrainingRunPhase)
    assert set(RolloutJobPhase) < phases


def test_the_object_of_the_guide_proves_its_reset(tmp_path):
    (tmp_path / "games.py").write_text(blocks("python")[0])
    game = load("games.py:Game", tmp_path)(size=5)
    first = list(game.fingerprint())
    assert game.move(2) == "..x.."
    game.reset()
    assert game.fingerprint() == first


def test_the_python_of_the_guide_to_agents_works(tmp_path):
    source = "\n\n".join(blocks("python", AGENTS))
    (tmp_path / "guide.py").write_text(source)
    agent = load("guide.py:agent", tmp_path)
    assert [schema["function"]["name"] for schema in agent.schemas()] == ["search"]
    search = agent.schemas()[0]["function"]["parameters"]["properties"]
    assert search["limit"] == {"type": "integer", "default": 10, "description": "at most so many results."}
    shelf = load("guide.py:Shelf", tmp_path)(places=1)
    assert shelf.put("book").control == "end"
    noting = load("guide.py:noting", tmp_path)
    assert list(noting.tools) == ["remember", "recall", "forget", "search"]
    for name in ("windowed", "remembering", "summing_up", "own"):
        assert isinstance(load(f"guide.py:{name}", tmp_path), Step)
    own = load("guide.py:board", tmp_path)(StepView({"issue": "a bug"}, [], [], 1, ctx=None))
    assert own == [{"role": "user", "content": "a bug\n\nStep 1. Nothing was done yet."}]


async def test_the_rewards_of_the_guide_judge_what_it_says(tmp_path):
    (tmp_path / "guide.py").write_text("\n\n".join(blocks("python", AGENTS)))
    parts = {name: load(f"guide.py:{name}", tmp_path) for name in ("Shelf", "filled", "brief")}
    ctx = Context("r", {"places": 4}, NoPools())
    agent = Agent(prompt="go", tools=[parts["Shelf"]], reward={parts["filled"]: 1.0, parts["brief"]: 0.1})
    await agent.prepare(ctx.task, ctx)
    ctx.instance(parts["Shelf"]).put("book")
    score = await agent.reward.score(ctx.task, ctx)
    assert (score.value, dict(score.parts)) == (0.25, {"filled": 0.25, "brief": 0.0})


def test_the_error_of_the_guide_is_that_of_a_tool_without_a_type(tmp_path):
    (tmp_path / "guide.py").write_text(blocks("python", AGENTS)[0].replace("limit: int = 10", "limit=10"))
    with pytest.raises(AgentflyError) as caught:
        load("guide.py:search", tmp_path)
    (told,) = blocks("text", AGENTS)
    assert told.strip() in caught.value.message


def test_the_tables_of_the_guide_have_every_parser_and_field():
    parsers = AGENTS.partition("| `parser` |")[2].partition("\n\n")[0]
    named = re.findall(r"`([^`]+)`", " ".join(line.split("|")[1] for line in parsers.splitlines()[2:]))
    assert set(named) - {"vllm:NAME", "parse(text)"} == set(PARSERS)
    results = AGENTS.partition("| field of `ToolResult` |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", results, re.M)) == {field.name for field in fields(ToolResult)}


def test_the_job_of_the_guide_to_agents_is_one(tmp_path):
    (text,) = blocks("yaml", AGENTS)
    pool = POOL_BLOCKS[0][0].replace("name: shell", "name: index")
    (tmp_path / "job.yaml").write_text(f"{pool}---\n{text}")
    (tmp_path / "agent.py").write_text("")
    (tmp_path / "tasks.jsonl").write_text("")
    (job,) = load_manifests(tmp_path / "job.yaml", models=False).jobs
    assert job.spec.rollout.group_size == 1
    assert len(text.splitlines()) == 9


def test_the_attributes_of_a_step_view_are_those_of_the_guide():
    table = AGENTS.partition("| attribute of `StepView` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == [field.name for field in fields(StepView)]
    for field in fields(StepTurn):
        assert f"`{field.name}`" in table


def test_the_limits_of_the_concepts_are_the_defaults():
    text = (DOCS / "concepts.md").read_text()
    told, rollout = dict(re.findall(r"`(\w+)` \((\d+)", text)), Rollout()
    found = {
        info.alias or name: str(getattr(block, name))
        for block in (rollout, rollout.timeouts)
        for name, info in type(block).model_fields.items()
    }
    assert len(told) == 7
    assert told.items() <= found.items()
    assert f"`max_prompt_tokens` is {Step().max_prompt_tokens}" in text
    each = Deadlines()
    assert f"Deadlines(call={each.call:g}, turn={each.turn:g}, rollout={each.rollout:g})" in text


def test_the_commands_of_the_guide_are_commands():
    for block in blocks("bash", AGENTS):
        for line in block.splitlines():
            _parser().parse_args(shlex.split(line, comments=True)[1:])


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target
