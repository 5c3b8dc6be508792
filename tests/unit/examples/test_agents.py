"""The agents of examples/agents, each played against a model that says what it is told."""

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentfly import Agent, Chain, Step, Trajectory
from agentfly.api.load import load_manifests
from agentfly.refs import load
from agentfly.resources.lease import Holdings, Lease, LeaseInfo
from agentfly.rollout import Scored, rollout_one
from tests.unit.rollout import toys
from tests.unit.rollout.talkers import says, serving
from tests.unit.rollout.toys import FakeResources, Script, ToyTokenizer, call

AGENTS = Path(__file__).parents[3] / "examples" / "agents"
NAMES = sorted(path.stem for path in AGENTS.glob("*.py"))
LONG = {"max_context_tokens": 100_000, "max_prompt_tokens": 100_000, "max_tokens_per_turn": 1000}


def part(name: str, what: str) -> Any:
    return load(f"{name}.py:{what}", AGENTS)


def row(name: str) -> dict[str, Any]:
    return next(iter(part(name, "tasks")(seed=0)))


async def play(name: str, *said: str, **options: Any) -> Trajectory:
    tokenizer = ToyTokenizer(toys.grouping)
    options.setdefault("strategy", Chain(**LONG))
    return await rollout_one(
        part(name, "agent"), row(name), model=Script(tokenizer, *said), tokenizer=tokenizer, **options
    )


def observed(trajectory: Trajectory) -> list[str]:
    return [message["content"] for message in trajectory.messages if message["role"] == "tool"]


@pytest.mark.parametrize("name", NAMES)
def test_every_row_has_what_the_agent_asks_for(name: str) -> None:
    agent, rows = part(name, "agent"), list(part(name, "tasks")(seed=0))
    assert isinstance(agent, Agent)
    assert rows
    for number, task in enumerate(rows):
        agent.check(task, f"row {number}")
        assert agent.messages(task)


def test_every_agent_is_in_the_list() -> None:
    told = (AGENTS / "README.md").read_text()
    assert [name for name in NAMES if f"[{name}.py]({name}.py)" not in told] == []


def test_the_pools_are_right() -> None:
    for name in ("shell", "judge"):
        assert [pool.metadata.name for pool in load_manifests(AGENTS / f"{name}.yaml").pools] == [name]


async def test_lookup_finds_the_answer_by_its_tools() -> None:
    trajectory = await play(
        "lookup",
        call("search", words=["black forest"]) + call("search", words=["sea"], match="any"),
        call("read", page="danube"),
        "It is 2,850",
    )
    assert observed(trajectory)[:2] == ['["danube"]', '["rhine","danube","elbe"]']
    assert "2,850 km" in observed(trajectory)[2]
    assert trajectory.outcome == Scored(1.0)


async def test_lookup_is_told_which_pages_there_are() -> None:
    trajectory = await play("lookup", call("read", page="nile"), "unknown")
    assert observed(trajectory) == ["there is no page nile; there are: rhine, danube, elbe"]
    assert trajectory.outcome == Scored(0.0)


async def test_checklist_is_the_rollouts_own_and_ends_it() -> None:
    items = row("checklist")["items"]
    ticks = [call("tick", item=item) for item in [items[0], "nothing", items[2], items[1]]]
    for _ in range(2):
        trajectory = await play("checklist", call("look"), *ticks)
        assert (trajectory.stop_reason, trajectory.metrics["wrong_ticks"]) == ("end", 1)
        assert trajectory.outcome == Scored(1 / 3)
        assert [record.step_reward for record in trajectory.tool_calls] == [None, 1.0, None, 1.0, 1.0]


async def test_maze_shows_where_it_stands_and_nothing_else() -> None:
    strategy: Step = part("maze", "strategy")
    tokenizer = ToyTokenizer(toys.chatml)
    way = ["west", "east", "south", "east", "south"]
    model = Script(tokenizer, *[call("go", where=where) for where in way])
    trajectory = await rollout_one(
        part("maze", "agent"),
        row("maze"),
        model=model,
        tokenizer=tokenizer,
        strategy=Step(**{**vars(strategy), **LONG}),
    )
    prompts = [tokenizer.decode(ids) for ids in model.prompts]
    assert prompts[1].count("<|im_start|>") == prompts[4].count("<|im_start|>") == 4
    assert "Step 2. There is a wall. You stand at column 0, row 0. You can go: east." in prompts[1]
    assert "Step 5. You stand at column 2, row 1." in prompts[4]
    assert (trajectory.outcome, trajectory.stop_reason) == (Scored(1.0), "end")
    steps = [(step.anchor, step.step_reward) for row in trajectory.rows for step in row.steps]
    assert steps == [("", -0.1), ("0,0", 0.0), ("1,0", 0.0), ("1,1", 0.0), ("2,1", 0.0)]


# agents with resources of their own


class At(FakeResources):
    """Leases of one API at this address."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address

    async def acquire(self, pool_or_spec: Any, owner: str, *, key: str = "default", **_: Any) -> Lease:
        info = LeaseInfo(
            lease_id="lease", pool=str(pool_or_spec), owner=owner, key=key, member_id="m", incarnation=1,
            kind="external-api", address=self.address, token="of the lease", ttl_s=30,
        )  # fmt: skip
        return Lease(info, self, Holdings(self))


@pytest.mark.parametrize(
    ("grade", "reward"), [("8", 0.8), (" 10/10.", 1.0), ("11", 1.0), ("very good", None), ("8 or 9", None)]
)
async def test_explanation_is_worth_what_the_judge_says(grade: str, reward: float | None) -> None:
    asked: list[tuple[str, str]] = []

    async def judge(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append((body["messages"][0]["content"], request.headers["authorization"]))
        return web.json_response(says(grade))

    async with serving({"/api/chat/completions": judge}) as url:
        trajectory = await play("explain", "Light is scattered.", resources=At(f"{url}/api"))
    assert trajectory.reward == reward
    ((question, key),) = asked
    assert "why the sky is blue:\nLight is scattered." in question
    assert key == "Bearer of the lease"


async def test_explanation_without_a_judge_is_not_worth_nothing() -> None:
    trajectory = await play("explain", "Light is scattered.", resources=At("http://127.0.0.1:9"))
    assert (trajectory.reward, trajectory.outcome.type) == (None, "failed")
