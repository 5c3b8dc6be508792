"""A policy that can do the quickstart's task, in the place of vLLM: `python -m vllm.entrypoints.cli.main`.

Guarantees:
1. It looks, edits and says that it is done, by what stands in the conversation alone: every reward is 1.
2. It runs on any Python; all it knows of the model is the text of each token (``script.json`` beside it).

It is put into an image under vLLM's name by ``files``.
"""

import json
import re
import sys
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SCRIPT = "script.json"
_FOLDER = "/scripted"
_MODULE = "vllm/entrypoints/cli/main.py"


def files(site_packages: str) -> dict[str, bytes]:
    """This module as vLLM's, for an image whose Python has its packages there."""
    folders = [parent for parent in Path(_MODULE).parents if parent.name]
    return {
        f"{site_packages}/agentfly-scripted.pth": f"import sys; sys.path.insert(0, {_FOLDER!r})\n".encode(),
        f"{_FOLDER}/{_MODULE}": Path(__file__).read_bytes(),
        **{f"{_FOLDER}/{folder}/__init__.py": b"" for folder in folders},
    }


class Policy:
    """What it answers. ``pieces`` is the text of each token, ``end`` the one that ends an answer."""

    def __init__(self, pieces: list[str], end: int) -> None:
        self._pieces, self._end = pieces, end
        self._ids = {piece: at for at, piece in reversed(list(enumerate(pieces))) if piece}
        self._longest = max(map(len, self._ids))

    def answer(self, prompt: Iterable[int]) -> list[int]:
        """The answer's token ids."""
        return [*self._encode(turn("".join(self._pieces[token] for token in prompt))), self._end]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            piece = next(text[:n] for n in range(self._longest, 0, -1) if text[:n] in self._ids)
            ids.append(self._ids[piece])
            text = text[len(piece) :]
        return ids


def turn(conversation: str) -> str:
    """What is said next."""
    asked = re.search(r"set (\w+) to (\d+)", conversation)
    if asked is None:
        return "done"
    key, new = asked.groups()
    seen = conversation.split("<tool_response>\n")[1:]
    if not seen:
        return _call(f"grep -r {key} .")
    found = re.search(rf"^\./(\S+):{key}=(\d+)$", seen[0], re.M)
    if len(seen) == 1 and found is not None:
        return _call(f"sed -i s/{key}={found[2]}/{key}={new}/ {found[1]}")
    return "done"


def _call(command: str) -> str:
    body = json.dumps({"name": "shell", "arguments": {"command": command}})
    return f"<tool_call>\n{body}\n</tool_call>"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    policy: Policy

    def do_GET(self) -> None:
        self._say({})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        if self.path != "/inference/v1/generate":
            self._say({"success": True})
            return
        ids = self.policy.answer(asked["token_ids"])[: asked["sampling_params"]["max_tokens"]]
        logprobs = {"content": [{"logprob": 0.0} for _ in ids]}
        self._say({"choices": [{"token_ids": ids, "logprobs": logprobs, "finish_reason": "stop"}]})

    def _say(self, answer: Any) -> None:
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Nothing: its log is for what fails."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main(words: list[str]) -> None:
    """Serves as ``vllm serve MODEL --host H --port P ...`` would."""
    script = json.loads((Path(words[words.index("serve") + 1]) / SCRIPT).read_text())
    _Handler.policy = Policy(script["pieces"], script["end"])
    address = words[words.index("--host") + 1], int(words[words.index("--port") + 1])
    _Server(address, _Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
