"""Sections follow the guarantees of `agentfly.local.preflight`."""

from pathlib import Path

import pytest
import yaml

from agentfly.api import RolloutJob, TrainingRun
from agentfly.api.problems import InvalidManifests
from agentfly.errors import AgentflyError
from agentfly.local import preflight
from agentfly.local.preflight import check_roles, pools_of, rollout_job, training_run
from agentfly.roles.plan import Places, trainer_config

AGENT = """\
import itertools

from agentfly import Agent, Context, reward


@reward
async def done(ctx: Context, answer: int) -> float:
    return float(answer)


def endless(seed):
    for number in itertools.count(seed):
        yield {"question": "x", "answer": number}


def late(seed):
    yield from ({"question": "x", "answer": 1} for _ in range(7))
    yield {"question": "x"}


def raising(seed):
    yield {"question": "x", "answer": 1}
    raise ValueError("no network\\nat all")


def leaving(seed):
    raise SystemExit(3)


def nothing(seed):
    return None


def empty(seed):
    return iter(())


def picky(seed):
    if seed == 41:
        yield {"question": "x", "answer": 1}


agent = Agent(prompt="Answer {question}", reward=done)
"""
POOL = {"type": "Container", "container": {}, "capacity": {"max": 2}}
SERVICE = {
    "type": "ModelService",
    "modelService": {"model": "judge", "maxModelLen": 64},
    "capacity": {"max": 1},
}
RIGHT = '{"question": "x", "answer": 1}\n'


class Folder:
    """A folder with an agent, its tasks and a model; manifests are written into it."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.pools: list[dict] = []
        (base / "agent.py").write_text(AGENT)
        (base / "model").mkdir()
        (base / "model" / "config.json").write_text("{}")
        self.tasks(RIGHT)

    def tasks(self, text: str) -> None:
        (self.base / "tasks.jsonl").write_text(text)

    def pool(self, name: str, spec: dict, **metadata: str) -> None:
        self.pools.append({"kind": "ResourcePool", "metadata": {"name": name, **metadata}, "spec": spec})

    def file(self, *kinds: str, **spec) -> Path:
        right = {
            "agent": {"entrypoint": "agent.py:agent"},
            "tasks": {"path": "tasks.jsonl"},
            "model": {"path": "model"},
            "pools": list(dict.fromkeys(pool["metadata"]["name"] for pool in self.pools)),
        }
        objects = [{"kind": kind, "metadata": {"name": "demo"}, "spec": {**right, **spec}} for kind in kinds]
        path = self.base / "run.yaml"
        documents = [{"apiVersion": "agentfly.dev/v1alpha1", **each} for each in [*self.pools, *objects]]
        path.write_text(yaml.safe_dump_all(documents))
        return path

    def run(self, *sets: str, name: str | None = None, **spec) -> preflight.Work[TrainingRun]:
        return training_run(self.file("TrainingRun", **spec), sets, name)

    def refused(self, *, name: str | None = None, **spec) -> str:
        with pytest.raises(AgentflyError) as caught:
            self.run(name=name, **spec)
        assert caught.value.hints
        return caught.value.render().replace(str(self.base), "<here>")


@pytest.fixture
def folder(tmp_path) -> Folder:
    return Folder(tmp_path)


# 1. what the manifest says, also by the models of the roles


def test_what_is_right_is_handed_on(folder):
    folder.pool("shell", POOL)
    folder.pool("unused", POOL)
    work = folder.run(pools=["shell"])
    assert (work.run.metadata.name, work.base_dir) == ("demo", folder.base)
    assert [pool.metadata.name for pool in work.pools] == ["shell"]
    job = rollout_job(folder.file("RolloutJob"), [], "other")
    assert isinstance(job.run, RolloutJob)
    assert job.run.metadata.name == "other"


def test_model_is_not_looked_for_where_an_api_is_the_policy(folder):
    file = folder.file("RolloutJob", model={"path": "nowhere"})
    assert rollout_job(file, [], None, served=False).run.spec.model.path == "nowhere"
    with pytest.raises(AgentflyError, match=r"spec\.model\.path: nowhere is not a directory"):
        rollout_job(file, [], None)


def test_job_that_an_api_plays_needs_no_model(folder):
    file = folder.file("RolloutJob")
    documents = list(yaml.safe_load_all(file.read_text()))
    del documents[-1]["spec"]["model"]
    file.write_text(yaml.safe_dump_all(documents))
    assert rollout_job(file, [], None, served=False).run.metadata.name == "demo"
    with pytest.raises(AgentflyError, match=r"spec\.model: is missing"):
        rollout_job(file, [], None)


def test_model_of_a_run_does_not_matter_to_who_wants_its_pools(folder):
    folder.pool("shell", POOL)
    (pool,) = pools_of(folder.file("TrainingRun", model={"path": "nowhere"}, steps=1, tasksPerStep=1))
    assert pool.metadata.name == "shell"


def test_a_trainer_is_never_given_what_it_refuses(folder):
    assert folder.refused(algorithm={"clipLow": 0.5}).endswith(
        "spec.algorithm.clipHigh: is less than clipLow\n  hint: raise clipHigh or lower clipLow"
    )


def changed(run: TrainingRun, block: str, **fields) -> TrainingRun:
    """A run that the API's own rules did not see."""
    part = getattr(run.spec, block).model_copy(update=fields)
    return run.model_copy(update={"spec": run.spec.model_copy(update={block: part})})


@pytest.mark.parametrize(
    ("block", "fields", "error"),
    [
        (
            "run_policy",
            {"stall_timeout_seconds": 0},
            "spec.runPolicy.stallTimeoutSeconds: 0 is refused: Input should be greater than 0\n"
            "  hint: change spec.runPolicy.stallTimeoutSeconds; it goes to a role as stall_timeout_s",
        ),
        (
            "tasks",
            {"path": None},
            "spec.tasks.entrypoint: exactly one must be set\n"
            "  hint: change spec.tasks.entrypoint; it goes to a role as tasks_entrypoint",
        ),
        (
            "rollout",
            {"max_turns": 0},
            "spec.rollout.maxTurns: 0 is refused: Input should be greater than or equal to 1\n"
            "  hint: change spec.rollout.maxTurns; it goes to a role as max_turns",
        ),
    ],
)
def test_what_only_the_trainer_would_refuse_is_said_of_the_field(folder, block, fields, error):
    run = changed(folder.run().run, block, **fields)
    with pytest.raises(AgentflyError) as caught:
        check_roles(run, folder.base)
    assert caught.value.render() == error


def test_what_only_a_rollout_worker_would_refuse_is_said_of_the_field(folder):
    job = rollout_job(folder.file("RolloutJob"), [], None).run
    with pytest.raises(AgentflyError, match=r"^spec\.limit: 0 is refused: "):
        check_roles(job.model_copy(update={"spec": job.spec.model_copy(update={"limit": 0})}), folder.base)


def test_every_setting_of_the_trainer_is_a_field_of_spec(folder):
    run = folder.run().run
    config = trainer_config(run, Places(folder.base, folder.base), 1)
    places = {"run_dir", "attempt", "model_path", "base_dir", "checkpoint_dir", "agent_entrypoint"}
    places |= {"ray_address"}
    for name in set(type(config).model_fields) - places:
        path = preflight.RENAMED.get(name) or preflight._path(name, type(run.spec))
        assert path is not None, name
        assert path in fields(run.spec), name


def fields(block, above="") -> set[str]:
    """Paths of all fields of a block."""
    found = set()
    for name, info in type(block).model_fields.items():
        value, path = getattr(block, name), f"{above}{info.alias}"
        found |= {path} | (fields(value, f"{path}.") if hasattr(value, "rules") else set())
    return found


@pytest.mark.parametrize(
    ("here", "hint"), [(0, "set gpus and gpusPerNode to 0 to use the CPU"), (3, "bring it down to 3")]
)
def test_more_gpus_than_there_are_are_refused(folder, monkeypatch, here, hint):
    monkeypatch.setattr(preflight, "gpu_count", lambda: here)
    assert folder.refused(inference={"replicas": 2, "gpus": 1}, trainer={"gpusPerNode": 2}) == (
        "spec.inference.replicas * gpus + spec.trainer.gpusPerNode: "
        f"4 is more than the {here} GPUs of this machine\n  hint: {hint}"
    )
    job = folder.file("RolloutJob", inference={"replicas": 4, "gpus": 1})
    with pytest.raises(
        AgentflyError, match=rf"^spec\.inference\.replicas \* gpus: 4 is more than the {here} GPUs"
    ):
        rollout_job(job, [], None)


def test_as_many_gpus_as_there_are_are_taken(folder, monkeypatch):
    monkeypatch.setattr(preflight, "gpu_count", lambda: 4)
    assert folder.run(inference={"replicas": 2, "gpus": 1}, trainer={"gpusPerNode": 2})


def test_a_policy_on_the_trainers_gpus_needs_none_beside_them(folder, monkeypatch):
    monkeypatch.setattr(preflight, "gpu_count", lambda: 2)
    shared = {"inference": {"mode": "Colocated", "gpus": 1}}
    assert folder.run(**shared, trainer={"gpusPerNode": 2})
    assert folder.refused(**shared, trainer={"gpusPerNode": 4}) == (
        "spec.trainer.gpusPerNode: 4 is more than the 2 GPUs of this machine\n  hint: bring it down to 2"
    )


def test_more_nodes_than_one_machine_is_are_refused(folder):
    assert folder.refused(trainer={"nodes": 2}, tasksPerStep=2, rollout={"groupSize": 2}) == (
        "spec.trainer.nodes: 2 is more than this machine, which is one\n"
        "  hint: set spec.trainer.nodes to 1, or give the run to a cluster: kubectl apply -f FILE"
    )
    assert folder.run(trainer={"nodes": 1})


@pytest.mark.parametrize("kind", ["TrainingRun", "RolloutJob"])
def test_a_run_that_waits_for_a_person_is_refused(folder, kind):
    suspended = folder.file(kind, suspend=True)
    find = training_run if kind == "TrainingRun" else rollout_job
    with pytest.raises(AgentflyError) as caught:
        find(suspended, [], None)
    assert caught.value.render() == (
        "spec.suspend: true keeps a run of a cluster from starting; on one machine the command starts it\n"
        "  hint: remove spec.suspend; Ctrl-C suspends a run here, and the same command goes on"
    )
    assert find(folder.file(kind, suspend=False), [], None)


def test_a_prompt_builder_that_is_none_is_refused(folder):
    rollout = {"strategy": {"type": "Step", "promptBuilder": "agent.py:absent"}}
    assert folder.refused(rollout=rollout).startswith(
        "spec.rollout.strategy.promptBuilder: agent.py:absent: agent.py has no absent\n  hint: "
    )


def test_two_pools_of_one_name_are_refused(folder):
    folder.pool("shell", POOL)
    folder.pool("shell", POOL, namespace="lab")
    assert folder.refused() == (
        "ResourcePool shell: is there 2 times; this machine has no namespaces\n"
        "  hint: give each ResourcePool shell another name, and name one of them in spec.pools"
    )


@pytest.mark.parametrize(("pool", "name"), [("demo-policy", None), ("other-policy", "other")])
def test_a_pool_with_the_name_of_the_policys_own_is_refused(folder, pool, name):
    folder.pool(pool, POOL)
    assert folder.refused(name=name) == (
        f"ResourcePool {pool}: has the name of the pool of the policy's own servers\n"
        "  hint: give the pool another name, or the TrainingRun: --name NAME"
    )


def test_a_file_for_the_other_command_says_which(folder):
    run = {"steps": 1, "tasksPerStep": 1}
    for kind, spec, check, said in (
        (
            "TrainingRun",
            run,
            rollout_job,
            "no RolloutJob, but a TrainingRun\n  hint: play it with `agentfly run",
        ),
        (
            "RolloutJob",
            {},
            training_run,
            "no TrainingRun, but a RolloutJob\n  hint: play it with `agentfly rollout",
        ),
    ):
        with pytest.raises(InvalidManifests) as caught:
            check(folder.file(kind, **spec), [], None)
        assert said in caught.value.render()


def test_a_flag_is_for_the_kind_that_is_run(folder):
    file = folder.file("TrainingRun", "RolloutJob")
    assert training_run(file, ["steps=7", "seed=3"], None).run.spec.steps == 7
    assert rollout_job(file, ["limit=5"], None).run.spec.limit == 5
    with pytest.raises(InvalidManifests, match=r"^--set limit=5: spec\.limit: is not a known field"):
        training_run(file, ["limit=5"], None)


# 2. what it names


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            RIGHT + "\n7\n",
            'tasks.jsonl:3 is a int, not an object with fields\n  hint: write {"field": value}',
        ),
        (
            "\n" + RIGHT + '{"question": 1,}\n',
            "tasks.jsonl:3 is no JSON: Expecting property name enclosed in double quotes: "
            "line 1 column 16 (char 15)\n"
            '  hint: write one JSON object a line, such as {"question": "..."}',
        ),
        (
            RIGHT * 20 + '\n{"answer": 1}\n',
            "prompt: task field question is missing in tasks.jsonl:22 (has: answer)\n"
            "  hint: add it to the row, or write {{question}} for the text itself",
        ),
        (
            "\n\n" + '{"question": 1}\n',
            "reward done: task field answer is missing in tasks.jsonl:3 (has: question)\n"
            "  hint: add it to the row, or give the parameter a default",
        ),
        (
            "\n \n",
            'tasks.jsonl has no tasks\n  hint: write one JSON object a line, such as {"question": "..."}',
        ),
    ],
)
def test_every_row_of_a_file_is_looked_at(folder, text, error):
    folder.tasks(text)
    assert folder.refused() == f"spec.tasks.path: {error}"


def test_a_file_of_tasks_that_is_no_text_is_refused(folder):
    (folder.base / "tasks.jsonl").write_bytes(b"\xff\xfe{}\n")
    assert folder.refused().startswith("spec.tasks.path: tasks.jsonl raised UnicodeDecodeError")


YIELD = "  hint: yield one dict with the fields of a task, such as {'question': '...'}"


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (
            "late",
            "reward done: task field answer is missing in agent.py:late: row 8 (has: question)\n"
            "  hint: add it to the row, or give the parameter a default",
        ),
        ("raising", f"agent.py:raising raised ValueError at <here>/agent.py:23: no network\n{YIELD}"),
        ("leaving", f"agent.py:leaving raised SystemExit at <here>/agent.py:27: 3\n{YIELD}"),
        ("nothing", f"agent.py:nothing raised TypeError: 'NoneType' object is not iterable\n{YIELD}"),
        ("empty", f"agent.py:empty has no tasks\n{YIELD}"),
        ("picky", f"agent.py:picky has no tasks\n{YIELD}"),
    ],
)
def test_the_first_rows_of_a_function_are_looked_at(folder, function, error):
    assert folder.refused(tasks={"entrypoint": f"agent.py:{function}"}) == f"spec.tasks.entrypoint: {error}"


def test_a_function_gets_the_seed_of_the_run_and_may_be_endless(folder):
    assert folder.run(tasks={"entrypoint": "agent.py:picky"}, seed=41)
    assert folder.run(tasks={"entrypoint": "agent.py:endless"})


# 3. paths of ResourcePools


@pytest.mark.parametrize("image", ["root", "./root", "images/../root"])
def test_an_image_is_relative_to_the_manifest(folder, image, monkeypatch):
    monkeypatch.chdir("/")
    (folder.base / "root").mkdir()
    (folder.base / "images").mkdir()
    folder.pool("shell", {**POOL, "container": {"image": image}})
    (pool,) = folder.run().pools
    assert pool.spec.container is not None
    assert Path(pool.spec.container.image).is_absolute()
    assert Path(pool.spec.container.image).samefile(folder.base / "root")


def test_host_is_no_path(folder):
    (folder.base / "host").mkdir()
    folder.pool("shell", POOL)
    (pool,) = folder.run().pools
    assert pool.spec.container is not None
    assert pool.spec.container.image == "host"


@pytest.mark.parametrize("image", ["./root", "/no/such/root", "images/root", "../root"])
def test_an_image_that_is_no_directory_is_refused(folder, image):
    folder.pool("shell", {**POOL, "container": {"image": image}})
    looked = str(folder.base / image).replace(str(folder.base), "<here>")
    assert folder.refused() == (
        f"ResourcePool shell: spec.container.image: {image} is not a directory (looked at {looked})\n"
        "  hint: use host, a directory with a root file system, or tar:, oci:, docker-archive: and a path"
    )


@pytest.mark.parametrize(
    "image", ["python:3.12", "ubuntu", "ghcr.io/a/b", "localhost:5000/a", "a/b:1", "x" * 900]
)
def test_an_image_of_a_registry_is_refused(folder, image):
    folder.pool("shell", {**POOL, "container": {"image": image}})
    assert folder.refused().startswith(
        f"ResourcePool shell: spec.container.image: {image} names an image of a registry, "
        "and sandboxes of this machine's bubblewrap pull none\n"
        f"  hint: make a file of it: docker save -o image.tar {image}, then image: docker-archive:image.tar\n"
    )


@pytest.mark.parametrize("runtime", ["ContainerCLI", "Enroot"])
def test_an_image_of_a_registry_is_for_runtimes_that_pull(folder, runtime):
    folder.pool("shell", {**POOL, "container": {"image": "python:3.12", "runtime": runtime}})
    (pool,) = folder.run().pools
    assert pool.spec.container is not None
    assert pool.spec.container.image == "python:3.12"


@pytest.mark.parametrize(
    ("image", "placed"),
    [
        ("tar:root.tar.gz", "tar:{}/root.tar.gz"),
        ("docker-archive:./root.tar.gz:a:1", "docker-archive:{}/root.tar.gz:a:1"),
        ("packages:bookworm/git", "packages:bookworm/git"),
    ],
)
def test_an_image_in_a_file_is_relative_to_the_manifest(folder, image, placed, monkeypatch):
    monkeypatch.chdir("/")
    (folder.base / "root.tar.gz").touch()
    folder.pool("shell", {**POOL, "container": {"image": image}})
    (pool,) = folder.run().pools
    assert pool.spec.container is not None
    assert pool.spec.container.image == placed.format(folder.base)


def test_a_file_of_an_image_that_is_not_there_is_refused(folder):
    folder.pool("shell", {**POOL, "container": {"image": "tar:no.tar"}})
    assert folder.refused().startswith(
        "ResourcePool shell: spec.container.image: tar:no.tar is not a file (looked at <here>/no.tar)\n"
    )


def test_the_model_of_a_pool_is_relative_to_the_manifest_if_it_is_there(folder):
    folder.pool("judge", SERVICE)
    (pool,) = folder.run().pools
    assert pool.spec.model_service is not None
    assert pool.spec.model_service.model == "judge"
    (folder.base / "judge").mkdir()
    (pool,) = folder.run().pools
    assert pool.spec.model_service is not None
    assert pool.spec.model_service.model == str(folder.base / "judge")


def test_a_path_of_a_model_that_is_not_there_is_refused(folder):
    service = {**SERVICE, "modelService": {"model": "./judge", "maxModelLen": 64}}
    folder.pool("judge", service)
    assert folder.refused() == (
        "ResourcePool judge: spec.modelService.model: ./judge is not a directory (looked at <here>/judge)\n"
        "  hint: give a directory in Hugging Face layout, or a name on the hub"
    )


# 4. nothing is written


def test_nothing_is_written(folder):
    file = folder.file("TrainingRun")
    before = sorted(path for path in folder.base.rglob("*"))
    training_run(file, [], None)
    assert sorted(path for path in folder.base.rglob("*")) == before


# a model that sees


def test_model_that_sees_needs_its_processor(folder: Folder) -> None:
    (folder.base / "model" / "config.json").write_text('{"vision_config": {}}')
    said = folder.refused()
    assert (
        "spec.model.path: <here>/model is a model that sees images, without preprocessor_config.json" in said
    )
    (folder.base / "model" / "processor_config.json").write_text("{}")
    folder.run()


@pytest.mark.parametrize("text", ["{", "3"])
def test_config_of_a_model_that_is_no_json_object_is_said(folder: Folder, text: str) -> None:
    (folder.base / "model" / "config.json").write_text(text)
    assert "spec.model.path: <here>/model/config.json: " in folder.refused()
