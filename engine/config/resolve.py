# SPDX-License-Identifier: Apache-2.0
"""Flags, environment and file put together: what was given, by option, with its origin.

The same for every command, so that one file serves them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...tiers.settings import readers
from ...tiers.settings.file import called, read_file
from ...tiers.settings.option import flag_of
from ...tiers.settings.setting_layers import (
    FILE,
    FLAG,
    MODEL,
    VARIABLE,
    Given,
    Layer,
    merge,
    with_origins,
)
from ...tiers.settings.suggestions import did_you_mean
from ...tiers.settings.values import ConfigError
from .engine_options import OPTIONS
from .environment import CONFIG_VARIABLE, read_environment
from .schema import SCHEMA, hides
from .server_options import SERVER_OPTIONS
from .unsupported_options import explain_not_built
from .vllm_aliases import ALIASES


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings after all layers. `notes` name those that were accepted and have no effect."""

    given: Layer
    notes: tuple[str, ...] = ()
    file: Path | None = None

    @property
    def engine_options(self) -> dict[str, Any]:
        """The engine's options, in the form that `LLM` takes."""
        return {name: each.value for name, each in self.given.items() if name in OPTIONS}

    @property
    def server_options(self) -> dict[str, Any]:
        """The server's options, in the form that `server_config` takes."""
        return {name: each.value for name, each in self.given.items() if name in SERVER_OPTIONS}

    def explain(self, error: ConfigError) -> ConfigError:
        """A refusal with the origins of the options it names."""
        return ConfigError(with_origins(str(error), self.given, SCHEMA))

    @property
    def summary(self) -> str:
        """How many options each place gave, in words; empty where none was given."""
        counts = Counter(each.kind for each in self.given.values())
        places = {FLAG: "the command line", VARIABLE: "the environment", FILE: str(self.file)}
        return ", ".join(f"{counts[kind]} by {places[kind]}" for kind in places if counts[kind])

    @property
    def model(self) -> str | None:
        """None: the embedded model."""
        return self.given[MODEL].value if MODEL in self.given else None


def resolve(
    flags: Mapping[str, Any], environ: Mapping[str, str], config: str | None = None
) -> Settings:
    """Read all layers. `flags` are by name, aliases too; `config` is the file that a flag names.

    Raises ConfigError for a name nobody knows, a value of the wrong kind, and two spellings of one
    option in one layer. Whether the options fit each other is seen when they are used.
    """
    place = config if config is not None else environ.get(CONFIG_VARIABLE)
    path, from_file = None, _Read({}, {}, [])
    if place is not None:
        path = readers.path(CONFIG_VARIABLE if config is None else "--config", place)
        from_file = _read_file(path)
    from_flags = _read(flags, FLAG, lambda name: "MODEL" if name == MODEL else flag_of(name))
    layers = (from_flags.values, read_environment(environ), from_file.values)
    implied = (from_flags.implied, from_file.implied)
    notes = (*from_flags.notes, *from_file.notes)
    return Settings(merge([*layers, *implied], hides), notes, path)


def read_config_settings(path: Path) -> Settings:
    """The settings of one file alone. Raises ConfigError as `resolve` does."""
    read = _read_file(path)
    return Settings(merge([read.values, read.implied], hides), tuple(read.notes), path)


@dataclass(frozen=True, slots=True)
class _Read:
    """One layer, read."""

    values: dict[str, Given]
    implied: dict[str, Given]
    notes: list[str]


def _read_file(path: Path) -> _Read:
    return _read(read_file(path), FILE, lambda name: called(path, name))


def _read(raw: Mapping[str, Any], kind: str, call: Callable[[str], str]) -> _Read:
    """Read the values of a layer and replace aliases by what they mean."""
    layer = _Read({}, {}, [])
    for name, value in raw.items():
        if name in SCHEMA:
            _put(layer.values, name, Given(SCHEMA[name].read(call(name), value), kind, call(name)))
        elif name in ALIASES:
            meaning = ALIASES[name].translate(call(name), value)
            for option, each in meaning.values.items():
                _put(layer.values, option, Given(each, kind, call(name)))
            for option, each in meaning.implied.items():
                layer.implied[option] = Given(each, kind, call(name))
            layer.notes.extend([meaning.note] if meaning.note else ())
        elif explained := explain_not_built(call(name), name):
            raise ConfigError(f"{explained}; leave it out")
        else:
            near = did_you_mean(name, [*SCHEMA, *ALIASES]) or "; `stratakv config show` lists them"
            raise ConfigError(f"{call(name)} is no option{near}")
    return layer


def _put(values: dict[str, Given], name: str, given: Given) -> None:
    if name in values:
        raise ConfigError(
            f"{values[name].origin} and {given.origin} are two spellings of one option; give one"
        )
    values[name] = given
