"""Stands where the Python of a run's environments would be, and plays the program it is asked to run.

As a vLLM server it answers health and one-token requests, and dies when it is asked for ``/die``.

As the trainer it follows the scenario beside the run's folder: a JSON list with, for each attempt, a list of
words. ``step`` writes the metrics of the next step, ``save`` a checkpoint of it, ``suspend`` waits for the
request to suspend and obeys, ``hang`` hangs, ``drift`` ends as a run that drifted over its limit, a number is
the exit code.

As the rollout worker it follows the scenario too, one list for each life: ``report A B C`` reports A scored
and B failed rollouts of C, ``die`` has the servers die, ``hang`` and numbers are as above.
"""

import contextlib
import json
import os
import sys
import time
import urllib.request
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/die":
            os._exit(9)
        self.answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.answer()

    def answer(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *args: object) -> None:
        pass


def serve(arguments: list[str]) -> None:
    HTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Server).serve_forever()


def save(run_dir: Path, step: int) -> None:
    folder = run_dir / "checkpoints" / f"global_step_{step}"
    folder.mkdir(exist_ok=True)
    (folder / "data.pt").touch()
    (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(step))


def train(config: dict) -> int:
    run_dir, attempt = Path(config["run_dir"]), config["attempt"]
    tracker = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    step = int(tracker.read_text()) if tracker.exists() else 0
    for word in json.loads((run_dir.parent / "scenario.json").read_text())[attempt - 1]:
        if word == "step":
            step += 1
            with (run_dir / "metrics.jsonl").open("a") as metrics:
                metrics.write(json.dumps({"step": step, "reward": step / 10, "step_seconds": 0.1}) + "\n")
            time.sleep(1.2)
        elif word == "save":
            save(run_dir, step)
        elif word == "hang":
            time.sleep(3600)
        elif word == "drift":
            failure = {"reason": "DriftExceeded", "message": "maxDriftFraction: as the scenario says"}
            (run_dir / "control" / f"failure-{attempt}.json").write_text(json.dumps(failure))
            return 87
        elif word == "suspend":
            while not (run_dir / "control" / "suspend").exists():
                time.sleep(0.05)
            save(run_dir, step)
            return 85
        else:
            sys.stderr.write("ValueError: as the scenario says\n")
            return int(word)
    return 0


def work(config: dict) -> int:
    run_dir = Path(config["run_dir"])
    lives = run_dir.parent / "lives"
    life = int(lives.read_text()) if lives.exists() else 0
    lives.write_text(str(life + 1))
    for word in json.loads((run_dir.parent / "scenario.json").read_text())[life]:
        if word.startswith("report "):
            scored, failed, total = map(int, word.split()[1:])
            report = {"total": total, "scored": scored, "failed": {"StartFailed": failed} if failed else {}}
            (run_dir / "report.json").write_text(json.dumps(report))
        elif word == "hang":
            time.sleep(3600)
        elif word == "die":
            for url in os.environ["AGENTFLY_INFERENCE_URLS"].split(","):
                with contextlib.suppress(OSError, HTTPException):
                    urllib.request.urlopen(f"{url}/die", timeout=10)
        else:
            sys.stderr.write("rollouts: as the scenario says\n  hint: none\n")
            return int(word)
    return 0


if __name__ == "__main__":
    if "vllm.entrypoints.cli.main" in sys.argv:
        serve(sys.argv)
    if "agentfly.worker" in sys.argv:
        sys.exit(work(json.loads(Path(sys.argv[-1]).read_text())))
    sys.exit(train(json.loads(Path(sys.argv[-1]).read_text())))
