"""The one thing that is said to a pod that runs: an annotation, which the kubelet brings as a file.

Guarantees:
1. Only the value ``true`` asks; a file that is not there, or cannot be read, asks for nothing.
"""

from pathlib import Path


def asks(file: Path) -> bool:
    """Whether the pod is asked to suspend."""
    try:
        return file.read_text().strip() == "true"
    except (OSError, UnicodeDecodeError):
        return False
