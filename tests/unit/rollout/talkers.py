"""An API that says what it is told, for rollouts with a ChatModel."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from aiohttp import web

from agentfly.models import ChatModel


def says(text: str | None, *calls: tuple[str, str], tokens: int = 3, **choice: Any) -> dict[str, Any]:
    """An answer with calls of the API: names and arguments as text."""
    made = [
        {"id": f"x{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": text, "tool_calls": made or None}
    usage = {"prompt_tokens": 10, "completion_tokens": tokens}
    return {"choices": [{"message": message, "finish_reason": "stop", **choice}], "usage": usage}


@contextlib.asynccontextmanager
async def talking(*answers: dict[str, Any]) -> AsyncIterator[tuple[ChatModel, list[dict[str, Any]]]]:
    """A model that gives these answers, one after the other and the last one for ever; what it was asked."""
    asked: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response(answers[min(len(asked), len(answers)) - 1])

    async with serving({"/v1/chat/completions": answer}) as url, ChatModel(f"{url}/v1", "m") as model:
        yield model, asked


@contextlib.asynccontextmanager
async def serving(routes: dict[str, Any]) -> AsyncIterator[str]:
    """A server on the loopback."""
    app = web.Application()
    for path, handler in routes.items():
        app.router.add_post(path, handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def roles(messages: Sequence[dict[str, Any]]) -> list[str]:
    return [message["role"] for message in messages]
