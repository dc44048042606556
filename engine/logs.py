# SPDX-License-Identifier: Apache-2.0
"""Log lines on standard error: for people, or one JSON object each.

    2026-11-21 13:15:02.123 INFO cli.serve: model tiny, context 256 tokens
    {"time":"2026-11-21T12:15:02.123456Z","level":"info","logger":"cli.serve","message":"..."}

Either way one record cannot pass for two: what follows a line break is indented, or escaped. Every
process of the program calls `set_up` once.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import msgspec

_PACKAGE_PREFIXES = ("stratakv.engine.", "stratakv.")
_INDENT = "\n    "

LOG_LEVELS = ("debug", "info", "warning", "error")


class LogLine(msgspec.Struct, omit_defaults=True):
    """One record as JSON. `exception` is a traceback."""

    time: datetime
    level: str
    logger: str
    message: str
    exception: str | None = None


class TextFormatter(logging.Formatter):
    """For people: local time, level, logger, message."""

    def format(self, record: logging.LogRecord) -> str:
        when = _time_of(record).astimezone().isoformat(" ", "milliseconds")[:23]
        parts = [record.getMessage(), _exception_of(self, record)]
        text = "\n".join(part for part in parts if part).replace("\n", _INDENT)
        return f"{when} {record.levelname} {short_name(record.name)}: {text}"


class JsonFormatter(logging.Formatter):
    """For programs: one object a line, times in UTC."""

    def format(self, record: logging.LogRecord) -> str:
        line = LogLine(
            _time_of(record),
            record.levelname.lower(),
            short_name(record.name),
            _encodable(record.getMessage()),
            _encodable(_exception_of(self, record)) or None,
        )
        return msgspec.json.encode(line).decode()


def set_up(level: str, *, json: bool = False) -> None:
    """Log from `level` up, Python's warnings too; not where somebody has set logging up already."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if json else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)


def announce(text: str) -> None:
    """A line on standard output, whatever the level: the text, or one object that holds it."""
    if is_json():
        line = LogLine(datetime.now(UTC), "info", "stratakv", _encodable(text))
        text = msgspec.json.encode(line).decode()
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def is_json() -> bool:
    """Whether `set_up` chose JSON."""
    return any(isinstance(each.formatter, JsonFormatter) for each in logging.getLogger().handlers)


def adopt(name: str) -> None:
    """Take a library's logger over, whose own handlers would write lines of another form."""
    logger = logging.getLogger(name)
    logger.handlers.clear()
    logger.propagate = True


def short_name(name: str) -> str:
    """A logger's name without what all of them share."""
    for prefix in _PACKAGE_PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return "uvicorn" if name.startswith("uvicorn.") else name


def _time_of(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _exception_of(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = []
    if record.exc_info and record.exc_info[0] is not None:
        parts.append(formatter.formatException(record.exc_info))
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return "\n".join(parts)


def _encodable(text: str) -> str:
    """JSON is UTF-8, and a file name of other bytes is not."""
    return text.encode("utf-8", "backslashreplace").decode()
