"""A small real tokenizer, chat templates of several habits, a model that says what it is told, resources."""

import asyncio
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from agentfly.agent import Agent, reward, tool
from agentfly.context import Context
from agentfly.models import Sampled, Sampling
from agentfly.resources.lease import Holdings, Lease, LeaseInfo, PoolStatus, Request, Scope
from agentfly.resources.spec import ResourceSpec

Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, bool], str]

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<tool_call>", "</tool_call>")
# Merges in rank order, as a byte-pair encoding learns them; the last ones cross words and lines, so that the
# same text has many tokenisations.
MERGES = (
    b"t h", b"th e", b"i n", b"e r", b"a n", b"o u", b"r e", b"l l", b"_ a", b"_ the", b"\n \n", b": \n",
    b"} }", b'" :', b'{ "', b"o k", b"d o", b"do n", b"don e", b"\n <", b"a _a", b"e \n", b"\xc3 \xa9",
)  # fmt: skip


class ToyTokenizer:
    """Byte-level BPE with special tokens, and the part of the Hugging Face surface that rollouts use."""

    def __init__(
        self,
        render: Render,
        *,
        merges: Iterable[bytes] = MERGES,
        eos: str = "<|im_end|>",
        start: str = "",
        specials: Sequence[str] = SPECIALS,
    ) -> None:
        self._render = render
        self.specials = specials
        self._specials = {text: at for at, text in enumerate(specials)}
        self._split = re.compile("(" + "|".join(map(re.escape, specials)) + ")")
        self._bytes: dict[int, bytes] = {len(specials) + value: bytes([value]) for value in range(256)}
        self._ranks: dict[tuple[bytes, bytes], int] = {}
        self._start = start
        for merge in merges:
            left, _, right = merge.partition(b" ")
            left, right = left.replace(b"_", b" "), right.replace(b"_", b" ")
            if (left, right) not in self._ranks and left and right:
                self._ranks[left, right] = len(self._ranks)
                self._bytes[len(specials) + len(self._bytes)] = left + right
        self._ids = {piece: at for at, piece in reversed(self._bytes.items())}
        self.eos_token_id: int | None = self._specials[eos]

    @property
    def vocabulary(self) -> list[int]:
        return [*self._specials.values(), *self._bytes]

    def special(self, text: str) -> int:
        return self._specials[text]

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
    ) -> Any:
        assert not return_dict
        text = self._render(conversation, tools, add_generation_prompt)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        ids: list[int] = []
        for at, part in enumerate(self._split.split(text)):
            if part in self._specials:
                ids.append(self._specials[part])
            elif part:
                ids.extend(self._bpe((self._start if at == 0 else "") + part))
        return ids

    def decode(self, token_ids: list[int]) -> str:
        parts = [self._bytes.get(token) or self.specials[token].encode() for token in token_ids]
        return b"".join(parts).decode("utf-8", "replace")

    def _bpe(self, text: str) -> list[int]:
        pieces = [bytes([value]) for value in text.encode()]
        while True:
            pairs = [
                (self._ranks[pair], at)
                for at, pair in enumerate(itertools.pairwise(pieces))
                if pair in self._ranks
            ]
            if not pairs:
                return [self._ids[piece] for piece in pieces]
            _, at = min(pairs)
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def chatml(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generation: bool) -> str:
    text = f"<|im_start|>system\ntools: {[t['function']['name'] for t in tools]}<|im_end|>\n" if tools else ""
    text += "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return text + ("<|im_start|>assistant\n" if generation else "")


def grouping(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generation: bool) -> str:
    """As Qwen: tool messages in a row share one user turn."""
    text = ""
    for at, m in enumerate(messages):
        if m["role"] != "tool":
            text += f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n"
            continue
        first = at == 0 or messages[at - 1]["role"] != "tool"
        last = at + 1 == len(messages) or messages[at + 1]["role"] != "tool"
        text += "<|im_start|>user" if first else ""
        text += f"\n<tool_response>\n{m['content']}\n</tool_response>"
        text += "<|im_end|>\n" if last else ""
    return text + ("<|im_start|>assistant\n" if generation else "")


def spaced(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generation: bool) -> str:
    """As Llama 2: text, a space, the end token, no newline."""
    text = "".join(f"<s>{m['role']}: {m['content']} </s>" for m in messages)
    return text + ("<s>assistant: " if generation else "")


def plain(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generation: bool) -> str:
    """No special tokens at all."""
    text = "".join(f"### {m['role']}\n{m['content']}\n" for m in messages)
    return text + ("### assistant\n" if generation else "")


def trimming(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generation: bool) -> str:
    return chatml([{**m, "content": m["content"].strip()} for m in messages], tools, generation)


def forgetful(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generation: bool) -> str:
    """As thinking models: the thoughts of all but the last turn are gone."""
    kept = [
        {**m, "content": m["content"].rpartition("</think>")[2].strip()}
        if m["role"] == "assistant" and at + 1 < len(messages)
        else m
        for at, m in enumerate(messages)
    ]
    return chatml(kept, tools, generation)


def moving(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generation: bool) -> str:
    """As Mistral: something stands before the last user message, wherever that is."""
    last = max(at for at, m in enumerate(messages) if m["role"] in ("user", "tool"))
    return chatml(
        [{**m, "content": "[TOOLS]" + m["content"]} if at == last else m for at, m in enumerate(messages)],
        tools,
        generation,
    )


def refusing(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generation: bool) -> str:
    if any(m["role"] == "tool" for m in messages):
        raise ValueError("only user and assistant roles are supported")
    return chatml(messages, tools, generation)


def one_turn(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generation: bool) -> str:
    if len(messages) > 2:
        raise ValueError("one turn is enough")
    return chatml(messages, tools, generation)


def hiding(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generation: bool) -> str:
    return chatml([m for m in messages if m["role"] != "assistant"], tools, generation)


APPEND_ONLY = {"chatml": chatml, "grouping": grouping, "spaced": spaced, "plain": plain}


def call(name: str, **arguments: Any) -> str:
    from agentfly.agent import HermesParser, ToolCall

    return HermesParser().render(ToolCall(name, arguments))


class Script:
    """A model that says the given texts turn by turn, in every attempt anew.

    A text that is an exception is raised; a ``Sampled`` is returned as it is; an asyncio.Event is waited for.
    """

    def __init__(self, tokenizer: ToyTokenizer, *says: str | Exception | Sampled | asyncio.Event) -> None:
        self.tokenizer = tokenizer
        self.says = says
        self.prompts: list[list[int]] = []
        self.requests: list[tuple[str, Sampling]] = []
        self._turns: dict[str, int] = {}

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        deadline: float,
        images: Any = (),
    ) -> Sampled:
        owner = request_id.rsplit(".", 2)[0]
        turn = self._turns.get(owner, 0)
        self._turns[owner] = turn + 1
        self.prompts.append(list(prompt_ids))
        self.requests.append((request_id, sampling))
        said = self.says[min(turn, len(self.says) - 1)]
        if isinstance(said, asyncio.Event):
            await said.wait()
            said = "done"
        if isinstance(said, Exception):
            raise said
        if isinstance(said, Sampled):
            return said
        await asyncio.sleep(0)
        end = self.tokenizer.eos_token_id
        assert end is not None
        ids = [*self.tokenizer.encode(said, add_special_tokens=False), end]
        if len(ids) > sampling.max_tokens:
            return sampled(ids[: sampling.max_tokens], finish="length")
        return sampled(ids)


def sampled(ids: Sequence[int], *, finish: Any = "stop", version: str | None = "7") -> Sampled:
    """A sample whose log-probabilities tell the place of each token: -1, -2, ..."""
    return Sampled(list(ids), [-float(at + 1) for at in range(len(ids))], finish, version)


class FakeResources:
    """Leases from nowhere, counted.

    ``failures`` are raised by the first acquires, in order; ``gate`` holds acquires back; ``sticky`` makes
    releases fail.
    """

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.gate: asyncio.Event | None = None
        self.sticky: set[str] = set()
        self.held: dict[str, LeaseInfo] = {}
        self.log: list[tuple[str, str]] = []
        self.count = 0

    async def acquire(
        self,
        pool_or_spec: str | ResourceSpec,
        owner: str,
        *,
        key: str = "default",
        scope: Scope = "rollout",
        share: str = "",
        image: str | None = None,
        attempt: int = 0,
        deadline: float = 600.0,
    ) -> Lease:
        pool = pool_or_spec if isinstance(pool_or_spec, str) else pool_or_spec.kind
        self.log.append(("acquire", " ".join(filter(None, (pool, key, scope, share, image)))))
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        self.count += 1
        number = self.count
        info = LeaseInfo(
            lease_id=f"lease-{number}", pool=pool, owner=owner, key=key, member_id=f"member-{number}",
            incarnation=number, kind="container", address="unix:///nowhere", token="t", ttl_s=30,
        )  # fmt: skip
        self.held[info.lease_id] = info
        return Lease(info, self, Holdings(self))

    async def acquire_many(
        self, requests: Sequence[Request], owner: str, *, attempt: int = 0, deadline: float = 600.0
    ) -> list[Lease]:
        self.log.append(("acquire_many", " ".join(str(request.pool_or_spec) for request in requests)))
        return [
            await self.acquire(
                r.pool_or_spec, owner, key=r.key, scope=r.scope, share=r.share, image=r.image, attempt=attempt
            )
            for r in requests
        ]

    async def release(self, lease_id: str, *, dirty: bool = False) -> None:
        await asyncio.sleep(0)
        self.log.append(("release", lease_id))
        if lease_id in self.sticky:
            raise RuntimeError(f"{lease_id} is stuck")
        self.held.pop(lease_id, None)

    async def release_owner(self, owner: str, *, attempt: int | None = None) -> None:
        self.log.append(("release_owner", owner))
        for lease_id in [found for found, info in self.held.items() if info.owner == owner]:
            del self.held[lease_id]

    async def heartbeat(self, lease_ids: Sequence[str]) -> dict[str, bool]:
        return {lease_id: lease_id in self.held for lease_id in lease_ids}

    async def demand(self, pool: str, wanted: Mapping[str, int] | Sequence[str], owner: str) -> None:
        self.log.append(("demand", f"{pool} {list(wanted)} {owner}"))

    async def reset(self, lease_id: str) -> LeaseInfo:
        return self.held[lease_id]

    async def status(self) -> dict[str, PoolStatus]:
        return {}

    def acquired(self) -> list[str]:
        return [what for verb, what in self.log if verb == "acquire"]


@tool
async def shell(command: str, ctx: Context) -> str:
    """Run a command.

    Args:
        command: one shell line.
    """
    box = await ctx.acquire("shell")
    return f"ran {command} in {box.info.member_id}"


@reward
async def always_one(ctx: Context) -> float:
    return 1.0


def make_agent(**changes: Any) -> Agent:
    parts: dict[str, Any] = {"tools": [shell], "reward": always_one, "prompt": "do {what}"}
    return Agent(**{**parts, **changes})


TASK: Mapping[str, Any] = {"what": "the thing"}
