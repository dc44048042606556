# SPDX-License-Identifier: Apache-2.0
"""Log lines on standard error, as text or as one JSON object each.

    2026-11-21 13:15:02.123 INFO cli.serve: model tiny, context 256 tokens
    {"time":"2026-11-21T12:15:02.123456Z","level":"info","logger":"cli.serve","message":"..."}

One record cannot look like two records in either form, because text after a line break is indented
or escaped. Every process of the program calls `set_up` once."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import msgspec

_PACKAGE_PREFIXES = ("stratakv.engine.", "stratakv.")
_INDENT = "\n    "

LOG_LEVELS = ("debug", "info", "warning", "error")


class LogLine(msgspec.Struct, omit_defaults=True):
    """A log record as JSON. `exception` is a traceback."""

    time: datetime
    level: str
    logger: str
    message: str
    exception: str | None = None


class TextFormatter(logging.Formatter):
    """The text form: local time, level, logger and message."""

    def format(self, record: logging.LogRecord) -> str:
        when = _time_of(record).astimezone().isoformat(" ", "milliseconds")[:23]
        parts = [record.getMessage(), _exception_of(self, record)]
        text = "\n".join(part for part in parts if part).replace("\n", _INDENT)
        return f"{when} {record.levelname} {short_name(record.name)}: {text}"


class JsonFormatter(logging.Formatter):
    """The JSON form: one object per line, with times in UTC."""

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
    """Log records of `level` and above, and Python's warnings, to standard error. Existing handlers
    of the root logger, and its level, are not changed."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if json else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)


def announce(text: str) -> None:
    """Print `text` on standard output at every log level. If log lines are JSON, print it as the
    message of a JSON object."""
    if is_json():
        line = LogLine(datetime.now(UTC), "info", "stratakv", _encodable(text))
        text = msgspec.json.encode(line).decode()
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def is_json() -> bool:
    """Whether log lines are JSON objects; the handlers that `set_up` installed decide."""
    return any(isinstance(each.formatter, JsonFormatter) for each in logging.getLogger().handlers)


def adopt(name: str) -> None:
    """Remove the handlers of a library's logger, so that its records use this module's format."""
    logger = logging.getLogger(name)
    logger.handlers.clear()
    logger.propagate = True


def short_name(name: str) -> str:
    """Return a logger's name without the package prefix `stratakv.engine.` or `stratakv.`; all
    loggers of uvicorn become `uvicorn`."""
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
    """Replace characters that UTF-8 and JSON cannot encode; file names may contain them."""
    return text.encode("utf-8", "backslashreplace").decode()
