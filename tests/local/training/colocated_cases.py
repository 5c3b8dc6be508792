"""What test_colocated.py runs in the trainer environment: ``python colocated_cases.py MODEL FOLDER``.

verl's classes are real: its configuration, the base of agent loops, the client of its servers and the
balancer between them. Balancer and servers are no actors of Ray but objects that are called as such, and a
server answers what it was given to say: vLLM's own needs a GPU.
"""

import asyncio
import inspect
import os
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from agentfly.agent import Agent, reward, tool
from agentfly.context import Context
from agentfly.roles.trainer import ColocatedServers, TrainerConfig
from agentfly.training.agent_loop import AgentflyLoop
from agentfly.training.main import compose_config
from agentfly.training.pinned import StaleWeights
from agentfly.training.verl_config import overrides

STEP = 7
CALL = '<tool_call>\n{"name": "double", "arguments": {"number": 21}}\n</tool_call>'


@tool
async def double(number: int) -> str:
    """Double a number.

    Args:
        number: any.
    """
    return str(2 * number)


@reward
async def right(ctx: Context) -> float:
    """Whether the last answer is 42."""
    return float(ctx.final_response == "42")


agent = Agent(prompt="{question}", tools=[double], reward=right)


class Actor:
    """An object whose methods are called as those of an actor of Ray."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> "Method":
        return Method(getattr(self._real, name))


class Method:
    """One method of an actor."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def remote(self, *args: Any, **kwargs: Any) -> "asyncio.Future[Any]":
        """A future of the result."""

        async def result() -> Any:
            found = self._call(*args, **kwargs)
            return await found if inspect.isawaitable(found) else found

        return asyncio.ensure_future(result())


class Server:
    """Says its lines, one a request, in the words of verl's server."""

    def __init__(self, lines: list[list[int]], version: int) -> None:
        self.lines, self.version, self.asked = lines, version, list[dict[str, Any]]()

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
    ) -> TokenOutput:
        """The next line, with the number of each token as its log-probability."""
        line = self.lines[len(self.asked)]
        self.asked.append({"prompt": prompt_ids, "params": sampling_params, "id": request_id})
        return TokenOutput(
            token_ids=line,
            log_probs=[-float(number) for number in range(len(line))],
            stop_reason="completed",
            extra_fields={"global_steps": self.version},
        )


def config_of(model: Path, folder: Path, **changes: Any) -> TrainerConfig:
    fields: dict[str, Any] = {
        "run_dir": folder,
        "attempt": 1,
        "model_path": model,
        "agent_entrypoint": f"{Path(__file__).name}:agent",
        "base_dir": Path(__file__).parent,
        "tasks_path": Path("tasks.jsonl"),
        "steps": 3,
        "tasks_per_step": 4,
        "group_size": 8,
        "algorithm": {"learning_rate": 1e-6},
        "max_turns": 3,
        "max_tokens_per_turn": 100,
        "max_prompt_tokens": 300,
        "max_context_tokens": 500,
        "checkpoint_dir": folder / "checkpoints",
        "nodes": 2,
        "gpus": 8,
        "ray_address": "auto",
        "servers": ColocatedServers(gpus=4, memory_utilization=0.6, max_num_seqs=32, dtype="bfloat16"),
    }
    return TrainerConfig(**{**fields, **changes})


def composes(model: Path, folder: Path) -> None:
    """verl takes the configuration, and understands by it what is meant."""
    more = ("+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8",)
    composed = compose_config(overrides(config_of(model, folder, overrides=more), {}))
    rollout = omega_conf_to_dataclass(composed.actor_rollout_ref.rollout)
    assert composed.actor_rollout_ref.hybrid_engine is True
    assert (rollout.name, rollout.mode, rollout.nnodes) == ("vllm", "async", 0)
    assert (rollout.tensor_model_parallel_size, rollout.data_parallel_size) == (4, 1)
    assert (rollout.gpu_memory_utilization, rollout.max_num_seqs, rollout.dtype) == (0.6, 32, "bfloat16")
    assert (rollout.free_cache_engine, rollout.enable_sleep_mode) == (True, True)
    assert (rollout.load_format, rollout.checkpoint_engine.backend) == ("dummy", "naive")
    assert (rollout.logprobs_mode, rollout.max_model_len) == ("processed_logprobs", 500)
    assert (rollout.prompt_length, rollout.response_length) == (300, 200)
    assert rollout.engine_kwargs["vllm"] == {"kv_cache_dtype": "fp8"}
    # Ours on top of verl's "sync", which pushes weights before the first step, and sleeps.
    assert composed.trainer.v1.trainer_mode == "agentfly"


def plays(model: Path, folder: Path) -> None:
    """A rollout of two turns, by the loop as verl makes it."""
    rows, servers = asyncio.run(rollout(model, folder, version=STEP - 1))
    (row,) = rows
    asked = [server for server in servers if server.asked]
    assert len(asked) == 1, "one server has the prefix of all turns"
    first, second = asked[0].asked
    lines = asked[0].lines
    assert second["prompt"][: len(first["prompt"]) + len(lines[0])] == first["prompt"] + lines[0]
    assert first["params"]["logprobs"] is True
    assert (first["params"]["temperature"], first["params"]["max_tokens"]) == (0.5, 100)
    assert row.prompt_ids == first["prompt"]
    sampled = [token for token, mask in zip(row.response_ids, row.response_mask, strict=True) if mask]
    assert sampled == lines[0] + lines[1]
    assert len(row.response_logprobs) == len(row.response_ids)
    assert row.reward_score == 1.0
    assert row.extra_fields["global_steps"] == STEP - 1


def stale(model: Path, folder: Path) -> None:
    """Weights of another step end the attempt."""
    said = ""
    try:
        asyncio.run(rollout(model, folder, version=STEP - 2))
    except StaleWeights as error:
        said = str(error)
    assert "verl's servers: answered with weights '5', not 6 to 7" in said


async def rollout(model: Path, folder: Path, version: int) -> tuple[list[Any], list[Server]]:
    config = config_of(model, folder)
    file = folder / "trainer.json"
    file.write_text(config.model_dump_json())
    os.environ |= {"AGENTFLY_TRAINER_CONFIG": str(file), "AGENTFLY_BROKER": "http://127.0.0.1:9"}
    os.environ["AGENTFLY_INFERENCE_URLS"] = ""
    composed = compose_config(overrides(config, {}))
    tokenizer = AutoTokenizer.from_pretrained(model)
    end = [tokenizer.eos_token_id]
    lines = [tokenizer.encode(text) + end for text in (CALL, "42")]
    servers = [Server(lines, version) for _ in range(4)]
    balancer = GlobalRequestLoadBalancer({f"s{n}": Actor(server) for n, server in enumerate(servers)})
    loop = AgentflyLoop(
        trainer_config=DictConfigWrap(composed),
        server_manager=LLMServerClient(composed, Actor(balancer)),
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(composed.data),
        hf_model_type="qwen2",
    )
    fields = {"global_steps": STEP, "index": 3, "session_id": 1, "task": '{"question": "21 * 2?"}'}
    return await loop.run({"temperature": 0.5, "top_p": 1.0}, **fields), servers


if __name__ == "__main__":
    for case in (composes, plays, stale):
        case(Path(sys.argv[1]), Path(sys.argv[2]))
