"""Kustomizations of this repository, rendered by kubectl."""

import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
MANIFESTS = ROOT / "manifests"
KUBECTL = Path(sys.executable).parent / "kubectl"

Object = dict[str, Any]


class Reader(yaml.SafeLoader):
    """kubectl writes 0.000001 as 1e-06, which is a number to it and to the API server, and text to PyYAML."""


Reader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789")
)


@functools.cache
def text(folder: Path) -> str:
    """What ``kubectl apply -k`` would send."""
    command = [str(KUBECTL), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def objects(folder: Path) -> dict[tuple[str, str], Object]:
    """The objects of a kustomization by kind and name."""
    found = {}
    for each in yaml.load_all(text(folder), Reader):
        key = (each["kind"], each["metadata"]["name"])
        assert key not in found, key
        found[key] = each
    return found
