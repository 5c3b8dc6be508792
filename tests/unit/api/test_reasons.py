"""The words of status; the sections have the numbers of the guarantees in agentfly.api.reasons."""

import ast
import inspect
import re

import pytest

from agentfly.api import reasons


def members() -> list[tuple[str, str, str, str | None]]:
    """(class, name, value, documentation below it) of every word."""
    found = []
    for node in ast.parse(inspect.getsource(reasons)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for this, following in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(this, ast.Assign) and isinstance(this.targets[0], ast.Name):
                assert isinstance(this.value, ast.Constant)
                documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                text = following.value.value if documented else None  # type: ignore[union-attr]
                found.append((node.name, this.targets[0].id, this.value.value, text))
    return found


def test_the_words_are_found() -> None:
    assert {name for name, *_ in members()} == {
        "TrainingRunPhase",
        "RolloutJobPhase",
        "ConditionType",
        "Reason",
        "EventReason",
    }
    assert len(members()) == sum(
        len(words)
        for words in (
            reasons.TrainingRunPhase,
            reasons.RolloutJobPhase,
            reasons.ConditionType,
            reasons.Reason,
            reasons.EventReason,
        )
    )


# 1. Every word has its meaning.


@pytest.mark.parametrize(("owner", "name", "value", "text"), members(), ids=lambda part: str(part)[:20])
def test_every_word_is_documented(owner: str, name: str, value: str, text: str | None) -> None:
    assert text is not None
    assert text.endswith(".")


# 2. Values are names in CamelCase, in the form that conditions take.


@pytest.mark.parametrize(("owner", "name", "value", "text"), members(), ids=lambda part: str(part)[:20])
def test_every_word_is_its_name(owner: str, name: str, value: str, text: str | None) -> None:
    assert value == name
    assert re.fullmatch(r"([A-Z][a-z0-9]+)+", value)


# What generic tools read.


def test_trouble_has_an_event_of_its_name() -> None:
    """All conditions of a pool but those that every tool reads: they are True when a person should know."""
    text = {name: about or "" for owner, name, _, about in members() if owner == "ConditionType"}
    trouble = {name for name, about in text.items() if about.startswith("ResourcePool.")} - {"Ready"}
    assert trouble == {
        "CapacityExhausted", "QueueSaturated", "Unschedulable", "ImagePullFailing", "ResetFailing",
        "CircuitOpen", "Degraded",
    }  # fmt: skip
    assert trouble < set(reasons.EventReason)
