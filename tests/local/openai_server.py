"""An OpenAI-compatible server that knows one answer and remembers what it was asked.

As a program it stands where the Python of an environment would be, and plays the vLLM server it is asked for.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class OpenAIServer(ThreadingHTTPServer):
    """Serves on the loopback.

    Args:
        answer: what it says to every prompt.
        key: the only one it accepts; None accepts every request.
        port: 0 for any that is free.
    """

    daemon_threads = True

    def __init__(self, answer: str, key: str | None = None, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.answer = answer
        self.key = key
        self.asked: list[tuple[str, str, dict]] = []  # path, headers as text, body


class _Handler(BaseHTTPRequestHandler):
    server: OpenAIServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._say(200, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        self.server.asked.append((self.path, str(self.headers), body))
        if self.server.key is not None and self.headers["authorization"] != f"Bearer {self.server.key}":
            self._say(401, {"error": {"message": "no such key", "type": "invalid_request_error"}})
            return
        message = {"role": "assistant", "content": self.server.answer}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
        self._say(200, {"object": "chat.completion", "choices": [choice], "usage": usage})

    def _say(self, status: int, answer: dict) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    OpenAIServer("5", port=int(sys.argv[sys.argv.index("--port") + 1])).serve_forever()
