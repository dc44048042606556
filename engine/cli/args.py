# SPDX-License-Identifier: Apache-2.0
"""`Parser`, an argparse parser that reports an error in one sentence, and flags of many commands.

A parser with the engine's flags also reads environment variables and a config file (`config/`), so
that its result has the effective values."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from ...tiers.settings.format import format_name
from ...tiers.settings.option import Option, flag_of
from ...tiers.settings.suggestions import did_you_mean
from ...tiers.settings.values import ConfigError
from ..config.engine_config import EngineConfig
from ..config.engine_options import OPTIONS, engine_config
from ..config.resolve import Settings, resolve
from ..config.schema import MODEL, SCHEMA
from ..config.server_options import SERVER_OPTIONS
from ..config.unsupported_options import explain_not_built
from ..config.vllm_aliases import ALIASES
from ..logs import LOG_LEVELS

# The prefix of vLLM's names of options in an argparse namespace; a command's own flags lack it.
_ALIAS = "alias:"
_SETTINGS = "settings"


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError instead of printing the usage and exiting."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with argparse's message and a remedy."""
        text = message.removeprefix("argument ")
        flag = text.partition(":")[0]
        if text.endswith(": expected one argument"):
            text = f"{flag} takes a value; write one that begins with - as {flag}=VALUE"
        elif ": ignored explicit argument " in text:
            text = f"{flag} is a switch and takes no value; give it alone or leave it out"
        raise ConfigError(f"{text}; see {self.prog} --help")

    def parse_all(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments. For an unknown flag, raise ConfigError with the most similar flag.

        If the parser has the engine's flags, the namespace's `settings` and options have the values
        from all layers (flags, environment, file)."""
        namespace, unknown = self.parse_known_args(list(argv))
        if unknown:
            word = unknown[0].partition("=")[0]
            if not word.startswith("-"):
                raise ConfigError(f"{word!r} is one argument too many; see {self.prog} --help")
            if hasattr(namespace, MODEL):
                _explain_unknown(self.prog, unknown[0], namespace)
            near = did_you_mean(word, self._shown_flags())
            raise ConfigError(f"there is no option {word}{near or f'; see {self.prog} --help'}")
        if hasattr(namespace, _SETTINGS):
            _add_layers(namespace)
        return namespace

    def _shown_flags(self) -> list[str]:
        return [
            flag
            for flag, action in self._option_string_actions.items()
            if action.help != argparse.SUPPRESS
        ]


def _explain_unknown(prog: str, unknown: str, namespace: argparse.Namespace) -> None:
    """Raise ConfigError, with a reason, for --model and for a flag that only vLLM has."""
    flag, _, value = unknown.partition("=")
    if flag == flag_of(MODEL):
        given = value or getattr(namespace, MODEL) or "MODEL"
        raise ConfigError(f"the model is an argument and no option: {prog} {format_name(given)}")
    explained = explain_not_built(flag, flag.lstrip("-").replace("-", "_"))
    if explained:
        raise ConfigError(f"{explained}; leave it out")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --config and all engine options; the parser then reads environment and file."""
    parser.set_defaults(**{_SETTINGS: None})
    parser.add_argument(
        MODEL,
        metavar="MODEL",
        nargs="?",
        help="a model directory, or org/model on the Hub (default: the embedded model)",
    )
    parser.add_argument(
        "--config", metavar="FILE", default=argparse.SUPPRESS,
        help="YAML or TOML file of options; flags and STRATAKV_* variables come before it",
    )  # fmt: skip
    parser.epilog = "vLLM's spellings are taken too; docs/commands.md lists them."
    add_options(parser.add_argument_group("engine"), OPTIONS)
    _add_aliases(parser, is_server=False)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser.add_argument_group("server"), SERVER_OPTIONS)
    _add_aliases(parser, is_server=True)


def add_options(group: argparse._ActionsContainer, options: Mapping[str, Option]) -> None:
    """Add options as flags whose help has the default. The namespace has only given options."""
    for name, option in options.items():
        text = f"{option.help} (default: {option.default_text})"
        settings: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
        group.add_argument(flag_of(name), **settings, **_form(option.metavar))


def _add_aliases(parser: argparse.ArgumentParser, *, is_server: bool) -> None:
    for name, alias in ALIASES.items():
        if alias.is_server == is_server:
            parser.add_argument(
                flag_of(name), dest=_ALIAS + name, default=argparse.SUPPRESS,
                help=argparse.SUPPRESS, **_form(alias.metavar),
            )  # fmt: skip


def _form(metavar: str) -> dict[str, Any]:
    return {"metavar": metavar} if metavar else {"action": argparse.BooleanOptionalAction}


def _add_layers(namespace: argparse.Namespace) -> None:
    """Add `settings` and the option values of all layers to the namespace."""
    given = vars(namespace)
    flags = {name: given[name] for name in SCHEMA if given.get(name) is not None}
    flags |= {
        name.removeprefix(_ALIAS): value for name, value in given.items() if name.startswith(_ALIAS)
    }
    settings = resolve(flags, os.environ, given.get("config"))
    given[_SETTINGS] = settings
    given.update({name: each.value for name, each in settings.given.items()})


def add_log_level(parser: argparse.ArgumentParser, default: str) -> None:
    """Add `--log-level` to a command that is not a server."""
    parser.set_defaults(default_log_level=default)
    parser.add_argument(
        "--log-level",
        metavar="LEVEL",
        default=argparse.SUPPRESS,
        help=f"{', '.join(LOG_LEVELS)} (default: {default})",
    )


def log_level(args: argparse.Namespace) -> str:
    return str(getattr(args, "log_level", args.default_log_level))


def settings_of(args: argparse.Namespace) -> Settings:
    settings: Settings = getattr(args, _SETTINGS)
    return settings


@contextmanager
def naming_origins(args: argparse.Namespace) -> Iterator[None]:
    """Add, to a ConfigError that the block raises, the origins of the options in its text."""
    try:
        yield
    except ConfigError as error:
        settings = getattr(args, _SETTINGS, None)
        if settings is None:
            raise
        raise settings.explain(error) from error


def engine_config_of(args: argparse.Namespace) -> EngineConfig:
    """Return the engine's settings from parsed arguments. Raises ConfigError."""
    settings = settings_of(args)
    return engine_config(settings.model, settings.engine_options)


def engine_options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given options of the engine by name, as keyword arguments of `LLM`."""
    return settings_of(args).engine_options
