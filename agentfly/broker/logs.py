"""Logs for machines: one JSON object a line.

Guarantees:
1. A line is one record, whatever its text holds; its exception is in it.
2. ``time`` is UTC, RFC 3339, with milliseconds.
"""

import json
import logging
from datetime import UTC, datetime


class JSONLines(logging.Formatter):
    """Formats a record as ``{"time", "level", "logger", "message"}``, with ``error`` for an exception."""

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_json() -> None:
    """Write what is logged to standard error as JSON lines from now on."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSONLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
