"""Makes the quickstart's policy on the spot: a byte-level BPE tokenizer, a Qwen2 of 0.35 M parameters, and a
supervised warm-up of about half a minute on one core.

    python model.py --output DIR [--seed N] [--sloppiness Q]

The warm-up has two phases. First transcripts of an expert, from which the model learns the skill: the call
syntax, and copying file names and values from what it saw. Then transcripts of a sloppy agent that slips
(edits without looking, wrong key, file or value), which set where it starts: well-formed calls, only some of
them right. Reinforcement learning does the rest.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config
from world import FILES, KEYS, VALUES, task

EXPERT_STEPS, SLOPPY_STEPS, BATCH = 300, 150, 16
LEARNING_RATE, RAMP_STEPS = 4e-3, 40
# With HF's default of 0.02 a model of this width does not learn to copy within the warm-up.
INITIALIZER_RANGE = 0.08
# Qwen2's own split: AutoTokenizer rebuilds it for this model type whatever tokenizer.json says. A tokenizer
# trained on any other split would read its own texts differently after a reload.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
Message = dict[str, str]


class Files:
    """What ``grep -r KEY .`` and ``sed -i s/OLD/NEW/ FILE`` do to a few small files, without a sandbox."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = dict(files)

    def grep(self, key: str) -> str:
        return "\n".join(
            f"./{name}:{line}"
            for name, text in self.files.items()
            for line in text.splitlines()
            if key in line
        )

    def sed(self, old: str, new: str, name: str) -> str:
        if name not in self.files:
            return f"sed: can't read {name}: No such file or directory"
        lines = self.files[name].splitlines()
        self.files[name] = "".join(line.replace(old, new, 1) + "\n" for line in lines)
        return ""


def transcript(row: dict[str, Any], rng: random.Random, sloppiness: float) -> list[Message]:
    """A conversation about one task: by an expert at sloppiness 0, with every slip at its own odds at 1."""

    def slips(odds: float) -> bool:
        return rng.random() < odds * sloppiness

    def call(command: str, observation: str) -> list[Message]:
        body = json.dumps({"name": "shell", "arguments": {"command": command}})
        return [
            {"role": "assistant", "content": f"<tool_call>\n{body}\n</tool_call>"},
            {"role": "tool", "content": observation},
        ]

    world, messages = Files(row["files"]), [{"role": "user", "content": row["request"]}]
    name, old, new = row["file"], row["old"], row["new"]
    looks = not slips(0.25)
    if looks:
        key = rng.choice(KEYS) if slips(0.15) else row["key"]
        messages += call(f"grep -r {key} .", world.grep(key))
    if not slips(0.15):
        if not looks:
            name, old = rng.choice(FILES), rng.choice(VALUES)
        name = rng.choice(FILES) if slips(0.25) else name
        old = rng.choice(VALUES) if slips(0.20) else old
        new = rng.choice(VALUES) if slips(0.25) else new
        messages += call(f"sed -i s/{old}/{new}/ {name}", world.sed(old, new, name))
    return [*messages, {"role": "assistant", "content": "done"}]


def make_tokenizer() -> PreTrainedTokenizerFast:
    rng = random.Random(0)
    corpus = ["".join(m["content"] for m in transcript(task(-1 - i), rng, 1.0)) for i in range(2000)]
    corpus += [" ".join(VALUES + FILES + KEYS)] * 50
    corpus += ["sed: can't read log.conf: No such file or directory sh: 1: Syntax error not found"] * 20
    bpe = Tokenizer(models.BPE())
    bpe.decoder = decoders.ByteLevel()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=700,
            min_frequency=5,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=1024,
    )
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> tuple[list[int], list[int]]:
    """Token ids of a conversation and the mask of those that the assistant wrote, its end tokens included."""
    ids: list[int] = []
    mask: list[int] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            head = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
            before = tokenizer.encode("\n", add_special_tokens=False) if number else []
            ids += [*before, *head]
            mask += [0] * (len(before) + len(head))
        else:
            said = [*tokenizer.encode(message["content"], add_special_tokens=False), tokenizer.eos_token_id]
            ids += said
            mask += [1] * len(said)
    return ids, mask


def batch(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, first: int, sloppiness: float
) -> tuple[Any, Any]:
    """Token ids ``[BATCH, width]``, padded right, and the loss mask ``[BATCH, width - 1]`` of next tokens."""
    rows = [encode(tokenizer, transcript(task(first - i), rng, sloppiness)) for i in range(BATCH)]
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows])
    mask = torch.tensor([mask + [0] * (width - len(mask)) for _, mask in rows], dtype=torch.float32)
    return ids, mask[:, 1:]


def warm_up(tokenizer: PreTrainedTokenizerFast, seed: int, sloppiness: float) -> Any:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    rng, steps = random.Random(seed), EXPERT_STEPS + SLOPPY_STEPS
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (step + 1) / RAMP_STEPS) * (0.05 + 0.95 * (1 - step / steps))
        first = -1_000_000 - 10_000_000 * seed - step * BATCH
        ids, mask = batch(tokenizer, rng, first, 0.0 if step < EXPERT_STEPS else sloppiness)
        logits = model(input_ids=ids[:, :-1]).logits
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        loss = (losses.view_as(mask) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            print(f"warm-up {step + 1}/{steps} loss {loss.item():.3f}", flush=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--sloppiness", type=float, default=1.0, help="0 an expert, 1 about a quarter succeeds"
    )
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = warm_up(tokenizer, args.seed, args.sloppiness)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    text = "".join(message["content"] for message in transcript(task(7), random.Random(0), 0.0))
    if AutoTokenizer.from_pretrained(args.output).encode(text) != tokenizer.encode(text):
        raise SystemExit(
            "the tokenizer reads its own text differently after a reload: the policy would be useless"
        )


if __name__ == "__main__":
    main()
