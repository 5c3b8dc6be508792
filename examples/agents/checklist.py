"""A class as tools: an agent with a list of its own, which lives as long as its rollout."""

from collections.abc import Iterator

from agentfly import Agent, Context, ToolResult, reward, tool


@tool
class Checklist:
    """What is to be done, in this rollout and no other. ``items`` comes from the task's row."""

    def __init__(self, items: list[str]) -> None:
        self.open = list(items)
        self.done: list[str] = []

    @tool
    def look(self) -> dict[str, list[str]]:
        """See what is open and what is done."""
        return {"open": self.open, "done": self.done}

    @tool
    def tick(self, item: str) -> ToolResult:
        """Mark an item as done. The last one ends the work.

        Args:
            item: as it stands in the list.
        """
        if item not in self.open:
            return ToolResult(f"{item} is not open", metrics={"wrong_ticks": 1})
        self.open.remove(item)
        self.done.append(item)
        if not self.open:
            return ToolResult("all is done", step_reward=1.0, control="end")
        return ToolResult(f"{len(self.open)} left", step_reward=1.0)


@reward
def in_order(ctx: Context, items: list[str]) -> float:
    """The share of items that were ticked, counted while their order was kept."""
    done = ctx.instance(Checklist).done
    kept = [wanted for wanted, ticked in zip(items, done, strict=False) if wanted == ticked]
    return len(kept) / len(items)


agent = Agent(
    prompt="Work through your checklist from its first item to its last. Look at it first.",
    tools=[Checklist],
    reward=in_order,
)


def tasks(seed: int) -> Iterator[dict[str, list[str]]]:
    yield {"items": ["open the file", "fix the bug", "run the tests"]}
