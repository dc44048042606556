# SPDX-License-Identifier: Apache-2.0
"""`stratakv config show` prints the values and origins of all options; `config check FILE` checks a
config file. `config vllm|lmcache|sglang` prints the configuration for another engine.

`show` accepts and refuses the same arguments as `serve`; its output is a file for `--config`.
`vllm` prints the value of vLLM's `--kv-transfer-config`. `stratakv config` starts no engine."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from ...connector.chunks.chunk_settings import (
    MAX_CHUNK_BYTES,
    MAX_LAYOUTS,
    chunk_host,
    lmcache_config,
    sglang_config,
)
from ...connector.vllm.settings import OPTIONS as VLLM_OPTIONS
from ...connector.vllm.settings import connector_config, transfer_config
from ...tiers.settings import readers
from ...tiers.settings.option import MASK, Option, flag_of
from ...tiers.settings.suggestions import did_you_mean
from ...tiers.settings.values import GIB, ConfigError, size_within
from ..config.engine_options import engine_config, without_effect
from ..config.resolve import Settings, read_config_settings
from ..config.schema import MODEL, SCHEMA, value_in
from ..config.server_options import server_config
from . import serve
from .args import Parser, naming_origins, settings_of

DESCRIPTION = "Show the settings that hold and where they come from, or check a file of them."

DEFAULT = "default"
# Texts that YAML reads unchanged without quotes.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./,-]*|\d+[MGT]iB")
_WORDS_OF_YAML = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's name to the parser. Each subcommand parses the remaining arguments."""
    words = "|".join(_WORDS)
    parser.add_argument("word", metavar=words, nargs="?", help="see the documentation")
    parser.add_argument(
        "rest", metavar="...", nargs=argparse.REMAINDER,
        help="show: the arguments of serve, --origin, --json; check: a file; vllm: see its --help",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if args.word not in _WORDS:
        near = did_you_mean(args.word or "", _WORDS)
        given = "" if args.word is None else f", not {args.word!r}{near}"
        *words, last = _WORDS
        raise ConfigError(f"stratakv config takes {', '.join(words)} or {last}{given}")
    return _WORDS[args.word](args.rest)


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--origin", action="store_true", help="say where each comes from")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    serve.add_arguments(parser)


def _show(words: list[str]) -> int:
    parser = Parser(prog="stratakv config show", description=DESCRIPTION)
    add_show_arguments(parser)
    args = parser.parse_all(words)
    settings = settings_of(args)
    with naming_origins(args):
        values = effective(settings)
    if args.json:
        print(json.dumps(_as_json(values, settings, with_origin=args.origin), indent=2))
    else:
        _print_lines(values, settings, with_origin=args.origin)
    return 0


def _check(words: list[str]) -> int:
    parser = Parser(prog="stratakv config check", description=DESCRIPTION)
    parser.add_argument("file", metavar="FILE", help="YAML or TOML")
    path = readers.path("FILE", parser.parse_all(words).file)
    settings = read_config_settings(path)
    try:
        effective(settings)
    except ConfigError as error:
        raise settings.explain(error) from error
    print(f"{path} is fine: {len(settings.given)} options")
    for note in settings.notes:
        print(note)
    return 0


REGION_BYTES, LEAST_REGION_BYTES = GIB, 1024**2


def add_vllm_arguments(parser: argparse._ActionsContainer) -> None:
    """Add flags for the kind of connector, the region's size, and each setting of the tiers."""
    parser.add_argument(
        "--connector",
        action="store_true",
        help="for StrataConnector, a KV connector of vLLM's, and not for StrataSpec",
    )
    parser.add_argument(
        "--region-bytes", metavar="SIZE",
        help="memory that vLLM's own tier takes, through which all blocks pass (default: 1GiB)",
    )  # fmt: skip
    _add_settings(parser, VLLM_OPTIONS)


def _add_settings(parser: argparse._ActionsContainer, options: Mapping[str, Option]) -> None:
    for name, option in options.items():
        switch = {"action": argparse.BooleanOptionalAction} if not option.metavar else {}
        more: dict[str, Any] = switch or {"metavar": option.metavar}
        parser.add_argument(flag_of(name), help=option.help, **more)


def _lmcache(words: list[str]) -> int:
    parser = Parser(
        prog="stratakv config lmcache",
        description="Print what --l2-adapter of LMCache's server takes, for our tiers below it.",
    )
    parser.add_argument("--layouts", metavar="N", help="layouts of chunks that there may be (1)")
    parser.add_argument(
        "--chunk-bytes", metavar="SIZE",
        help="bytes of a chunk, which cache servers are then asked about at the start",
    )  # fmt: skip
    options = chunk_host("LMCache").options
    _add_settings(parser, options)
    args = vars(parser.parse_all(words))
    given = _given(args, options)
    for name, read, most in (
        ("layouts", readers.integer, MAX_LAYOUTS), ("chunk_bytes", readers.size, MAX_CHUNK_BYTES),
    ):  # fmt: skip
        if args[name] is not None:
            given[name] = read(flag_of(name), args[name])
            if not 1 <= given[name] <= most:
                raise ConfigError(f"{flag_of(name)} takes 1 to {most}, not {args[name]}")
    print(json.dumps(lmcache_config(given), indent=2))
    return 0


def _sglang(words: list[str]) -> int:
    parser = Parser(
        prog="stratakv config sglang",
        description=(
            "Print what --hicache-storage-backend-extra-config of SGLang takes, for our tiers "
            "below its host memory."
        ),
    )
    options = chunk_host("SGLang").options
    _add_settings(parser, options)
    print(json.dumps(sglang_config(_given(vars(parser.parse_all(words)), options)), indent=2))
    return 0


def _given(args: Mapping[str, Any], options: Mapping[str, Option]) -> dict[str, Any]:
    return {name: args[name] for name in options if args[name] is not None}


def _vllm(words: list[str]) -> int:
    parser = Parser(
        prog="stratakv config vllm",
        description="Print what vLLM's --kv-transfer-config takes, for our tiers below vLLM.",
    )
    add_vllm_arguments(parser)
    print(json.dumps(transfer_config_of(vars(parser.parse_all(words))), indent=2))
    return 0


def transfer_config_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's `--kv-transfer-config` for `add_vllm_arguments`' flags. Raises ConfigError."""
    flag, region = "--region-bytes", args["region_bytes"]
    given = _given(args, VLLM_OPTIONS)
    if args["connector"]:
        if region is not None:
            raise ConfigError(f"{flag} is for StrataSpec; StrataConnector has no region of vLLM's")
        return connector_config(given)
    region = REGION_BYTES if region is None else readers.size(flag, region)
    size_within(flag, region, LEAST_REGION_BYTES)
    return transfer_config(region, given)


def given_vllm_flags(args: Mapping[str, Any]) -> list[str]:
    names = [name for name in ("region_bytes", *VLLM_OPTIONS) if args[name] is not None]
    return [flag_of(name) for name in ("connector",) * bool(args["connector"]) + tuple(names)]


_WORDS: Mapping[str, Callable[[list[str]], int]] = {
    "show": _show,
    "check": _check,
    "vllm": _vllm,
    "lmcache": _lmcache,
    "sglang": _sglang,
}


def effective(settings: Settings) -> dict[str, Any]:
    """Return the value of every option in a config file's form, with masked secrets. The value is
    None for an option without a value or without effect."""
    engine = engine_config(settings.model, settings.engine_options, is_fetched=False)
    server = server_config(settings.server_options)
    values = {name: SCHEMA[name].file_value(value_in(name, engine, server)) for name in SCHEMA}
    if settings.model is None:
        values[MODEL] = None  # the path of the embedded model is not shown
    for name in without_effect(engine):
        values[name] = None
    return values


def _print_lines(values: Mapping[str, Any], settings: Settings, *, with_origin: bool) -> None:
    lines = [_yaml_line(name, value) for name, value in values.items()]
    width = max(map(len, lines))
    for name, line in zip(values, lines, strict=True):
        origin = f"  # {_origin(settings, name)}" if with_origin else ""
        print(f"{line:<{width}}{origin}" if origin else line)
    for note in settings.notes:
        print(f"# {note}")


def _yaml_line(name: str, value: Any) -> str:
    """Return a line of YAML. A masked secret or a missing value becomes a comment."""
    if value is None:
        is_unused = SCHEMA[name].default_text != SCHEMA[name].unset
        return f"# {name}: {'not used' if is_unused else SCHEMA[name].unset}"
    if value == MASK and SCHEMA[name].is_secret:
        return f"# {name}: {MASK}"
    is_plain = not isinstance(value, str) or (
        _PLAIN.fullmatch(value) is not None and value.lower() not in _WORDS_OF_YAML
    )
    text = str(value) if is_plain else json.dumps(value, ensure_ascii=False)
    return f"{name}: {text.lower() if isinstance(value, bool) else text}"


def _as_json(values: Mapping[str, Any], settings: Settings, *, with_origin: bool) -> dict[str, Any]:
    if not with_origin:
        return dict(values)
    return {
        name: {"value": value, "kind": _kind(settings, name), "origin": _origin(settings, name)}
        for name, value in values.items()
    }


def _kind(settings: Settings, name: str) -> str:
    return settings.given[name].kind if name in settings.given else DEFAULT


def _origin(settings: Settings, name: str) -> str:
    return settings.given[name].origin if name in settings.given else DEFAULT
