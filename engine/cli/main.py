# SPDX-License-Identifier: Apache-2.0
"""The command line `stratakv`: runs a command, and reports a failure in one sentence.

Exit codes: 0 done, 1 the engine failed, 2 wrong usage or environment, 130 interrupted. This module
needs only the base installation; a command's modules are imported when the command runs."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Any, TextIO, cast

from ... import __version__
from ...tiers.settings.format import format_value, one_line
from ...tiers.settings.suggestions import did_you_mean
from ...tiers.settings.values import ConfigError
from ..client.base import EngineDead
from ..config.optional_packages import explain_missing_module
from ..logs import is_json
from .args import Parser, naming_origins

# The logger's name is a constant, because __name__ is __main__ when this file runs as a module.
logger = logging.getLogger("stratakv.engine.cli.main")

# The module of each command has DESCRIPTION, add_arguments(parser) and run(args) -> exit code.
COMMANDS = {
    "serve": "serve a model over HTTP",
    "cache-server": "keep blocks for many engines",
    "route": "send requests to prefill and decode nodes",
    "ping": "ask whether a cache server answers, and how fast",
    "describe": "say what a cache server is, allows and holds",
    "generate": "continue one prompt",
    "bench": "run a benchmark",
    "check": "check an SSD tier, and mend it",
    "cache": "list SSD tiers, and remove them",
    "config": "show the settings that hold, or check a file",
    "doctor": "say what will not work below another engine",
    "trace": "explain what a step trace recorded",
    "plan": "say what a model takes and what fits",
}
_OF_TIERS = ("ping", "describe", "check", "cache")  # commands whose modules are in cli/tiers/
_RELOADED = ("cache-server",)  # commands that reload settings on SIGHUP, and do not end
_USAGE = "usage: stratakv [--version] [--help] COMMAND ..."

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    _write_any_text()
    _lose_what_standard_error_cannot_take()
    _silence_grpc()
    try:
        code = _run(words)
        _flush()
        return code
    except ConfigError as error:
        return _complain(str(error), EXIT_REFUSED)
    except ModuleNotFoundError as error:
        return _complain(explain_missing_module(error), EXIT_REFUSED)
    except (EngineDead, TimeoutError) as error:
        return _complain(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the process that reads standard output has ended
        _drop_output()
        return EXIT_FAILED
    except OSError as error:
        logger.debug("the system refused something", exc_info=error)
        code = _complain(f"the system refused something ({error}); mend that", EXIT_REFUSED)
        _drop_output()
        return code


def _silence_grpc() -> None:
    """Turn off grpc's log lines on standard error. StrataKV's code reports the errors of each call.
    The environment variable GRPC_VERBOSITY turns grpc's log lines on."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _write_any_text() -> None:
    """Make standard output escape characters that its encoding lacks, as standard error does."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


class _Lossy:
    """A standard error that ignores write errors: on a full disk, only log lines are lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text. After a write error, this text and all later texts are dropped."""
        try:
            return self._stream.write(text)
        except OSError:
            self._redirect_to_devnull()
            return len(text)

    def flush(self) -> None:
        """Flush the stream. Drop text that cannot be written, or Python would write it at exit."""
        try:
            self._stream.flush()
        except OSError:
            self._redirect_to_devnull()

    def _redirect_to_devnull(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _lose_what_standard_error_cannot_take() -> None:
    if type(sys.stderr) is TextIOWrapper and sys.stderr is sys.__stderr__:
        sys.stderr = cast(TextIO, _Lossy(sys.stderr))


def _check_working_directory() -> None:
    """Raise ConfigError if the working directory was removed. Without a working directory, relative
    paths would be invalid, and libraries would end the process with their own messages."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"the working directory is gone ({error.strerror}); change to one that is there"
        ) from error


def _flush() -> None:
    """Flush standard output before Python's exit, so that a full disk causes an error."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _drop_output() -> None:
    """Drop output that cannot be written, so that Python's flush at exit does not fail."""
    try:
        _flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0 if words else EXIT_REFUSED
    if words[0] == "--version":
        print(f"stratakv {__version__}")
        return 0
    name = words[0]
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        known = ("--version", "--help") if kind == "option" else COMMANDS
        near = did_you_mean(name, known) or f"; the commands are {', '.join(COMMANDS)}"
        raise ConfigError(f"there is no {kind} {format_value(name)}{near}")
    if name in _RELOADED:  # until settings are read, SIGHUP is ignored: nothing can be reloaded
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _check_working_directory()
    command = import_command(name)
    parser = Parser(prog=f"stratakv {name}", description=command.DESCRIPTION)
    command.add_arguments(parser)
    args = parser.parse_all(words[1:])
    with naming_origins(args):
        code: int = command.run(args)
    return code


def import_command(name: str) -> Any:
    folder = ".tiers." if name in _OF_TIERS else "."
    return importlib.import_module(folder + name.replace("-", "_"), __package__)


def _help() -> str:
    lines = [_USAGE, "", "Tiered KV cache for LLM serving.", ""]
    lines += [f"  {name:<12} {text}" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "", "stratakv COMMAND --help lists a command's options."])


def _complain(text: str, code: int) -> int:
    line = one_line(text)
    if is_json():
        logger.error("%s", line)
    else:
        print(f"stratakv: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
