"""The strategy of a manifest, and builders that are none."""

from pathlib import Path
from typing import Any

import pytest

from agentfly.api import Rollout
from agentfly.errors import AgentflyError
from agentfly.rollout import Chain, Step, window
from agentfly.rollout.strategies import strategy_of

AGENT = "def see(view):\n    return [*view.opening]\n\nnumber = 5\n"
LIMITS = {"maxTurns": 3, "maxTokensPerTurn": 20, "maxContextTokens": 300, "maxPromptTokens": 100}


def made(folder: Path, **strategy: Any) -> Any:
    (folder / "agent.py").write_text(AGENT)
    return strategy_of(Rollout.model_validate({**LIMITS, "strategy": strategy}), folder)


def test_nothing_said_is_a_chain(tmp_path: Path) -> None:
    assert made(tmp_path) == Chain(3, 20, 300, 100)


@pytest.mark.parametrize(
    ("said", "policy"), [("Stop", "stop"), ("DropOldest", "drop_oldest"), ("Summarise", "summarise")]
)
def test_chain_has_its_policy(tmp_path: Path, said: str, policy: Any) -> None:
    assert made(tmp_path, whenFull=said) == Chain(3, 20, 300, 100, when_full=policy)


def test_step_has_its_history_and_its_builder(tmp_path: Path) -> None:
    assert made(tmp_path, type="Step") == Step(3, 20, 300, 100, history=2, prompt_builder=window)
    step = made(tmp_path, type="Step", history=0, promptBuilder="agent.py:see")
    assert (step.history, step.prompt_builder.__name__) == (0, "see")


# 1. builders that are none


@pytest.mark.parametrize(
    ("builder", "said"),
    [
        ("agent.py:number", "agent.py:number is of type int, not a function of a StepView"),
        ("agent.py:missing", "missing"),
        ("other.py:see", "other.py"),
    ],
)
def test_builder_that_is_none_names_the_field(tmp_path: Path, builder: str, said: str) -> None:
    with pytest.raises(AgentflyError) as error:
        made(tmp_path, type="Step", promptBuilder=builder)
    assert error.value.message.startswith("spec.rollout.strategy.promptBuilder: ")
    assert said in error.value.message
    assert error.value.hints
