"""Model families by their real chat templates, and how their models write thoughts and calls.

The tokenizer is the toy one with the family's special tokens; the template is the family's own, rendered as
Hugging Face's tokenizers do.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentfly.agent import HermesParser, Parsed, Parser, ToolCall
from tests.unit.rollout.toys import ToyTokenizer

FOLDER = Path(__file__).parent / "templates"


@cache
def _template(name: str) -> Template:
    def refuse(message: str) -> None:
        raise ValueError(message)

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: "2026-12-01"}
    return environment.from_string((FOLDER / f"{name}.jinja").read_text())


class Mistral:
    """``[TOOL_CALLS][{"name": ..., "arguments": ...}]``."""

    def parse(self, text: str) -> Parsed:
        before, found, calls = text.partition("[TOOL_CALLS]")
        made = [ToolCall(call["name"], call["arguments"]) for call in json.loads(calls)] if found else []
        return Parsed(before.strip(), made)


class Harmony:
    """GPT-OSS: a message of analysis, then one with a recipient that is a call, or a final one."""

    def parse(self, text: str) -> Parsed:
        thought = re.match(r"<\|channel\|>analysis<\|message\|>(.*?)<\|end\|>", text, re.DOTALL)
        call = re.search(
            r" to=functions\.(\w+)<\|channel\|>commentary json<\|message\|>(.*)$", text, re.DOTALL
        )
        if call is not None:
            content = thought.group(1) if thought else ""
            return Parsed(content, [ToolCall(call.group(1), json.loads(call.group(2)))])
        return Parsed(text.rpartition("<|message|>")[2])


@dataclass(frozen=True)
class Family:
    """One template, and how its models answer.

    Attributes:
        name: of the file.
        think: writes a thought before the rest of an answer.
        call: writes a call.
        final: writes an answer without a call.
        ends: the tokens that end an answer with a call, and one without.
        options: of the template.
    """

    name: str
    specials: Sequence[str]
    ends: tuple[str, str]
    call: Callable[[str, Mapping[str, Any]], str]
    final: Callable[[str], str] = lambda text: text
    think: Callable[[str], str] = lambda thought: ""
    parser: Parser = field(default_factory=HermesParser)
    options: Mapping[str, Any] = field(default_factory=dict)

    def tokenizer(self, merges: Sequence[bytes] = ()) -> ToyTokenizer:
        names = {"bos_token": self.specials[0], "eos_token": self.ends[1]}

        def render(messages: Any, tools: Any, generation: bool) -> str:
            return _template(self.name).render(
                messages=messages, tools=tools, add_generation_prompt=generation, **names, **self.options
            )

        return ToyTokenizer(render, merges=merges, eos=self.ends[1], specials=self.specials)


def _hermes(name: str, arguments: Mapping[str, Any]) -> str:
    return HermesParser().render(ToolCall(name, dict(arguments)))


def _xml(name: str, arguments: Mapping[str, Any]) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def _llama(name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps({"name": name, "parameters": dict(arguments)})


def _mistral(name: str, arguments: Mapping[str, Any]) -> str:
    return "[TOOL_CALLS]" + json.dumps([{"name": name, "arguments": dict(arguments)}])


def _harmony(name: str, arguments: Mapping[str, Any]) -> str:
    body = json.dumps(dict(arguments))
    return f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{body}"


def _tagged(thought: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n"


def _begun(thought: str) -> str:
    """Where the prompt ends with the opening tag."""
    return f"{thought}\n</think>\n\n"


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN = (*_CHATML, "<tool_call>", "</tool_call>", "<think>", "</think>")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",  # noqa: RUF001
    "<think>", "</think>",
    "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",  # noqa: RUF001
)  # fmt: skip
_HARMONY = ("<|startoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>")

FAMILIES = {
    "Qwen2.5": Family("qwen2_5", _QWEN, ("<|im_end|>",) * 2, _hermes),
    "Qwen3": Family("qwen3", _QWEN, ("<|im_end|>",) * 2, _hermes, think=_tagged),
    "Qwen3 without thinking": Family(
        "qwen3", _QWEN, ("<|im_end|>",) * 2, _hermes, options={"enable_thinking": False}
    ),
    "Qwen3.5": Family("qwen3_5_think", _QWEN, ("<|im_end|>",) * 2, _xml, think=_begun),
    "Llama 3.1": Family("llama3_1", _LLAMA, ("<|eot_id|>",) * 2, _llama),
    "Llama 3.2": Family("llama3_2", _LLAMA, ("<|eot_id|>",) * 2, _llama),
    "DeepSeek-R1 distill": Family(
        "deepseek_r1_distill", _DEEPSEEK, (_DEEPSEEK[1],) * 2, _hermes, think=_begun
    ),
    "Mistral Nemo": Family(
        "mistral_nemo",
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
         "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ("</s>",) * 2, _mistral, parser=Mistral(),
    ),
    "Gemma 3": Family(
        "gemma3", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>",) * 2, _hermes
    ),
    "GPT-OSS": Family(
        "gptoss", _HARMONY, ("<|call|>", "<|return|>"), _harmony, parser=Harmony(),
        think=lambda thought: f"<|channel|>analysis<|message|>{thought}<|end|>",
        final=lambda text: f"<|start|>assistant<|channel|>final<|message|>{text}",
    ),
}  # fmt: skip
