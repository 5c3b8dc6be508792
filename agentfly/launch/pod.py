"""What every main process of a pod does: it reads its launch, hears that it has to stop, leaves a last word.

Guarantees:
1. A launch that cannot be read is an error that names the file and the field; one that this image does not
   understand is ``EXIT_INVALID``, because it will not understand it the next time.
2. The last word is in the termination message before the process ends, and no failure to write it changes how
   the process ends.
3. However the work of `main_process` ends, it ends with a report, whose exit code is that of the process.
4. SIGTERM and SIGINT set an event and do nothing else, however often they come.
"""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from agentfly.api.reasons import Reason
from agentfly.errors import AgentflyError
from agentfly.launch import early
from agentfly.roles.launch import LAUNCH_FILE, TERMINATION_FILE, Report
from agentfly.roles.trainer import EXIT_INVALID

logger = logging.getLogger(__name__)

Launch = TypeVar("Launch", bound=BaseModel)


def launch_argument(program: str, arguments: Sequence[str] | None) -> Path:
    """The file that the command line names, or the one that is mounted; logging is set up on the way."""
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--launch", type=Path, default=LAUNCH_FILE, help="what to do, as JSON")
    logging.basicConfig(
        level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    path: Path = parser.parse_args(arguments).launch
    return path


class UnknownLaunch(AgentflyError):
    """A launch of another version, or for another process."""


def read(path: Path, kind: type[Launch]) -> Launch:
    """The launch in a file.

    Raises:
        AgentflyError: there is none.
        UnknownLaunch: it is another one than this process is for.
    """
    try:
        return kind.model_validate_json(path.read_text())
    except OSError as error:
        raise AgentflyError(f"launch {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise UnknownLaunch(
            f"launch {path}: {field}: {first['msg']}",
            hints=[f"use an image of the operator's version; this one has agentfly {version('agentfly')}"],
        ) from error


def tell(report: Report, file: Path = TERMINATION_FILE) -> None:
    """Leave the last word of this pod."""
    try:
        file.write_text(report.termination_message())
    except OSError as error:
        logger.warning("the termination message was not written: %s; it was: %s", error, report)


@contextmanager
def stop_asked() -> Iterator[asyncio.Event]:
    """An event of the running loop, set by SIGTERM and SIGINT as long as the block lasts."""
    asked, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    if early:
        asked.set()
    try:
        yield asked
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def main_process(
    program: str,
    kind: type[Launch],
    work: Callable[[Launch], Coroutine[Any, Any, Report]],
    arguments: Sequence[str] | None = None,
    last_word: Path = TERMINATION_FILE,
) -> int:
    """Read a launch, do its work, leave its report; returns the exit code."""
    path = launch_argument(program, arguments)
    try:
        report = asyncio.run(work(read(path, kind)))
    except AgentflyError as error:
        logger.error("%s", error.render())
        unknown = isinstance(error, UnknownLaunch)
        report = Report(
            phase="Ended",
            reason=Reason.InvalidSpec if unknown else Reason.StartFailed,
            message=error.render(),
            exit_code=EXIT_INVALID if unknown else 1,
        )
    except Exception as error:
        logger.exception("%s failed", program)
        message = f"{type(error).__name__}: {error}"
        report = Report(phase="Ended", reason=Reason.StartFailed, message=message, exit_code=1)
    tell(report, last_word)
    return 1 if report.exit_code is None else report.exit_code
