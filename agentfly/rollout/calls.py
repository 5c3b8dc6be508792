"""One tool call inside a rollout: deadline, errors, record.

Guarantees:
1. A call over its deadline is an observation ``timed out after N s`` and a metric; the rollout goes on.
   Waiting for a resource does not count.
2. An exception of the tool, or a ``ToolResult`` that is wrong, is an observation with its line and a metric;
   errors of resources and of the model are not the policy's and pass through, and so does cancellation. The
   line names the exception's class and says its message: no module, and no address of a sandbox. The
   traceback of the first one of a rollout is in the log.
3. An unknown tool, wrong arguments and a call that cannot be read are observations and metrics.
4. Calls of one turn run in the order in which they were written: later ones may rely on earlier ones.
5. A tool that shows images to a policy that reads text alone fails the rollout: the policy would be judged
   for what it could not see. Bytes that are no image are an exception of the tool.
6. An observation has at most ``OBSERVATION_CHARS`` characters; what was cut off is counted in its last line.
"""

import logging
import time
import traceback
from typing import Any

from agentfly.agent import Parsed, Tool, ToolCall, ToolResult
from agentfly.rollout.errors import ImageInvalid, is_for_the_policy
from agentfly.rollout.play import Play
from agentfly.rollout.trajectory import ToolCallRecord

logger = logging.getLogger(__name__)

OBSERVATION_CHARS = 1 << 18
"""More than contexts hold. A flood of text would be tokenised at the expense of every other rollout."""
# An exception may carry a whole response body; the policy needs its first line.
_ERROR_CHARS = 500


async def run_calls(play: Play, parsed: Parsed) -> tuple[list[dict[str, Any]], bool]:
    """Run a turn's calls; returns the messages for the policy, and whether a tool ended the rollout."""
    messages: list[dict[str, Any]] = []
    end = False
    for call in parsed.calls:
        result, images = await _run(play, call)
        messages.append(play.agent.observation(call.name, result.observation, images))
        end = end or result.control == "end"
    for reason in parsed.malformed:
        play.count("malformed_calls")
        told = play.media.harmless(f"malformed tool call: {reason}")
        messages.append(play.agent.observation("error", told))
    return messages, end


async def _run(play: Play, call: ToolCall) -> tuple[ToolResult, list[int]]:
    began = time.monotonic()
    play.count("tool_calls")
    tool = play.agent.tools.get(call.name)
    error: str | None
    if tool is None:
        known = ", ".join(play.agent.tools) or "none"
        result, error = ToolResult(f"unknown tool {call.name} (known: {known})"), "unknown_tool"
        play.count("unknown_tools")
    else:
        result, error = await _guarded(play, tool, call)
    images: list[int] = []
    try:
        images = [await play.media.add(image, f"tool {call.name}") for image in result.images]
    except ImageInvalid as wrong:
        result, error = _failed(play, call, wrong)
    observation = play.media.harmless(_fit(result.observation))
    metrics = dict(result.metrics)
    exit_code = metrics.pop("exit_code", None)
    for name, value in metrics.items():
        play.count(name, value)
    play.calls.append(
        ToolCallRecord(
            turn=play.turns,
            name=call.name,
            arguments=call.arguments,
            exit_code=None if exit_code is None else int(exit_code),
            seconds=time.monotonic() - began,
            error=error,
            observation_chars=len(observation),
            step_reward=result.step_reward,
            anchor=_writable(result.anchor) if result.anchor is not None else None,
        )
    )
    return ToolResult(observation, control=result.control), images


async def _guarded(play: Play, tool: Tool[..., Any], call: ToolCall) -> tuple[ToolResult, str | None]:
    seconds = play.ctx.deadlines.call
    limit = None
    try:
        async with play.ctx.limit(seconds) as limit:
            result = await tool.run(call.arguments, play.ctx)
    except (Exception, SystemExit) as error:
        if limit is not None and limit.expired():
            play.count("tool_timeouts")
            return ToolResult(f"timed out after {seconds:g} s"), "timeout"
        if not is_for_the_policy(error):
            raise
        return _failed(play, call, error)
    return result, "invalid_arguments" if "invalid_arguments" in result.metrics else None


def _failed(play: Play, call: ToolCall, error: BaseException) -> tuple[ToolResult, str]:
    line = _line(error)
    if not play.metrics["tool_errors"]:  # a policy that likes its error would fill a disk
        logger.warning("rollout %s: tool %s: %s", play.ctx.rollout_id, call.name, line, exc_info=error)
    play.count("tool_errors")
    return ToolResult(line), f"exception: {line}"


def _fit(text: str) -> str:
    """Text that can be tokenised, in a reasonable time."""
    if (beyond := len(text) - OBSERVATION_CHARS) > 0:
        text = f"{text[:OBSERVATION_CHARS]}\n[{beyond} more characters were dropped]"
    return _writable(text)


def _writable(text: str) -> str:
    # Half a surrogate pair, from the name of a file, has no encoding.
    return text.encode("utf-8", "replace").decode()


def _line(error: BaseException) -> str:
    text = traceback.format_exception_only(error)[-1].strip()
    text = text.removeprefix(f"{type(error).__module__}.")
    return _fit(text.splitlines()[0][:_ERROR_CHARS])
