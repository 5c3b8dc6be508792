"""The guide to algorithms says what the models and estimators do."""

import re
from pathlib import Path

import yaml

from agentfly.api.algorithm import DISCOUNTING, NAMES, WITHOUT_GROUPS, Algorithm, Dapo, Gigpo, Hgpo, Ppo
from agentfly.api.asynchronous import Asynchronous
from agentfly.api.base import ApiModel

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


def rows(heading: str) -> list[list[str]]:
    lines = PAGE.partition(heading)[2].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def words(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_every_algorithm_has_its_row_and_its_source() -> None:
    table = rows("| name | advantage")
    assert [words(row[0])[0] for row in table] == list(NAMES)
    assert all("https://arxiv.org/abs/" in row[3] for row in table)


def test_the_manifest_of_the_guide_is_accepted() -> None:
    first, second = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.S))
    assert Algorithm.model_validate(first["algorithm"]).name == "gigpo"
    assert Asynchronous.model_validate(second["asynchronous"]).max_staleness == 1


def test_every_field_is_told_with_who_reads_it() -> None:
    told = [name for row in rows("| field | read by") for name in words(row[0])]
    blocks: dict[str, type[ApiModel]] = {"ppo": Ppo, "gigpo": Gigpo, "hgpo": Hgpo, "dapo": Dapo}
    fields = [info.alias for name, info in Algorithm.model_fields.items() if name not in ("name", *blocks)]
    inner = [f"{name}.{info.alias}" for name, block in blocks.items() for info in block.model_fields.values()]  # type: ignore[attr-defined]
    assert told == [*fields, *inner]
    readers = {tuple(words(row[0])): set(words(row[1])) for row in rows("| field | read by")}
    assert readers[("gamma",)] == set(DISCOUNTING)


def test_the_defaults_of_the_guide_are_those_of_the_models() -> None:
    table = {tuple(words(row[0])): row[2] for row in rows("| field | read by")}
    clips = table[("clipLow", "clipHigh")]
    for name in NAMES:
        low, high = Algorithm.model_validate({"name": name}).clips
        part = next((part for part in clips.split(";") if f"`{name}`" in part), clips.split(";")[0])
        assert f"{low:g}" in part or f"{low:.4f}" in part, name
        assert f"{high:g}" in part or f"{high:.4f}" in part, name
    for block in (Ppo(), Gigpo(), Hgpo(), Dapo()):
        name = type(block).__name__.lower()
        cells = next(text for fields, text in table.items() if fields[0].startswith(f"{name}."))
        for info in type(block).model_fields.values():
            if info.default is not None:
                shown = f"{info.default:g}" if isinstance(info.default, float) else str(info.default)
                assert shown.replace("e-0", "e-") in cells, (name, info.alias)


def test_who_may_have_groups_of_one_is_told() -> None:
    (row,) = [row for row in rows("| refused | because") if "groupSize" in row[0]]
    assert set(words(row[0])[1:]) == set(WITHOUT_GROUPS)
