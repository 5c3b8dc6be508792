"""Runs in the inference environment: calls as vLLM's own parsers read them, for agentfly."""

import json
import sys

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentfly.agent import AgentDefinitionError
from agentfly.agent.parsers import VLLMParser

MARKS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>", "<|python_tag|>",
    "<function_calls>", "</function_calls>",
]  # fmt: skip
SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "seconds": {"type": "integer"}},
            "required": ["command"],
        },
    },
}


def tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")


def main() -> None:
    known = tokenizer()
    found = {}
    for name, texts in json.load(sys.stdin).items():
        try:
            parser = VLLMParser(name, [SHELL]).with_tokenizer(known)
        except AgentDefinitionError as error:
            found[name] = error.message
            continue
        parsed = [parser.parse(text) for text in texts]
        found[name] = [
            [one.content, [[call.name, call.arguments] for call in one.calls], one.malformed]
            for one in parsed
        ]
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
