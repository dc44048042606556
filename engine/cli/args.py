# SPDX-License-Identifier: Apache-2.0
"""The flags that commands share, and a parser that says in one sentence what is wrong.

Values stay text here; `engine/options.py` reads them, for the Python API as well. Knows nothing of
what a command does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from ..config import ConfigError, EngineConfig
from ..nearest import did_you_mean
from ..options import LOG_LEVELS, OPTIONS, engine_config, flag_of, one_of


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing the usage and leaving."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """What argparse found wrong."""
        raise ConfigError(f"{message.removeprefix('argument ')}; see {self.prog} --help")

    def parse_all(self, argv: Sequence[str]) -> argparse.Namespace:
        """The arguments; a flag nobody knows is refused with the nearest one."""
        namespace, unknown = self.parse_known_args(list(argv))
        if unknown:
            word = unknown[0].partition("=")[0]
            if not word.startswith("-"):
                raise ConfigError(f"{word!r} is one argument too many; see {self.prog} --help")
            near = did_you_mean(word, self._option_string_actions)
            raise ConfigError(f"there is no option {word}{near or f'; see {self.prog} --help'}")
        return namespace


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL and every option of the engine. Options not given are absent from the namespace."""
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a model directory (default: the embedded model)"
    )
    group = parser.add_argument_group("engine")
    for name, option in OPTIONS.items():
        settings: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": option.help}
        if option.metavar:
            settings["metavar"] = option.metavar
        else:
            settings["action"] = argparse.BooleanOptionalAction
        group.add_argument(flag_of(name), **settings)


def add_log_level(parser: argparse.ArgumentParser, default: str) -> None:
    """`--log-level`."""
    parser.add_argument(
        "--log-level",
        metavar="LEVEL",
        default=default,
        help=f"{', '.join(LOG_LEVELS)} (default: {default})",
    )


def log_level(args: argparse.Namespace) -> str:
    """The log level, checked."""
    return one_of(*LOG_LEVELS)("--log-level", args.log_level)


def engine_config_of(args: argparse.Namespace) -> EngineConfig:
    """The engine's settings that these arguments describe; raises ConfigError."""
    return engine_config(args.model, engine_options_of(args))


def engine_options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's options that were given, by name, as `LLM` takes them."""
    return {name: value for name, value in vars(args).items() if name in OPTIONS}


def whole_number(flag: str, text: str, low: int, high: int) -> int:
    """A number in [low, high]; raises ConfigError."""
    try:
        number = int(text)
    except ValueError:
        number = low - 1
    if not low <= number <= high:
        raise ConfigError(f"{flag} takes a whole number from {low} to {high}, not {text!r}")
    return number
