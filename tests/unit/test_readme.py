"""What the README shows is true: its agent, its manifest, its commands and its error are tried here."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from agentfly import Agent
from agentfly.api import RolloutJob, TrainingRun
from agentfly.api.load import load_manifests
from agentfly.api.problems import InvalidManifests
from agentfly.cli import _parser
from agentfly.refs import load

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = ("quickstart", "cluster", "agents")
PATHS = ("README.md", *(f"examples/{name}/README.md" for name in EXAMPLES))
TEXTS = {path: (REPOSITORY / path).read_text() for path in PATHS}


OBJECTS = ("job/", "trun/", "rjob/")


def blocks(language: str, path: str = "README.md") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXTS[path], re.S)


@pytest.fixture
def project(tmp_path) -> Path:
    (tmp_path / "agent.py").write_text(blocks("python")[0])
    (tmp_path / "run.yaml").write_text(blocks("yaml")[0])
    (tmp_path / "tasks.jsonl").write_text('{"test_command": "true"}\n')
    (tmp_path / "models" / "my-policy").mkdir(parents=True)
    return tmp_path


def test_the_agent_is_one(project):
    agent = load("agent.py:agent", project)
    assert isinstance(agent, Agent)
    assert agent.messages({"test_command": "make test"}) == [
        {"role": "user", "content": "Make this command succeed: make test"}
    ]
    assert [schema["function"]["name"] for schema in agent.schemas()] == ["shell"]
    assert list(agent.schemas()[0]["function"]["parameters"]["properties"]) == ["command"]


def test_the_manifest_is_right(project):
    manifests = load_manifests(project / "run.yaml")
    assert [pool.metadata.name for pool in manifests.pools] == ["shell"]
    assert manifests.runs[0].spec.rollout.group_size == 8


def test_the_error_is_what_a_wrong_manifest_gives(project, monkeypatch):
    monkeypatch.chdir(project)
    text = (project / "run.yaml").read_text().replace("{min: 8, max: 16}", "{min: 8, max: 4}")
    (project / "run.yaml").write_text(text)
    with pytest.raises(InvalidManifests) as caught:
        load_manifests("run.yaml")
    assert caught.value.render() in TEXTS["README.md"]


def commands(path: str) -> list[list[str]]:
    lines = [line for block in blocks("bash", path) for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


@pytest.mark.parametrize("path", TEXTS)
def test_every_command_is_one(path):
    targets = re.findall(r"^([a-z0-9-]+):", (REPOSITORY / "Makefile").read_text(), re.M)
    tried = 0
    for words in commands(path):
        if words[0] == "make":
            assert words[1] in targets
        elif words[0] == "agentfly":
            _parser().parse_args(words[1:])
        elif words[0] == "kubectl":
            named = [word.removeprefix("--from-file=") for word in words if "/" in word]
            for place in named:
                assert place.startswith(OBJECTS) or (REPOSITORY / place).exists(), place
        else:
            assert words[0] == "apt-get"
        tried += 1
    assert tried >= 3


@pytest.mark.parametrize("path", TEXTS)
def test_every_link_leads_somewhere(path):
    for target in re.findall(r"\]\(([^)#:]+)\)", TEXTS[path]):
        assert (REPOSITORY / path).parent.joinpath(target).exists(), target


@pytest.mark.parametrize("name", ["run.yaml", "rollout.yaml"])
def test_the_quickstarts_manifests_are_right(name):
    load_manifests(REPOSITORY / "examples" / "quickstart" / name)


def test_a_run_in_a_cluster_is_that_of_one_machine_with_places_and_pods():
    examples = REPOSITORY / "examples"
    here = load_manifests(examples / "quickstart" / "run.yaml").runs[0].spec
    there = TrainingRun.model_validate(yaml.safe_load((examples / "cluster/training.yaml").read_text())).spec
    of_cluster = {"source", "storage", "inference", "trainer"}
    assert there.to_json() | {name: None for name in of_cluster} == here.to_json() | {
        name: None for name in of_cluster
    }
    assert there.trainer.micro_batch_size == here.trainer.micro_batch_size
    assert there.inference.dtype == here.inference.dtype


def test_the_clusters_job_is_one():
    text = (REPOSITORY / "examples/cluster/rolloutjob.yaml").read_text()
    assert RolloutJob.model_validate(yaml.safe_load(text)).spec.workers.count == 3
