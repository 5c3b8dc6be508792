"""What a rollout leaves behind, as data with a version.

Guarantees:
1. A row holds token ids exactly as the model saw and sampled them, with one mask bit and one log-probability
   for each response token; it never ends on a token that was not sampled. Its steps say which turn sampled
   which of them.
2. Every trajectory has the same fields, whatever its outcome; its numbers are finite.
3. JSON in, JSON out: ``Trajectory.model_validate_json(t.model_dump_json()) == t``.

Not here: writing and reading files (``jsonl``), building rows (``ledger``).
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, computed_field, model_validator

from agentfly.rollout.outcomes import Outcome, Scored

SCHEMA: Literal["agentfly.trajectory/v1"] = "agentfly.trajectory/v1"


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True)


class WeightSpan(_Data):
    """Response tokens ``start`` to ``end`` (exclusive) were sampled by weights of this version."""

    version: str | None
    start: int
    end: int


class RowStep(_Data):
    """One turn of a rollout, as it stands in a row: response tokens ``start`` to ``end`` (exclusive).

    ``turn`` counts from 1 through the whole rollout. ``anchor`` is the state that the answer was given in, as
    text that is equal where states are equal; None compares with nothing. ``step_reward`` was given for this
    turn alone; what the rollout is worth as a whole is no part of it.
    """

    turn: int = Field(ge=1)
    start: int = Field(ge=0)
    end: int
    anchor: str | None = None
    step_reward: FiniteFloat = 0.0


class Row(_Data):
    """One training sequence: ``prompt_ids + response_ids``.

    ``response_ids``, ``response_mask`` and ``logprobs`` have one entry for each response token. The mask is 1
    where the policy sampled the token; log-probabilities (natural logarithm, of the sampled token) are 0.0
    where the mask is 0. ``steps`` are the turns whose answers stand in it, in order; without overlap they
    cover every sampled token. ``images`` are the numbers of the trajectory's images whose tokens stand in it,
    in order.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[Annotated[int, Field(ge=0, le=1)]]
    logprobs: list[FiniteFloat]
    weight_versions: list[WeightSpan] = []
    steps: list[RowStep] = []
    images: list[Annotated[int, Field(ge=0)]] = []

    @model_validator(mode="after")
    def _check(self) -> Self:
        lengths = (len(self.response_ids), len(self.response_mask), len(self.logprobs))
        if len(set(lengths)) != 1:
            raise ValueError(f"row: {lengths} response ids, mask bits and logprobs differ in number")
        if not self.response_mask or self.response_mask[-1] != 1:
            raise ValueError("row: does not end on a sampled token")
        for bit, logprob in zip(self.response_mask, self.logprobs, strict=True):
            if bit == 0 and logprob != 0.0:
                raise ValueError(f"row: logprob {logprob} stands on a token that was not sampled")
        self._check_steps()
        return self

    def _check_steps(self) -> None:
        """Rows of files that were written before there were steps have none."""
        covered = [0] * len(self.response_mask)
        turn = end = 0
        for step in self.steps:
            if step.turn <= turn or not end <= step.start < step.end <= len(covered):
                raise ValueError(f"row: turn {step.turn} at {step.start} to {step.end} is out of order")
            covered[step.start : step.end] = [1] * (step.end - step.start)
            turn, end = step.turn, step.end
        if self.steps and covered != self.response_mask:
            raise ValueError("row: steps and sampled tokens differ")


class ToolCallRecord(_Data):
    """One tool call as it went.

    ``error`` is None for a call that ran; otherwise ``unknown_tool``, ``invalid_arguments``, ``timeout`` or
    ``exception: <line>``. ``turn`` counts from 1. ``step_reward`` and ``anchor`` are the tool's own, for
    estimators that credit steps (see ``ToolResult``).
    """

    turn: int
    name: str
    arguments: dict[str, Any]
    exit_code: int | None = None
    seconds: float
    error: str | None = None
    observation_chars: int
    step_reward: FiniteFloat | None = None
    anchor: str | None = None


class ResourceUse(_Data):
    """One resource that the rollout held, and how long it waited for it."""

    pool: str
    member_id: str
    incarnation: int
    wait_seconds: float


class Drift(_Data):
    """How far the rollout's tokens are from its text.

    ``drifted`` of the ``tokens`` are those that a trainer would get wrong if it re-tokenised the text, and
    those that were given up. The latter are ``realigned``; ``forks`` counts the rows that had to be begun
    because the chat template rewrote what came before.
    """

    tokens: int = 0
    drifted: int = 0
    forks: int = 0
    realigned: int = 0


class Trajectory(_Data):
    """One finished rollout.

    ``stop_reason`` says why the last turn was the last: ``done`` (an answer without a call), ``end`` (a tool
    said so), ``turns``, ``context``, ``length`` (an answer cut by its token limit), or empty when the rollout
    did not get that far. ``attempt`` counts from 0; ``started_at`` is Unix time; ``seconds`` covers all
    attempts. ``metrics`` are sums over the tool calls, and what each of several rewards said
    as ``reward/<name>``. ``images`` are data URLs, which rows and messages name by their numbers, from 0.
    """

    schema_: Literal["agentfly.trajectory/v1"] = Field(default=SCHEMA, alias="schema")
    rollout_id: str
    group_id: str
    task: dict[str, Any]
    attempt: int = 0
    rows: list[Row] = []
    messages: list[dict[str, Any]] = []
    images: list[str] = []
    turns: int = 0
    stop_reason: str = ""
    tool_calls: list[ToolCallRecord] = []
    resources: list[ResourceUse] = []
    outcome: Outcome
    drift: Drift = Drift()
    metrics: dict[str, FiniteFloat] = {}
    started_at: float
    seconds: float

    model_config = ConfigDict(frozen=True, populate_by_name=True, serialize_by_alias=True)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def reward(self) -> float | None:
        """The reward of a scored rollout, else None."""
        return self.outcome.reward if isinstance(self.outcome, Scored) else None

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the policy sampled, over all rows."""
        return sum(sum(row.response_mask) for row in self.rows)
