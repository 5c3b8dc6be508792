"""The command line with wrong input: exit code 2, one error with its remedy, and nothing was started.

The whole text is compared, with ``<here>`` for the folder of the manifest.
"""

import os
import secrets
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentfly.local.preflight import training_run
from agentfly.local.rundir import RunDir

ROOT = Path(__file__).parents[2]
MANIFEST = """\
apiVersion: agentfly.dev/v1alpha1
kind: ResourcePool
metadata: {name: shell}
spec:
  type: Container
  container: {memory: 96Mi}
  capacity: {min: 1, max: 4}
"""
RUN = """\
---
apiVersion: agentfly.dev/v1alpha1
kind: TrainingRun
metadata: {name: demo}
spec:
  agent: {entrypoint: "agent.py:agent"}
  tasks: {entrypoint: "agent.py:tasks"}
  pools: [shell]
  model: {path: model}
  steps: 3
"""
AGENT = '''\
from collections.abc import Iterator

from agentfly import Agent, Context, reward, tool


@tool
async def shell(command: str, ctx: Context) -> str:
    """Run a command."""
    box = await ctx.acquire("shell")
    return (await box.sandbox.exec(command)).text


@reward
async def done(ctx: Context) -> float:
    return 1.0


def tasks(seed: int) -> Iterator[dict]:
    yield {"what": "nothing"}


agent = Agent(prompt="do {what}", tools=[shell], reward=done)
'''


@dataclass(frozen=True)
class Wrong:
    """One change to right input, the error that it gives, and what else stands on the command line."""

    error: str
    manifest: tuple[str, str] = ("", "")
    agent: tuple[str, str] = ("", "")
    flags: tuple[str, ...] = ()


SECOND = RUN.replace("name: demo", "name: other")
WRONG = {
    "unknown field": Wrong(
        "run.yaml:18: spec.stepz: is not a known field\n  hint: did you mean steps?",
        manifest=("steps: 3", "steps: 3\n  stepz: 4"),
    ),
    "negative capacity": Wrong(
        "run.yaml:7: spec.capacity.min: -1 is less than 0\n  hint: use 0 or more",
        manifest=("min: 1", "min: -1"),
    ),
    "negative capacity by a flag": Wrong(
        "--set pool/shell.capacity.max=-4: spec.capacity.max: -4 is less than 1\n"
        "  hint: use 1 or more",
        flags=("--set", "pool/shell.capacity.max=-4"),
    ),
    "missing file of the agent": Wrong(
        "run.yaml:13: spec.agent.entrypoint: agnt.py is not a file (looked at <here>/agnt.py)\n"
        "  hint: did you mean agent.py?",
        manifest=("agent.py:agent", "agnt.py:agent"),
    ),
    "missing name in it": Wrong(
        "spec.agent.entrypoint: agent.py:agnt: agent.py has no agnt\n  hint: did you mean agent.py:agent?",
        manifest=("agent.py:agent", "agent.py:agnt"),
    ),
    "no agent": Wrong(
        "spec.agent.entrypoint: agent.py:shell is of type Tool, not an agentfly.Agent\n"
        "  hint: point it at the variable that holds Agent(...)",
        manifest=("agent.py:agent", "agent.py:shell"),
    ),
    "model that is no directory": Wrong(
        "run.yaml:16: spec.model.path: weights is not a directory (looked at <here>/weights)\n"
        "  hint: give a directory in Hugging Face layout, or remove path and set build",
        manifest=("{path: model}", "{path: weights}"),
    ),
    "model without config.json": Wrong(
        "spec.model.path: <here>/runs is no model in Hugging Face layout: it has no config.json\n"
        "  hint: name a folder that save_pretrained wrote, with its tokenizer",
        flags=("--set", "model.path=runs"),
    ),
    "tool with an untyped parameter": Wrong(
        "spec.agent.entrypoint: agent.py:agent: <here>/agent.py:6: tool shell: parameter command has no"
        " type\n"
        "  hint: annotate it, for example `command: str`\n"
        "  hint: a Context is injected as `ctx`",
        agent=("command: str", "command"),
    ),
    "reward that returns text": Wrong(
        "spec.agent.entrypoint: agent.py:agent: <here>/agent.py:13: reward done: returns str, which is not a"
        " number\n"
        "  hint: annotate it `-> float`, or `-> float | None` if it may leave a rollout unscored",
        agent=("-> float", "-> str"),
    ),
    "agent without a reward": Wrong(
        "spec.agent.entrypoint: agent.py:agent: <here>/agent.py:22: reward: tasks is not a reward\n"
        "  hint: put @reward on tasks",
        agent=("reward=done", "reward=tasks"),
    ),
    "tasks with another signature": Wrong(
        "spec.tasks.entrypoint: agent.py:tasks cannot be called with seed=0: missing a required argument:"
        " 'count'\n"
        "  hint: define it as def tasks(seed: int) -> Iterator[dict]",
        agent=("seed: int", "count: int"),
    ),
    "task without a field of the prompt": Wrong(
        "spec.tasks.entrypoint: prompt: task field what is missing in agent.py:tasks: row 1 (has: which)\n"
        "  hint: add it to the row, or write {{what}} for the text itself",
        agent=('"what": "nothing"', '"which": "nothing"'),
    ),
    "sandboxes from an image": Wrong(
        "ResourcePool shell: spec.container.image: python:3.12 names an image of a registry,"
        " and sandboxes of this machine's bubblewrap pull none\n"
        "  hint: make a file of it: docker save -o image.tar python:3.12,"
        " then image: docker-archive:image.tar\n"
        "  hint: or a folder: skopeo copy docker://python:3.12 oci:image:latest,"
        " then image: oci:image:latest\n"
        "  hint: or let a runner that pulls have it: runtime: ContainerCLI here, or a cluster",
        flags=("--set", "pool/shell.container.image=python:3.12"),
    ),
    "upper clip below the lower one": Wrong(
        "--set algorithm.clipHigh=0.1: spec.algorithm.clipHigh: 0.1 is less than clipLow\n"
        "  hint: raise clipHigh or lower clipLow",
        flags=("--set", "algorithm.clipHigh=0.1"),
    ),
    "tasks that are no function": Wrong(
        "spec.tasks.entrypoint: agent.py:agent is of type Agent, not a function\n"
        "  hint: define it as def tasks(seed: int) -> Iterator[dict]",
        manifest=("agent.py:tasks", "agent.py:agent"),
    ),
    "syntax error in the agent": Wrong(
        "spec.agent.entrypoint: agent.py:agent: <here>/agent.py:14 raised SyntaxError: expected ':'\n"
        "  hint: `python <here>/agent.py` shows the whole traceback",
        agent=("-> float:", "-> float"),
    ),
    "exception in the agent": Wrong(
        "spec.agent.entrypoint: agent.py:agent: <here>/agent.py:22 raised NameError: name 'nobody' is not"
        " defined\n"
        "  hint: `python <here>/agent.py` shows the whole traceback",
        agent=("reward=done", "reward=nobody"),
    ),
    "agent that imports what is not there": Wrong(
        "spec.agent.entrypoint: agent.py:agent: <here>/agent.py:1 raised ModuleNotFoundError: No module named"
        " 'no_such_thing'\n"
        "  hint: `python <here>/agent.py` shows the whole traceback",
        agent=("from collections.abc import", "from no_such_thing import"),
    ),
    "two runs of one name": Wrong(
        "run.yaml:21: metadata.name: demo is the name of another TrainingRun, on line 11\n"
        "  hint: give it another name",
        manifest=(RUN, RUN + RUN),
    ),
    "two runs": Wrong(
        "run.yaml: has 2 objects of kind TrainingRun; exactly one can be run\n"
        "  hint: keep one TrainingRun in the file, beside its ResourcePools",
        manifest=(RUN, RUN + SECOND),
    ),
    "no run": Wrong(
        "run.yaml: has 0 objects of kind TrainingRun; exactly one can be run\n"
        "  hint: keep one TrainingRun in the file, beside its ResourcePools",
        manifest=(RUN, ""),
    ),
    "pool that is not there": Wrong(
        "run.yaml:15: spec.pools[0]: shel is no ResourcePool of this file\n  hint: did you mean shell?",
        manifest=("[shell]", "[shel]"),
    ),
    "flag with an unknown path": Wrong(
        "--set rollout.groupsize=4: spec.rollout.groupsize: is not a known field\n"
        "  hint: did you mean groupSize?",
        flags=("--set", "rollout.groupsize=4"),
    ),
    "flag without a value": Wrong(
        "--set steps: is not path=value\n  hint: write path=value, as in steps=30",
        flags=("--set", "steps"),
    ),
    "bad name": Wrong(
        "--name: My_Run is not a name\n"
        "  hint: use at most 40 lower case letters, digits and '-' inside",
        flags=("--name", "My_Run"),
    ),
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder in which everything is right."""
    (tmp_path / "run.yaml").write_text(MANIFEST + RUN)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "runs").mkdir()
    return tmp_path


def agentfly(here: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run the command line in a folder, with an empty cache; nothing that it started may be left."""
    mark = f"AGENTFLY_TEST_MARK={secrets.token_hex(8)}"
    name, _, value = mark.partition("=")
    done = subprocess.run(
        [sys.executable, "-m", "agentfly.cli", *arguments],
        cwd=here,
        env={
            "PATH": os.environ["PATH"],
            "HOME": os.environ["HOME"],
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "XDG_CACHE_HOME": str(here / "cache"),
            "COLUMNS": "100",
            name: value,
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert _marked(mark) == []
    return done


def _marked(mark: str) -> list[str]:
    """Processes with this variable in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found


def tree(here: Path) -> dict[str, str]:
    """Every file and folder, with its content."""
    return {
        str(path.relative_to(here)): path.read_text() if path.is_file() else "folder"
        for path in here.rglob("*")
    }


def replace_once(path: Path, change: tuple[str, str]) -> None:
    text = path.read_text()
    if change[0]:
        assert change[0] in text
        path.write_text(text.replace(*change, 1))


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_refused_with_its_remedy(here: Path, name: str) -> None:
    wrong = WRONG[name]
    replace_once(here / "run.yaml", wrong.manifest)
    replace_once(here / "agent.py", wrong.agent)
    before = tree(here)
    done = agentfly(here, "run", "-f", "run.yaml", *wrong.flags)
    assert done.stderr.replace(str(here), "<here>") == wrong.error + "\n"
    assert (done.returncode, done.stdout) == (2, "")
    assert tree(here) == before


def test_run_with_another_spec_is_refused_and_stays_as_it_was(here: Path) -> None:
    folder = RunDir(here / "runs" / "demo")
    with folder.claim(training_run(here / "run.yaml", [], None).run.spec.to_json()):
        pass
    folder.metrics.write_text('{"step": 1, "reward": 0.5}\n')
    before = tree(here)
    done = agentfly(here, "run", "-f", "run.yaml", "--set", "steps=30", "--set", "pools=[]")
    assert done.stderr.replace(str(here), "<here>") == (
        'run demo: spec.pools: ["shell"] is now []; a run is continued with the spec it was started with\n'
        "  hint: also changed: spec.steps: 3 is now 30\n"
        "  hint: give the new run a name of its own: --name NAME\n"
        "  hint: or start over: rm -r <here>/runs/demo\n"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert tree(here) == before


def test_all_errors_of_a_manifest_are_told_at_once(here: Path) -> None:
    replace_once(here / "run.yaml", ("min: 1", "min: -1"))
    replace_once(here / "run.yaml", ("steps: 3", "steps: three"))
    done = agentfly(here, "run", "-f", "run.yaml")
    assert done.stderr == (
        "run.yaml:7: spec.capacity.min: -1 is less than 0\n"
        "  hint: use 0 or more\n"
        'run.yaml:17: spec.steps: "three" is not a whole number\n'
        "  hint: write a whole number, such as 100\n"
    )
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), "agentfly: error: the following arguments are required: COMMAND"),
        (("run",), "agentfly run: error: the following arguments are required: -f/--file"),
        (("run", "-f", "a", "--st", "x"), None),
        (("train",), "agentfly: error: argument COMMAND: invalid choice: 'train' (choose from 'run',"),
    ],
)
def test_wrong_command_lines_are_refused(here: Path, arguments: tuple[str, ...], error: str | None) -> None:
    done = agentfly(here, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    if error is not None:
        assert done.stderr.splitlines()[-1].startswith(error)
    assert "Traceback" not in done.stderr


def test_manifest_that_is_not_there_is_refused_with_the_one_that_is(here: Path) -> None:
    done = agentfly(here, "run", "-f", "rnu.yaml")
    assert done.stderr == (
        "rnu.yaml: cannot be read: No such file or directory\n  hint: did you mean run.yaml?\n"
    )
    assert (done.returncode, done.stdout) == (2, "")


# Help, doctor, crds.


def test_help_lists_the_commands(here: Path) -> None:
    done = agentfly(here, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        done.stdout
        == """\
usage: agentfly [-h] [-v] COMMAND ...

Agentic reinforcement learning.

positional arguments:
  COMMAND
    run          train: run the TrainingRun of a manifest on this machine, or go on with it
    rollout      run the RolloutJob of a manifest on this machine
    pools        how the pools of what runs here, or in a namespace of a cluster, are doing
    leases       who holds which member of what runs here, or in a namespace, and for how long
    top          runs, jobs and pools of a namespace of a cluster, on one screen
    broker       serve the pools of a namespace; the operator runs this in a pod of each
    env          build environments of trainer and policy; prints their Python
    crds         write the CustomResourceDefinitions
    chat         talk to an agent; an OpenAI-compatible API writes its turns
    doctor       what works on this machine, and why the rest does not

options:
  -h, --help     show this help message and exit
  -v, --verbose  log what happens inside
"""
    )


def test_help_of_run_says_what_every_option_is_for(here: Path) -> None:
    done = agentfly(here, "run", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        done.stdout
        == """\
usage: agentfly run [-h] -f FILE [--set PATH=VALUE] [--name NAME] [--runs RUNS]

train: run the TrainingRun of a manifest on this machine, or go on with it

options:
  -h, --help            show this help message and exit
  -f FILE, --file FILE  manifest, with its ResourcePools
  --set PATH=VALUE      change a field, such as model.path=DIR or pool/shell.capacity.max=4
  --name NAME           name of the run; default: that of the manifest
  --runs RUNS           where runs are kept (default: runs)
"""
    )


def test_doctor_tells_what_is_there_in_full(here: Path) -> None:
    done = agentfly(here, "doctor", COLUMNS="200")
    assert done.stderr == ""
    for part in ("Python", "sandboxd", "sandboxes", "cc", "environment trainer", "GPU", "memory", "disk at"):
        assert f"│ {part}" in done.stdout
    assert "not built yet; `agentfly env trainer` builds it, as does a run" in done.stdout
    assert "…" not in agentfly(here, "doctor", COLUMNS="80").stdout


def test_doctor_fails_for_what_is_missing_and_names_the_remedy(here: Path) -> None:
    (here / "bin").mkdir()
    (here / "bin" / "rm").symlink_to(shutil.which("rm") or "")
    done = agentfly(here, "doctor", PATH=str(here / "bin"))
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.count("│ missing") == 3
    assert "install gcc" in done.stdout
    assert done.stdout.count("install binutils") == 2


def test_crds_of_the_repository_are_those_of_the_models(here: Path) -> None:
    done = agentfly(here, "crds", "--check", "--directory", str(ROOT / "crds"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_crds_that_differ_are_named(here: Path) -> None:
    assert agentfly(here, "crds", "--directory", "crds").returncode == 0
    changed = min((here / "crds").glob("*.yaml"))
    changed.write_text(changed.read_text() + "x: 1\n")
    done = agentfly(here, "crds", "--check", "--directory", "crds")
    assert (done.returncode, done.stdout) == (1, "")
    assert changed.name in done.stderr
