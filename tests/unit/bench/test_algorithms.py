"""What the bench of algorithms prints, and that its manifests are accepted."""

import json
import re
import shutil
from pathlib import Path

import pytest

from agentfly.api.algorithm import NAMES
from agentfly.local.preflight import training_run
from tests.bench.algorithms import ANCHORED, CASES, QUICKSTART, Case, found, table


def test_the_first_and_the_last_five_steps_are_compared() -> None:
    lines = [json.dumps({"step": n, "reward": n / 10}) for n in range(1, 9)]
    row = found("grpo", lines, 12.4)
    assert row.rose
    assert table([row]).splitlines()[-1] == "| grpo | 8 | 0.300 | 0.600 | +0.300 | 12 |"
    assert not found("grpo", lines[::-1], 1.0).rose


def test_every_algorithm_is_run_and_the_one_of_turns_with_both_kinds_of_rows() -> None:
    names = [case.name for case in CASES]
    assert {re.sub("-(chain|step|ahead)$", "", name) for name in names} == set(NAMES)
    assert {"gigpo-chain", "gigpo-step"} <= set(names)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_is_a_run_that_is_accepted(case: Case, tmp_path: Path) -> None:
    shutil.copytree(QUICKSTART, tmp_path / "m")
    shutil.copy(ANCHORED, tmp_path / "m")
    work = training_run(tmp_path / "m" / "run.yaml", case.sets, "r")
    assert case.name.startswith(work.run.spec.algorithm.name)
