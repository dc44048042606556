# SPDX-License-Identifier: Apache-2.0
"""Reads option values, each with its origin, from five layers:

    flags  >  environment  >  file  >  values that aliases imply  >  defaults

An option gets its value from the first layer that sets the option. If two options exclude each
other, the option of an earlier layer also hides the option of a later layer. Two such options in
one layer are an error, which is raised when the values are used. All commands have the same rules,
so one file works for all commands. `STRATAKV_BLOCK_SIZE=32` means `--block-size 32`; an unknown
variable with the prefix `STRATAKV_` is refused, because the name may be mistyped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...tiers.settings import readers
from ...tiers.settings.file import called, read_file
from ...tiers.settings.option import flag_of
from ...tiers.settings.suggestions import did_you_mean
from ...tiers.settings.values import ConfigError
from .engine_options import OPTIONS, hides
from .schema import MODEL, SCHEMA, VARIABLE_PREFIX, variable_of
from .server_options import SERVER_OPTIONS
from .unsupported_options import explain_not_built
from .vllm_aliases import ALIASES

FLAG = "flag"
VARIABLE = "variable"
FILE = "file"
_NAMES_IN_TEXT = re.compile(r"--(?:no-)?([a-z][a-z0-9-]*)|\b(MODEL)\b")

CONFIG_VARIABLE = "STRATAKV_CONFIG"
# The prefix of variables that only `stratakv cache-server` reads.
CACHE_SERVER_PREFIX = "STRATAKV_CACHE_SERVER_"
# Environment variables that set no option, each with its purpose.
OTHER_VARIABLES: Mapping[str, str] = {
    CONFIG_VARIABLE: "the file of options",
    "STRATAKV_ARGS": "arguments that the systemd unit adds",
    "STRATAKV_COMMIT": "the commit in reports of benchmarks, for benchmarks/harness/report.py",
    "STRATAKV_BYTES": "none leaves the compiled library of tiers/native/native_library.py alone",
    "STRATAKV_CPU_KERNELS": "which compiled kernels of the CPU run, for kernels/cpu/library.py",
}
MAX_NAME_CHARACTERS = 80
# Variables that Kubernetes sets in a container for a service whose name begins with `stratakv`.
_SERVICE_LINK = re.compile(r".*_SERVICE_(HOST|PORT|PORT_.+)|.*_PORT_\d+_(TCP|UDP|SCTP)(_.+)?")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://.+")


@dataclass(frozen=True, slots=True)
class Given:
    value: Any
    kind: str  # the layer of the value: FLAG, VARIABLE or FILE
    origin: str  # the name that the user wrote: `--port`, `STRATAKV_PORT`, `port of x.yaml`


Layer = Mapping[str, Given]


@dataclass(frozen=True, slots=True)
class Settings:
    """The option values of all layers, and `notes` about accepted options without effect."""

    given: Layer
    notes: tuple[str, ...] = ()
    file: Path | None = None

    @property
    def engine_options(self) -> dict[str, Any]:
        """The given options of the engine, as keyword arguments of `LLM`."""
        return {name: each.value for name, each in self.given.items() if name in OPTIONS}

    @property
    def server_options(self) -> dict[str, Any]:
        """The given options of the server, as the argument of `server_config`."""
        return {name: each.value for name, each in self.given.items() if name in SERVER_OPTIONS}

    def explain(self, error: ConfigError) -> ConfigError:
        """Return the error with the origins of the options that the error's text names."""
        return ConfigError(_with_origins(str(error), self.given))

    @property
    def summary(self) -> str:
        """A text with the number of options from each layer; empty if no option was given."""
        counts = Counter(each.kind for each in self.given.values())
        places = {FLAG: "the command line", VARIABLE: "the environment", FILE: str(self.file)}
        return ", ".join(f"{counts[kind]} by {places[kind]}" for kind in places if counts[kind])

    @property
    def model(self) -> str | None:
        """The name or path of the model; None for the embedded model."""
        return self.given[MODEL].value if MODEL in self.given else None


def resolve(
    flags: Mapping[str, Any], environ: Mapping[str, str], config: str | None = None
) -> Settings:
    """Read the options of all layers. `flags` maps names or aliases to values; `config` is the path
    of the file that the flag --config names.

    Raises ConfigError for an unknown name, a value of the wrong kind, and two spellings of one
    option in one layer. Contradictions between options are detected when the options are used."""
    place = config if config is not None else environ.get(CONFIG_VARIABLE)
    path, from_file = None, _Read({}, {}, [])
    if place is not None:
        path = readers.path(CONFIG_VARIABLE if config is None else "--config", place)
        from_file = _read_file(path)
    from_flags = _read(flags, FLAG, lambda name: "MODEL" if name == MODEL else flag_of(name))
    layers = (from_flags.values, read_environment(environ), from_file.values)
    implied = (from_flags.implied, from_file.implied)
    notes = (*from_flags.notes, *from_file.notes)
    return Settings(_merge([*layers, *implied]), notes, path)


def read_config_settings(path: Path) -> Settings:
    """Read the settings of one file, without other layers. Raises ConfigError, like `resolve`."""
    read = _read_file(path)
    return Settings(_merge([read.values, read.implied]), tuple(read.notes), path)


@dataclass(frozen=True, slots=True)
class _Read:
    """The options of one layer: given values, values that aliases imply, and notes for the log."""

    values: dict[str, Given]
    implied: dict[str, Given]
    notes: list[str]


def _read_file(path: Path) -> _Read:
    return _read(read_file(path), FILE, lambda name: called(path, name))


def _read(raw: Mapping[str, Any], kind: str, call: Callable[[str], str]) -> _Read:
    """Read the values of one layer, and replace aliases (vLLM's names) with StrataKV's options."""
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


def read_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """Return the options that environment variables set. Raises ConfigError for a bad variable."""
    known = {variable_of(name): name for name in SCHEMA}
    layer = {}
    for variable, value in environ.items():
        if not variable.startswith(VARIABLE_PREFIX) or variable in OTHER_VARIABLES:
            continue
        if variable.startswith(CACHE_SERVER_PREFIX) or is_service_link(variable, value):
            continue
        name = known.get(variable)
        if name is None:
            raise ConfigError(_explain_unknown(variable, known))
        layer[name] = Given(SCHEMA[name].read(variable, value), VARIABLE, variable)
    return layer


def is_service_link(variable: str, value: str) -> bool:
    """Return whether Kubernetes has set a variable, for a service with a name like `stratakv…`."""
    if _SERVICE_LINK.fullmatch(variable):
        return True
    return variable.endswith("_PORT") and _SERVICE_URL.fullmatch(value) is not None


def _explain_unknown(variable: str, known: Mapping[str, str]) -> str:
    shown = variable[:MAX_NAME_CHARACTERS]
    if variable.removeprefix(VARIABLE_PREFIX).lower() in ALIASES:
        return (
            f"{shown} is set, and names of vLLM's options are taken as flags and in files only; "
            "use StrataKV's own name"
        )
    explained = explain_not_built(shown, variable.removeprefix(VARIABLE_PREFIX).lower())
    if explained:
        return f"{explained}; unset it"
    # Names are compared without the prefix, which would make any two variables similar.
    ends = [name.removeprefix(VARIABLE_PREFIX) for name in (*known, *OTHER_VARIABLES)]
    near = did_you_mean(variable.removeprefix(VARIABLE_PREFIX), ends)
    near = re.sub(r"\b([A-Z][A-Z_]*)", rf"{VARIABLE_PREFIX}\1", near)
    return f"{shown} is set and names no option{near or '; `stratakv config show` lists them'}"


def _merge(layers: Sequence[Layer]) -> dict[str, Given]:
    """Return each option's value from the first of the `layers` that has the option."""
    merged: dict[str, Given] = {}
    for layer in layers:
        hidden = {other for name, given in merged.items() for other in hides(name, given.value)}
        for name, given in layer.items():
            if name not in hidden:
                merged.setdefault(name, given)
    return merged


def _with_origins(message: str, given: Layer) -> str:
    """Return the message with the origins of the options in it, unless all came from flags."""
    named = {
        name: given[name]
        for flag, model in _NAMES_IN_TEXT.findall(message)
        if (name := MODEL if model else flag.replace("-", "_")) in given
    }
    origins = {
        MODEL.upper() if name == MODEL else flag_of(name): each.origin
        for name, each in named.items()
    }
    if all(flag == origin for flag, origin in origins.items()):
        return message
    words = [
        f"{flag} comes from {'the command line' if flag == origin else origin}"
        for flag, origin in origins.items()
    ]
    return f"{message} ({', '.join(words)})"
