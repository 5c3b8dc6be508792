"""A prompt of its own for every step: an agent that sees where it stands, and not how it got there."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from agentfly import Agent, Context, Step, ToolResult, reward, tool
from agentfly.rollout import StepView

MOVES = {"north": (0, -1), "south": (0, 1), "west": (-1, 0), "east": (1, 0)}


@tool
class Maze:
    """A map of lines, ``#`` a wall, from its upper left corner to its lower right one."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.x = self.y = 0

    @property
    def solved(self) -> bool:
        return (self.x, self.y) == (len(self.lines[0]) - 1, len(self.lines) - 1)

    def see(self) -> str:
        free = [name for name, (dx, dy) in MOVES.items() if self._is_free(self.x + dx, self.y + dy)]
        return f"You stand at column {self.x}, row {self.y}. You can go: {', '.join(free)}."

    @tool
    def go(self, where: Literal["north", "south", "west", "east"]) -> ToolResult:
        """Go one field.

        Args:
            where: the direction.
        """
        dx, dy = MOVES[where]
        moved = self._is_free(self.x + dx, self.y + dy)
        if moved:
            self.x, self.y = self.x + dx, self.y + dy
        return ToolResult(
            self.see() if moved else f"There is a wall. {self.see()}",
            step_reward=0.0 if moved else -0.1,
            anchor=f"{self.x},{self.y}",  # the state that it led to
            control="end" if self.solved else None,
        )

    def _is_free(self, x: int, y: int) -> bool:
        return 0 <= y < len(self.lines) and 0 <= x < len(self.lines[y]) and self.lines[y][x] != "#"


@reward
def out(ctx: Context) -> float:
    """1 for whoever found the way out."""
    return float(ctx.instance(Maze).solved)


def where_you_are(view: StepView) -> list[Mapping[str, Any]]:
    """The task, and what the last step led to: the prompt stays short however long the way is."""
    last = view.turns[-1].observations[-1]["content"] if view.turns else "You stand at column 0, row 0."
    *before, task = view.opening
    return [*before, {**task, "content": f"{task['content']}\nStep {view.number}. {last}"}]


agent = Agent(
    system="Find the way through a maze, from its upper left to its lower right corner.",
    prompt="The maze has {columns} columns and {rows} rows.",
    tools=[Maze],
    reward=out,
)
strategy = Step(max_turns=20, history=1, prompt_builder=where_you_are)


def tasks(seed: int) -> Iterator[dict[str, Any]]:
    yield {"lines": ["..#", "#..", "##."], "columns": 3, "rows": 3}
