"""The recording, and the policy that is made of it."""

import asyncio
import math
from collections.abc import Sequence

import pytest

from agentfly.agent import HermesParser
from agentfly.models import Sampled, Sampling
from agentfly.rollout import TokenLedger
from tests.bench.barrier import TurnBarrier
from tests.bench.record import drawn_tokens
from tests.bench.rollouts import LockstepModel, shuffled
from tests.bench.scripted import RecordedTokenizer, Recording, ScriptedModel, Turn, load, place_of


@pytest.fixture(scope="module")
def recording() -> Recording:
    return load()


def answer(ids: list[int], seconds: float = 0.0) -> Turn:
    return Turn(ids=ids, finish="stop", seconds=seconds, long_tokens=9, long_seconds=seconds)


def small(**turns: list[Turn]) -> Recording:
    return Recording(
        about="",
        date="2026-01-01",
        eos_token_id=2,
        group_size=1,
        pieces=["?", "a", "<|im_end|>", "ab", "b", "\n"],
        rows=[{}],
        turns={key.replace("_", "-")[1:]: value for key, value in turns.items()},
    )


def test_a_request_is_that_of_a_turn_of_a_rollout() -> None:
    assert place_of("bench-3-0a1b2c3d-7.0.deadbeef.2.0") == ("3-7", 1)
    assert place_of("a-name-12-0a1b2c3d-0.1.deadbeef.1.48") == ("12-0", 0)


async def test_an_answer_depends_on_rollout_and_turn_alone() -> None:
    recorded = small(r0_0=[answer([5, 2])], r0_1=[answer([1, 2]), answer([3, 2])])
    model = ScriptedModel(recorded, "recorded", ["0-0", "0-1"])
    for _ in range(2):
        sampled = await model.generate([9], Sampling(), request_id="x-1-h-0.0.n.2.0", deadline=1)
        assert sampled == Sampled([3, 2], [0.0, 0.0], "stop", None)


def test_text_becomes_the_longest_pieces_and_back() -> None:
    tokenizer = RecordedTokenizer(small())
    assert tokenizer.encode("abba<|im_end|>\n", add_special_tokens=False) == [3, 4, 1, 2, 5]
    assert tokenizer.decode([3, 4, 1, 2, 5]) == "abba<|im_end|>\n"
    assert tokenizer.encode("aéb", add_special_tokens=False) == [1, 0, 4]


def test_the_chat_format_ends_a_turn_with_the_recorded_end_token(recording: Recording) -> None:
    tokenizer = RecordedTokenizer(recording)
    ledger = TokenLedger(tokenizer, [{"role": "user", "content": "set port to 12"}])
    assert ledger.stop_token_ids == (recording.eos_token_id,)
    assert tokenizer.decode(ledger.prompt_ids) == (
        "<|im_start|>user\nset port to 12<|im_end|>\n<|im_start|>assistant\n"
    )


def test_every_rollout_of_the_recording_is_there(recording: Recording) -> None:
    places = {f"{row}-{place}" for row in range(len(recording.rows)) for place in range(recording.group_size)}
    assert set(recording.turns) == places
    assert all(recording.turns.values())


def test_what_is_replayed_goes_on_exactly_as_it_was_recorded(recording: Recording) -> None:
    """Every answer but a rollout's last has a call, so that a replay asks for all turns and for no more."""
    tokenizer, parser = RecordedTokenizer(recording), HermesParser()
    for turns in recording.turns.values():
        for number, turn in enumerate(turns):
            parsed = parser.parse(tokenizer.decode([i for i in turn.ids if i != recording.eos_token_id]))
            goes_on = bool(parsed.calls or parsed.malformed)
            assert goes_on == (number + 1 < len(turns)) or number == 2, turn
    assert max(len(turns) for turns in recording.turns.values()) == 3


def test_recorded_latencies_are_those_of_a_real_server(recording: Recording) -> None:
    turns = [turn for of_one in recording.turns.values() for turn in of_one]
    assert all(0 < turn.seconds < 60 and 0 < turn.long_seconds < 60 for turn in turns)
    assert all(turn.long_tokens == drawn_tokens(*at) for at, turn in enumerate_turns(recording))


def enumerate_turns(recording: Recording) -> list[tuple[tuple[str, int], Turn]]:
    return [((key, at), turn) for key, turns in recording.turns.items() for at, turn in enumerate(turns)]


def test_drawn_lengths_have_the_median_and_the_limit_that_the_file_names() -> None:
    drawn = sorted(drawn_tokens(f"{number}-0", 0) for number in range(2001))
    assert abs(math.log(drawn[1000] / 48)) < 0.1
    assert drawn[0] >= 1
    assert drawn[-1] == 384


async def test_lockstep_callers_get_their_answers_when_the_slowest_has_its_own() -> None:
    gate = asyncio.Event()

    class Slow:
        async def generate(
            self,
            prompt_ids: list[int],
            sampling: Sampling,
            *,
            request_id: str,
            deadline: float,
            images: Sequence[bytes] = (),
        ) -> Sampled:
            if request_id == "slow":
                await gate.wait()
            return Sampled([1], [0.0], "stop", None)

    model = LockstepModel(Slow(), TurnBarrier(2))  # type: ignore[arg-type]
    calls = [
        asyncio.create_task(model.generate([], Sampling(), request_id=name, deadline=1))
        for name in ("fast", "slow")
    ]
    for _ in range(9):
        await asyncio.sleep(0)
    assert not calls[0].done()
    gate.set()
    await asyncio.gather(*calls)


def test_an_order_has_every_rollout_once_and_follows_from_its_seed(recording: Recording) -> None:
    orders = [shuffled(recording, seed) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(order) == sorted(recording.turns) for order in orders)
