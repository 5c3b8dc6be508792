"""Stub CUDA libraries, so that the CUDA build of torch imports and computes on a machine without a GPU.

Guarantees:
1. Every library that one of torch's own libraries needs and that is not installed gets a stub, with the
   symbols and symbol versions that torch's libraries look for. Libraries that are installed are left alone.
2. A stubbed function returns an error code; no path of a CPU build calls one.
3. A machine without a C compiler or binutils gets an error that names what to install, before anything is
   written.

torch's libraries bind lazily: the loader wants every library by its soname and every symbol version, and
looks symbols up on their first call.
"""

import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agentfly.errors import AgentflyError

# Symbols without a version tell their library by their prefix; the longest prefix wins.
_SONAME_OF_PREFIX = {
    "cublasLt": "libcublasLt",
    "cublas": "libcublas",
    "cudnn": "libcudnn",
    "cusparseLt": "libcusparseLt",
    "cusparse": "libcusparse",
    "cufft": "libcufft",
    "curand": "libcurand",
    "cusolver": "libcusolver",
    "nccl": "libnccl",
    "nvrtc": "libnvrtc",
    "cuFile": "libcufile",
    "nvshmem": "libnvshmem_host",
}
_CUDA_LIBRARY = re.compile(r"lib(cu|nv|nccl)")
_DRIVER = "libcuda.so.1"  # part of the driver, opened by torch on demand only
_NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")
_UNDEFINED = re.compile(r"\*UND\*\s+\S+\s+(?:(?:\((\S+)\)|Base)\s+)?(\S+)$", re.MULTILINE)
_TOOL_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Needs:
    """What one shared library asks of others.

    Attributes:
        sonames: the libraries it is linked against.
        symbols: undefined symbol -> its version, None for none.
        versions: symbol version -> the library that has to define it.
    """

    sonames: frozenset[str]
    symbols: dict[str, str | None]
    versions: dict[str, str]


def parse_needs(dynamic: str, symbols: str, versions: str) -> Needs:
    """Read the output of ``readelf -d``, ``objdump -T`` and ``readelf -V`` for one library."""
    version_owner: dict[str, str] = {}
    owner = None
    for line in versions.splitlines():
        if found := re.search(r"File: (\S+)", line):
            owner = found[1]
        elif owner and (found := re.search(r"Name: (\S+)", line)):
            version_owner.setdefault(found[1], owner)
    undefined = {name: version or None for version, name in _UNDEFINED.findall(symbols)}
    return Needs(frozenset(_NEEDED.findall(dynamic)), undefined, version_owner)


def plan_stubs(needs: Iterable[Needs], installed: frozenset[str]) -> dict[str, dict[str | None, list[str]]]:
    """Which stubs to make: soname -> symbol version (None: no version) -> symbols, all sorted."""
    sonames: set[str] = set()
    symbols: dict[str, str | None] = {}
    owners: dict[str, str] = {}
    for need in needs:
        sonames |= need.sonames
        symbols = need.symbols | symbols
        owners = need.versions | owners
    missing = sorted(name for name in sonames - installed if _CUDA_LIBRARY.match(name) and name != _DRIVER)
    stubs: dict[str, dict[str | None, list[str]]] = {name: defaultdict(list) for name in missing}
    for symbol, version in sorted(symbols.items()):
        library = owners.get(version) if version else _soname_by_prefix(symbol)
        for name in missing:
            if library and (name == library or name.startswith(library + ".")):
                stubs[name][version].append(symbol)
    return {name: dict(by_version) for name, by_version in stubs.items()}


def _soname_by_prefix(symbol: str) -> str | None:
    prefixes = [prefix for prefix in _SONAME_OF_PREFIX if symbol.startswith(prefix)]
    return _SONAME_OF_PREFIX[max(prefixes, key=len)] if prefixes else None


def check_tools() -> None:
    """Raise an error that says what to install unless the tools for ``build_stubs`` are here."""
    missing = [tool for tool in ("cc", "readelf", "objdump") if shutil.which(tool) is None]
    if missing:
        raise AgentflyError(
            f"environment: {', '.join(missing)} not found, needed to run the CUDA build of torch on a CPU",
            hints=["install a C compiler and binutils, for example: apt-get install gcc libc6-dev binutils"],
        )


def build_stubs(site_packages: Path) -> list[str]:
    """Make every missing CUDA library of the torch in ``site_packages``; returns their names."""
    check_tools()
    torch_libraries = sorted((site_packages / "torch" / "lib").glob("*.so*"))
    if not torch_libraries:
        raise AgentflyError(f"environment: {site_packages} has no torch")
    target = site_packages / "nvidia" / "cu13" / "lib"  # in the search path of torch's own libraries
    target.mkdir(parents=True, exist_ok=True)
    installed = {path.name for path in torch_libraries}
    installed |= {path.name for path in site_packages.glob("nvidia/*/lib/*.so*")}
    needs = [
        parse_needs(_run("readelf", "-d", path), _run("objdump", "-T", path), _run("readelf", "-V", path))
        for path in torch_libraries
    ]
    stubs = plan_stubs(needs, frozenset(installed))
    for soname, by_version in stubs.items():
        _compile(soname, by_version, target / soname)
    return list(stubs)


def _compile(soname: str, by_version: dict[str | None, list[str]], output: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch) / "stub.c", Path(scratch) / "versions"
        symbols = [symbol for group in by_version.values() for symbol in group]
        code = "".join(f"int {symbol}(void) {{ return 3; }}\n" for symbol in symbols)
        source.write_text(code or "int empty;\n")
        versions = {version: group for version, group in by_version.items() if version}
        script.write_text("".join(f"{v} {{ global: {'; '.join(s)}; }};\n" for v, s in versions.items()))
        flags = ["-shared", "-fPIC", "-Os", "-s", "-w", "-nostdlib", "-fno-builtin", f"-Wl,-soname,{soname}"]
        if versions:
            flags.append(f"-Wl,--version-script={script}")
        _run("cc", *flags, "-o", output, source)


def _run(*argv: str | Path) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False)
    if done.returncode != 0:
        reason = f"exited with {done.returncode}: {done.stderr.strip()[-500:]}"
        raise AgentflyError(f"environment: {argv[0]} {reason}")
    return done.stdout
