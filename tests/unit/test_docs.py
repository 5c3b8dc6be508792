"""What the guides show is true: manifests are accepted, objects work, links lead somewhere."""

import re
from pathlib import Path

import pytest

from agentfly.api.load import load_manifests
from agentfly.broker.pools import pool_spec
from agentfly.refs import load

DOCS = Path(__file__).parents[2] / "docs"
POOLS = (DOCS / "pools.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", POOLS, re.S)


@pytest.mark.parametrize("text", blocks("yaml"), ids=lambda text: re.search(r"name: (\w+)", text)[1])
def test_every_pool_of_the_guide_is_one(tmp_path, text):
    file = tmp_path / "pool.yaml"
    file.write_text(text)
    (pool,) = load_manifests(file).pools
    assert pool_spec(pool).name == pool.metadata.name


def test_the_object_of_the_guide_proves_its_reset(tmp_path):
    (tmp_path / "games.py").write_text(blocks("python")[0])
    game = load("games.py:Game", tmp_path)(size=5)
    first = list(game.fingerprint())
    assert game.move(2) == "..x.."
    game.reset()
    assert game.fingerprint() == first


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target
