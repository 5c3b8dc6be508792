"""Sandboxes of an ordinary user: the suites of the runner and the daemon again, as nobody."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NOBODY = "65534"
SUITES = ("bubblewrap", "bubblewrap_hostile", "sandboxd", "attacks", "attacks_inside", "images")
# The parts that depend on who runs them; the rest is the same code inside the sandbox.
CHOSEN = (
    "check_leaves or started_member or cancelled_start or unclean_reset or side_by_side or image_folder "
    "or network or next_tenant or fork_bomb or memory_hog or forbidden or visible or reached or capability "
    "or flood or expired or residue or trace or attacks or every_form or one_copy"
)


def _python() -> str:
    """An interpreter of this version that everybody may run: this one may be in root's home."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (sys.executable, shutil.which(name, path="/usr/local/bin:/usr/bin")):
        if candidate is None:
            continue
        probe = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", candidate, "-c", ""]
        if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            return candidate
    pytest.skip(f"{name} is missing outside of root's home: apt-get install {name}")


@pytest.mark.skipif(os.geteuid() != 0, reason="the other suites run as an ordinary user already")
@pytest.mark.timeout(240)
def test_sandboxes_work_for_an_ordinary_user(sandboxd: Path, run_dir: Path) -> None:
    home = run_dir.with_name("nobody")
    home.mkdir()
    os.chown(home, int(NOBODY), int(NOBODY))
    home.parent.chmod(0o711)
    files = [str(HERE / f"test_{name}.py") for name in SUITES]
    ended = subprocess.run(
        [
            *("setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", _python(), "-m", "pytest"),
            *("-q", "-p", "no:cacheprovider", f"--basetemp={home}/t", "-k", CHOSEN, *files),
        ],
        cwd=ROOT,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "PYTHONPATH": ":".join(
                [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
            ),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert " passed" in ended.stdout
