"""References to Python objects: `agent.py:agent` (a file) and `package.module:name` (something importable).

Guarantees:
1. A file is run once per call under a module name of its own, so that two files of the same name never meet.
2. Tracebacks show the file's lines, and what the module defines can be pickled and inspected: the module stays in
   `sys.modules` under that name. It does not when running it failed.
3. A file may import what stands beside it.
4. What is wrong is told apart: the form, the file or module, the name in it, or an exception while it ran, with
   the exception's type, text and place.
"""

import difflib
import hashlib
import importlib
import importlib.util
import itertools
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from agentfly.errors import AgentflyError


class ReferenceFailed(AgentflyError):
    """A reference leads to nothing usable."""


def load(reference: str, base: Path) -> Any:
    """The object that a reference names.

    Args:
        reference: `file.py:name`, the file relative to `base` or absolute, or `package.module:name`.
        base: directory of the manifest.

    Raises:
        ReferenceFailed: see guarantee 4.
    """
    place, colon, name = reference.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise ReferenceFailed(
            f"{reference}: is not a reference to Python",
            hints=["write file.py:name or package.module:name, as in agent.py:agent"],
        )
    module = _file(reference, base / place) if place.endswith(".py") else _module(reference, place)
    try:
        return getattr(module, name)
    except AttributeError:
        known = [word for word in vars(module) if not word.startswith("_")]
        near = difflib.get_close_matches(name, known, n=1)
        hints = (
            [f"did you mean {place}:{near[0]}?"] if near else [f"define {name} at the top level of {place}"]
        )
        raise ReferenceFailed(f"{reference}: {place} has no {name}", hints=hints) from None


_COUNTER = itertools.count()


def _module(reference: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _raised(reference, error) from error
        hints = ["install it, or write file.py:name for a file beside the manifest"]
        raise ReferenceFailed(f"{reference}: Python finds no module {error.name}", hints=hints) from None
    except Exception as error:
        raise _raised(reference, error) from error


def _file(reference: str, path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise ReferenceFailed(f"{reference}: {path} is not a file", hints=_beside(path))
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"{path.stem}_{digest}_{next(_COUNTER)}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ReferenceFailed(f"{reference}: {path} is not a file that Python can import")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):
            raise
        raise _raised(reference, error) from error
    return module


def _beside(path: Path) -> list[str]:
    names = [entry.name for entry in path.parent.glob("*.py")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return [f"did you mean {near[0]}?"] if near else [f"make {path.name}, or correct the reference"]


def _raised(reference: str, error: Exception) -> ReferenceFailed:
    """The error of code that raised while it was run, with the innermost line that is not the import system."""
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError) and error.filename:
        return ReferenceFailed(f"{reference}: {error.filename}:{error.lineno} raised {what}")
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename
    ]
    own = [frame for frame in frames if frame.filename != __file__]
    place = f"{own[-1].filename}:{own[-1].lineno}" if own else "its import"
    return ReferenceFailed(f"{reference}: {place} raised {what}")
