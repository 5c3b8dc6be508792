"""Records what the bench replays: the quickstart's policy on a real vLLM, in real sandboxes.

    python -m tests.bench.record --model runs/NAME/model      (with the Python of the inference environment)

Two passes over the same rollouts, ``CONCURRENCY`` at a time. The first takes the policy's own answers and how
long each took. The second asks, at each turn, for an answer of a length that is drawn from a long-tailed
distribution (the server is told not to stop before), and takes the time of that.
"""

import argparse
import asyncio
import datetime
import itertools
import logging
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from agentfly.local.paths import run_dir
from agentfly.models import Sampled, Sampling, TokenModel, VLLMModel
from agentfly.models.vllm import request_body
from agentfly.refs import load
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner
from agentfly.resources.runners.model_service import ModelServiceRunner
from agentfly.resources.spec import ContainerSpec, ModelServiceSpec, PoolSpec
from agentfly.rollout import Tokenizer, rollout
from agentfly.sandbox.binary import find_sandboxd
from tests.bench.rollouts import DEADLINES, EXAMPLE, NAME, STRATEGY, Kept
from tests.bench.scripted import FILE, Recording, Turn, place_of

logger = logging.getLogger("tests.bench.record")

ROWS, GROUP, CONCURRENCY = 4, 8, 16
MEDIAN_TOKENS, SIGMA, MAX_TOKENS = 48, 1.0, 384
CONTEXT = 1024
ABOUT = (
    "Per-turn latencies of the quickstart's policy (0.35 M parameters, float32) on vLLM on a machine with 2 "
    f"shared cores, {CONCURRENCY} rollouts at a time. As recorded (`seconds`): the policy's own answers of "
    "at most 48 tokens. Long-tailed (`long_seconds`): the same turns of the same conversations, measured "
    "too, but with the answer's length forced to a draw from a log-normal distribution (median "
    f"{MEDIAN_TOKENS} tokens, sigma {SIGMA:g}, at most {MAX_TOKENS}): that distribution is a choice, made "
    "to resemble agents that think before they act; it is not the quickstart's own. The answers replayed "
    "(`ids`) are the policy's own in both cases."
)


class Recorder:
    """Passes calls through and keeps the answers with their times."""

    def __init__(self, model: TokenModel) -> None:
        self._model = model
        self.turns: dict[tuple[str, int], tuple[Sampled, float]] = {}

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        deadline: float,
        images: Any = (),
    ) -> Sampled:
        """See ``TokenModel.generate``."""
        began = time.perf_counter()
        sampled = await self._model.generate(prompt_ids, sampling, request_id=request_id, deadline=deadline)
        self.turns[place_of(request_id)] = sampled, time.perf_counter() - began
        return sampled


class Forced:
    """Asks for an answer of a drawn length, keeps its time, and gives the recorded answer."""

    def __init__(self, url: str, turns: dict[tuple[str, int], tuple[Sampled, float]]) -> None:
        self._url = url
        self._turns = turns
        self.times: dict[tuple[str, int], tuple[int, float]] = {}

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        deadline: float,
        images: Any = (),
    ) -> Sampled:
        """See ``TokenModel.generate``."""
        place = place_of(request_id)
        tokens = drawn_tokens(*place)
        body = request_body(prompt_ids, Sampling(max_tokens=tokens, seed=0), request_id)
        body["sampling_params"] |= {"ignore_eos": True, "stop_token_ids": []}
        began = time.perf_counter()
        async with (
            asyncio.timeout(deadline),
            aiohttp.ClientSession() as session,
            session.post(f"{self._url}/inference/v1/generate", json=body) as response,
        ):
            answer = await response.json()
        self.times[place] = tokens, time.perf_counter() - began
        if len(answer["choices"][0]["token_ids"]) != tokens:
            raise ValueError(f"answer of {request_id}: does not have {tokens} tokens")
        return self._turns[place][0]


def drawn_tokens(rollout_key: str, turn: int) -> int:
    """The length of the long answer to a turn; the same at every recording."""
    drawn = random.Random(f"{rollout_key}/{turn}").lognormvariate(math.log(MEDIAN_TOKENS), SIGMA)
    return max(1, min(MAX_TOKENS, round(drawn)))


async def record(model: Path, logs: Path, scratch: Path) -> Recording:
    """Start a server and sandboxes, play both passes, and stop all."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows: list[dict[str, Any]] = list(itertools.islice(load("agent.py:tasks", EXAMPLE)(0), ROWS))
    runner = BubblewrapRunner(scratch, find_sandboxd())
    servers = ModelServiceRunner(Path(sys.executable), logs)
    spec = ModelServiceSpec(model=str(model), max_model_len=CONTEXT, dtype="float32")
    pools = [
        PoolSpec(name="shell", resource=ContainerSpec(), min=CONCURRENCY, max=CONCURRENCY),
        PoolSpec(name="policy", resource=spec),
    ]
    try:
        async with ResourceEngine([runner, servers], pools) as engine:
            lease = await engine.acquire("policy", "recorder", scope="global", deadline=300)
            async with VLLMModel(lease.base_url) as vllm:
                await play(rows, Recorder(vllm), tokenizer, engine)  # warm-up
                first = Recorder(vllm)
                await play(rows, first, tokenizer, engine)
                second = Forced(lease.base_url, first.turns)
                await play(rows, second, tokenizer, engine)
    finally:
        await runner.close()
    return recording(tokenizer, rows, first, second)


async def play(
    rows: Sequence[dict[str, Any]], model: TokenModel, tokenizer: Tokenizer, engine: ResourceEngine
) -> None:
    """All rollouts once."""
    report = await rollout(
        load("agent.py:agent", EXAMPLE),
        rows,
        model=model,
        tokenizer=tokenizer,
        resources=engine,
        strategy=STRATEGY,
        sink=Kept(),
        deadlines=DEADLINES,
        sampling=Sampling(seed=0),
        group_size=GROUP,
        concurrency=CONCURRENCY,
        failure_budget=0,
        name=NAME,
    )
    logger.info("%d rollouts in %.1f s", report.total, report.seconds)


def recording(tokenizer: Any, rows: list[dict[str, Any]], first: Recorder, second: Forced) -> Recording:
    """What both passes found, in the order of rows, places and turns."""
    turns: dict[str, list[Turn]] = {f"{row}-{place}": [] for row in range(ROWS) for place in range(GROUP)}
    for key, number in sorted(first.turns):
        sampled, seconds = first.turns[key, number]
        tokens, long_seconds = second.times[key, number]
        turns[key].append(
            Turn(
                ids=sampled.ids,
                finish="stop" if sampled.finish_reason == "stop" else "length",
                seconds=round(seconds, 4),
                long_tokens=tokens,
                long_seconds=round(long_seconds, 4),
            )
        )
    return Recording(
        about=ABOUT,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        eos_token_id=tokenizer.eos_token_id,
        group_size=GROUP,
        pieces=[tokenizer.decode([token]) for token in range(len(tokenizer))],
        rows=rows,
        turns=turns,
    )


def main() -> None:
    """Record and write the file."""
    parser = argparse.ArgumentParser(prog="tests.bench.record")
    parser.add_argument("--model", type=Path, required=True, help="a policy of the quickstart")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    model = parser.parse_args().model.resolve()
    with (
        tempfile.TemporaryDirectory(dir=run_dir()) as scratch,
        tempfile.TemporaryDirectory() as logs,
    ):
        made = asyncio.run(record(model, Path(logs), Path(scratch) / "r"))
    FILE.write_text(made.model_dump_json().replace('"turns":{', '"turns":{\n').replace("],", "],\n") + "\n")


if __name__ == "__main__":
    main()
