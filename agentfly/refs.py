"""References to Python objects: `agent.py:agent` (a file) and `package.module:name` (something importable).

Guarantees:
1. A file is run once, under a module name made of its path and content: two files of one name never meet, two
   references into one file get the same module, and an edited file is run anew.
2. The module stays in `sys.modules` under that name, so that tracebacks, `inspect` and pickle find it. A
   module that failed does not stay.
3. A file may import what stands beside it, as a script may.
4. What is wrong is told apart: the form, the file or module, the name in it, or an exception while it ran,
   with the exception's type, first line and place. An `AgentflyError` keeps its own words and remedies, with
   the line outside agentfly that led to it.
"""

import difflib
import hashlib
import importlib
import importlib.util
import os
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
    place, _, name = reference.rpartition(":")
    if not place or not name.isidentifier():
        hints = ["write file.py:name or package.module:name, as in agent.py:agent"]
        raise ReferenceFailed(f"{reference}: is not a reference to Python", hints=hints)
    module = _file(reference, base / place) if place.endswith(".py") else _module(reference, place)
    try:
        return getattr(module, name)
    except AttributeError:
        known = [word for word in vars(module) if not word.startswith("_")]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {place}:{near[0]}?" if near else f"define {name} at the top level of {place}"
        raise ReferenceFailed(f"{reference}: {place} has no {name}", hints=[hint]) from None


def _module(reference: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _raised(reference, error) from error
        hints = ["install it, or write file.py:name for a file beside the manifest"]
        raise ReferenceFailed(f"{reference}: Python finds no module {error.name}", hints=hints) from None
    except (Exception, SystemExit) as error:
        raise _raised(reference, error) from error


def _file(reference: str, path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        hints = _beside(path, Path(reference.rpartition(":")[0]))
        raise ReferenceFailed(f"{reference}: {path} is not a file", hints=hints)
    source = path.read_bytes()
    digest = hashlib.sha256(str(path).encode() + b"\0" + source).hexdigest()[:12]
    name = f"{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a path that ends in .py always has a loader"
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    try:
        # Not through the loader: its bytecode cache misses an edit of equal size in the same second.
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _raised(reference, error) from error
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _beside(path: Path, written: Path) -> list[str]:
    """Hints for a file that is not there, as the reference would name it."""
    names = [entry.name for entry in path.parent.glob("*.py")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    if near:
        return [f"did you mean {written.with_name(near[0])}?"]
    return [f"make {written}, or correct the reference"]


def _raised(reference: str, error: BaseException) -> ReferenceFailed:
    """The error of code that raised while it ran, with its innermost line outside the import system."""
    if isinstance(error, SyntaxError) and error.filename:
        place, text = f"{error.filename}:{error.lineno}", error.msg
    else:
        ours = str(Path(__file__).parent) + os.sep if isinstance(error, AgentflyError) else __file__
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if not f.filename.startswith(ours) and "importlib" not in f.filename]
        place = f"{own[-1].filename}:{own[-1].lineno}" if own else "its import"
        text = "".join(str(error).splitlines()[:1])
    if isinstance(error, AgentflyError):
        return ReferenceFailed(f"{reference}: {place}: {error.message}", hints=error.hints)
    return ReferenceFailed(f"{reference}: {place} raised {type(error).__name__}: {text}")
