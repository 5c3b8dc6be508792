"""Where the daemon's binary is.

Guarantees:
1. What is returned exists and may be executed.
"""

import os
import shutil
from pathlib import Path

from agentfly.errors import AgentflyError

BUNDLED = Path(__file__).parent / "bin" / "sandboxd"


def find_sandboxd() -> Path:
    """The binary that was built into this package, else the one on PATH.

    Raises:
        AgentflyError: there is none.
    """
    if os.access(BUNDLED, os.X_OK):
        return BUNDLED
    if found := shutil.which("sandboxd"):
        return Path(found)
    raise AgentflyError(f"sandboxd: {BUNDLED} does not exist", hints=["make sandboxd"])
