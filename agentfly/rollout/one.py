"""One rollout, from a task's row to a trajectory.

Guarantees:
1. Whatever happens inside, a trajectory comes back; only cancellation is raised, and what could never be
   played with these arguments. One failing rollout never touches another.
2. One rollout is one scope: leaving it however (done, error, deadline, cancel) releases its leases first.
3. An infrastructure failure is retried as a whole in a fresh context, at most ``max_infra_retries`` times;
   then it is ``Failed`` with the error's type as reason. It is never a reward.
4. A sandbox that is lost after the policy's first call is ``Failed("SandboxLost")`` at once, without a reward
   and without a retry (see below).
5. ``deadlines.rollout`` bounds each attempt: ``Masked("deadline")``, or ``Failed("Timeout")`` if it was spent
   waiting for a resource. An answer or calls over ``deadlines.turn`` are ``Masked("turn_deadline")``: a retry
   would draw again only where the policy wrote much.
6. A reward outside its contract is ``Failed("RewardInvalid")`` with the value; None is
   ``Masked("unscored")`` with the name of the reward.
7. The message of a failure has the remedies of its error; that of the user's own code names the function and
   its line.

Why a lost sandbox is final: from outside, a node that died and a policy that killed its sandbox look the
same. A reward of 0 would blame the policy for nodes. A retry would blame nobody and be worse: drawing again
only where the policy destroyed its sandbox selects among its rollouts, so a policy that destroys it whenever
it is about to fail would be paid for its best draw. Without a reward there is no gradient, so nothing is
reinforced; and as a failure of its own name it is counted, and a policy that makes a habit of it exhausts the
failure budget in sight of people. Before the policy's first call nothing of it ran, so there a retry selects
nothing.
"""

import asyncio
import contextlib
import logging
import os
import time
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentfly.agent import Agent
from agentfly.context import Context, Deadlines
from agentfly.errors import AgentflyError
from agentfly.models import ChatModel, Sampling, TokenModel
from agentfly.resources.errors import Saturated
from agentfly.resources.lease import Resources
from agentfly.resources.nothing import NoPools
from agentfly.rollout.chain import Chain
from agentfly.rollout.credits import credits_of
from agentfly.rollout.errors import is_infrastructure, is_loss
from agentfly.rollout.ledger import TokenLedger
from agentfly.rollout.media import AnyImage, ImageReader, Media
from agentfly.rollout.outcomes import Failed, Masked, Scored
from agentfly.rollout.play import COUNTED, Ended, Play, Strategy
from agentfly.rollout.template import Tokenizer
from agentfly.rollout.trajectory import Drift, ResourceUse, Trajectory
from agentfly.rollout.transcript import Transcript

logger = logging.getLogger(__name__)

_OURS = str(Path(__file__).parents[1]) + os.sep
SANDBOX_LOST = "SandboxLost"
"""The reason of a rollout whose sandbox was lost after the policy's first call."""

# What an exception of the user's own code is called in the outcome, by phase.
_REASONS = {"prompt": "PromptError", "setup": "SetupError", "parse": "ParserError", "reward": "RewardError"}


@dataclass(frozen=True)
class _Inputs:
    """What all attempts at one rollout share."""

    agent: Agent
    model: TokenModel | ChatModel
    begin: Callable[[list[dict[str, Any]], Media], TokenLedger | Transcript]
    images: ImageReader | None
    strategy: Strategy
    sampling: Sampling
    rollout_id: str
    group_id: str


@dataclass
class _Attempt:
    """What one attempt left; ``again`` says that a fresh one is worth it, after ``pause`` seconds."""

    ctx: Context
    outcome: Scored | Masked | Failed = field(default_factory=lambda: Failed("RolloutError"))
    play: Play | None = None
    stop_reason: str = ""
    drift: Drift = field(default_factory=Drift)
    again: bool = False
    pause: float = 0.0


async def rollout_one(
    agent: Agent,
    task: Mapping[str, Any],
    *,
    model: TokenModel | ChatModel,
    tokenizer: Tokenizer | None = None,
    images: ImageReader | None = None,
    resources: Resources | None = None,
    strategy: Strategy | None = None,
    deadlines: Deadlines | None = None,
    sampling: Sampling | None = None,
    rollout_id: str = "rollout",
    group_id: str = "task",
    max_infra_retries: int = 1,
) -> Trajectory:
    """Play one rollout and judge it.

    What is left out is as in a job of which nothing was said: ``Chain()``, ``Deadlines()``, ``Sampling()``.

    Args:
        agent: what to play; shared by any number of rollouts.
        task: the task's row, as JSON has it.
        model: where tokens come from; or an API of text, which leaves a trajectory without rows to train on.
        tokenizer: of a model of tokens.
        images: how such a model sees images; None: it reads text alone.
        resources: where leases come from; None: the agent acquires nothing.
        strategy: how turns follow one another: ``Chain`` or ``Step``.
        deadlines: limits in seconds.
        sampling: how to draw; its ``max_tokens`` is replaced by the strategy's limits.
        rollout_id: the same for every attempt, also after a restart of the job.
        group_id: shared by the rollouts of one task that are compared with one another.
        max_infra_retries: further attempts after an infrastructure failure.

    Raises:
        AgentflyError: these arguments cannot be played, whatever the task.
    """
    deadlines, resources = deadlines or Deadlines(), resources or NoPools()
    strategy, sampling = strategy or Chain(), sampling or Sampling()
    if isinstance(strategy, type) or not callable(getattr(strategy, "run", None)):
        name = strategy.__name__ if isinstance(strategy, type) else repr(strategy)
        hints = ["pass an object, as in strategy=Step(history=2), or leave it out for Chain()"]
        raise AgentflyError(f"strategy: {name} is not a strategy", hints=hints)
    begin = _account(agent, model, tokenizer, sampling.stop_token_ids)
    reader = AnyImage() if isinstance(model, ChatModel) else images
    inputs = _Inputs(agent, model, begin, reader, strategy, sampling, rollout_id, group_id)
    started_at, began = time.time(), time.monotonic()
    for number in range(max_infra_retries + 1):
        attempt = _Attempt(Context(rollout_id, task, resources, number, deadlines))
        try:
            await _bounded(attempt, inputs)
        finally:
            await attempt.ctx.close()
        if not attempt.again or number == max_infra_retries:
            break
        logger.warning("rollout %s: attempt %d: %s", rollout_id, number, attempt.outcome)
        await asyncio.sleep(min(attempt.pause, deadlines.rollout))
    return _trajectory(attempt, inputs, started_at, time.monotonic() - began)


async def _bounded(attempt: _Attempt, inputs: _Inputs) -> None:
    """Play one attempt within the rollout's deadline; what went wrong becomes its outcome."""
    ctx, limit = attempt.ctx, None
    try:
        async with asyncio.timeout(ctx.deadlines.rollout) as limit:
            await _play(attempt, inputs)
    except Ended as ended:
        attempt.outcome = ended.outcome
    except (Exception, SystemExit) as error:
        if limit is not None and limit.expired():
            attempt.outcome = _over(ctx)
        else:
            _fail(attempt, error)


async def _play(attempt: _Attempt, inputs: _Inputs) -> None:
    agent, ctx, task = inputs.agent, attempt.ctx, attempt.ctx.task
    where = f"the row of {inputs.group_id}"
    agent.check(task, where)
    media = Media(inputs.images)
    messages = await media.take(agent.messages(task, where))
    ledger = inputs.begin(messages, media)
    ctx.messages, ctx.images = messages, media.urls
    attempt.play = play = Play(agent, ctx, inputs.model, ledger, inputs.sampling, messages, media)
    async with _limited(ctx, Failed("SetupTimeout", "setup: over a turn's limit")):
        await agent.prepare(task, ctx)
    attempt.stop_reason = await inputs.strategy.run(play)
    if not ledger.sampled_tokens:
        raise Ended(Failed("PromptTooLong", f"prompt: {len(ledger)} tokens leave no room for an answer"))
    attempt.drift = ledger.drift()
    play.phase = "reward"
    async with _limited(ctx, Masked("reward_deadline", f"reward {agent.reward.name}: over a turn's limit")):
        score = await agent.reward.score(task, ctx)
    for name, value in score.parts.items():
        play.count(f"reward/{name}", value)
    attempt.outcome = _unscored(score.unscored) if score.value is None else Scored(score.value)


def _unscored(by: Sequence[str]) -> Masked:
    return Masked("unscored", f"reward {', '.join(by)} returned None" if by else "")


def _account(
    agent: Agent, model: TokenModel | ChatModel, tokenizer: Tokenizer | None, stop_ids: Sequence[int]
) -> Callable[[list[dict[str, Any]], Media], TokenLedger | Transcript]:
    """What makes the account of an attempt from its first messages: in tokens, or in text."""
    if isinstance(model, ChatModel):
        parser = agent.parser_for(None)
        return lambda messages, media: Transcript(model, messages, agent.schemas(), parser, media)
    if tokenizer is None:
        raise AgentflyError(
            f"tokenizer: is missing, and a {type(model).__name__} reads token ids",
            hints=["pass the policy's tokenizer, as AutoTokenizer.from_pretrained gives it"],
        )
    parser = agent.parser_for(tokenizer)
    return lambda messages, media: TokenLedger(tokenizer, messages, agent.schemas(), stop_ids, parser, media)


@contextlib.asynccontextmanager
async def _limited(ctx: Context, over: Masked | Failed) -> AsyncIterator[None]:
    """A turn's time for what is inside; after that the rollout has the given outcome."""
    limit = None
    try:
        async with ctx.limit(ctx.deadlines.turn) as limit:
            yield
    except TimeoutError:
        if limit is not None and limit.expired():
            raise Ended(over) from None
        raise


def _over(ctx: Context) -> Masked | Failed:
    """The outcome after the rollout's deadline; must be asked before the context is closed."""
    seconds = ctx.deadlines.rollout
    if ctx.waiting_for:
        return Failed("Timeout", f"still waiting for {', '.join(ctx.waiting_for)} after {seconds:g} s")
    return Masked("deadline", f"rollout took more than {seconds:g} s")


def _fail(attempt: _Attempt, error: BaseException) -> None:
    """Turn an exception into the attempt's outcome, and decide whether another attempt is worth it."""
    play, ctx = attempt.play, attempt.ctx
    phase = play.phase if play is not None else "prompt"
    reason, message = type(error).__name__, str(error)
    if isinstance(error, AgentflyError):
        message = "; ".join([error.message, *(f"hint: {hint}" for hint in error.hints)])
    if is_infrastructure(error):
        acted = play is not None and play.metrics["tool_calls"] > 0 and bool(ctx.uses)
        if is_loss(error) and error is not ctx.acquire_error and acted:
            reason, message = SANDBOX_LOST, f"{phase}: {reason}: {message}"
        else:
            attempt.again = True
            attempt.pause = error.retry_after if isinstance(error, Saturated) else 0.0
    elif not isinstance(error, AgentflyError):
        message = f"{phase}: {reason}: {message}{_place(error)}"
        reason = _REASONS.get(phase, "RolloutError")
        logger.warning("rollout %s: %s", ctx.rollout_id, message, exc_info=error)
    # A file's name may hold half of a surrogate pair, which cannot be written down.
    attempt.outcome = Failed(reason, message.encode("utf-8", "replace").decode())


def _place(error: BaseException) -> str:
    """Where the user's own function was when it raised; empty if it was not one of theirs."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((_OURS, "<frozen"))]
    return f" ({own[0].name} at {own[0].filename}:{own[0].lineno})" if own else ""


def _trajectory(attempt: _Attempt, inputs: _Inputs, started_at: float, seconds: float) -> Trajectory:
    play = attempt.play
    rows = play.ledger.rows(credits_of(play.turns, play.calls)) if play is not None else []
    return Trajectory(
        rollout_id=inputs.rollout_id,
        group_id=inputs.group_id,
        task=dict(attempt.ctx.task),
        attempt=attempt.ctx.attempt,
        rows=rows,
        messages=play.messages if play is not None else [],
        images=play.media.urls if play is not None else [],
        turns=play.turns if play is not None else 0,
        stop_reason=attempt.stop_reason,
        tool_calls=play.calls if play is not None else [],
        resources=[ResourceUse(**vars(use)) for use in attempt.ctx.uses],
        outcome=attempt.outcome,
        drift=attempt.drift,
        metrics=play.metrics if play is not None else dict.fromkeys(COUNTED, 0.0),
        started_at=started_at,
        seconds=seconds,
    )
