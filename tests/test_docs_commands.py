# SPDX-License-Identifier: Apache-2.0
"""The pages of commands: their flags, defaults, routes, fields and limits are those of the code."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from starlette.routing import Route, WebSocketRoute

from stratakv.engine.api.api_settings import ApiSettings
from stratakv.engine.api.app import create_app
from stratakv.engine.api.openai.request.protocol import (
    NEUTRAL_VALUES,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    SamplingFields,
)
from stratakv.engine.cli import bench, cache_server, config, doctor, generate, route, serve
from stratakv.engine.cli.args import Parser, log_level
from stratakv.engine.config.engine_options import EMBEDDED_MODEL, OPTIONS
from stratakv.engine.config.resolve import (
    CACHE_SERVER_PREFIX,
    OTHER_VARIABLES,
    read_config_settings,
    resolve,
)
from stratakv.engine.config.schema import SCHEMA, variable_of
from stratakv.engine.config.server_options import SERVER_OPTIONS
from stratakv.engine.config.vllm_aliases import ALIASES
from stratakv.engine.router.router_settings import ROUTER_OPTIONS
from stratakv.tiers.cache_server.access.tenants import read_tenants
from stratakv.tiers.settings import readers
from stratakv.tiers.settings.option import flag_of
from stratakv.tiers.settings.values import ConfigError

from .pages import read_command_pages

ENGINE_FLAGS = {flag_of(name) for name in OPTIONS}
SERVER_FLAGS = {flag_of(name) for name in SERVER_OPTIONS}
ALIAS_FLAGS = {flag_of(name) for name in ALIASES}


@cache
def _tables() -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    """Heading → first cell, without its backticks → the other cells."""
    tables: dict[str, dict[str, tuple[str, ...]]] = {}
    heading = ""
    for line in read_command_pages().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("| `"):
            first, *rest = [cell.strip() for cell in line.strip("|").split("|")]
            table = tables.setdefault(heading, {})
            assert first not in table, f"{first} stands twice under {heading}"
            table[first.strip("`")] = tuple(rest)
    return tables


def _parser_of(command: Any) -> Parser:
    parser = Parser(prog="probe")
    if hasattr(command, "add_arguments"):  # a benchmark may have none
        command.add_arguments(parser)
    return parser


def _flags(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Flag → default, for all but --help and the negative forms."""
    return {
        action.option_strings[0]: action.default
        for action in parser._actions
        if action.option_strings and action.dest != "help"
    }


def _shown(default: Any) -> str:
    """A default as the tables write it."""
    return ("on" if default else "off") if isinstance(default, bool) else f"`{default}`"


def _is_default(cell: str, name: str) -> bool:
    """Values have backticks; words and the states of a switch have none."""
    text = SCHEMA[name].default_text
    return cell in (text, f"`{text}`")


def test_flags_of_serve() -> None:
    table = _tables()["stratakv serve"]
    assert list(table) == [flag_of(name) for name in SERVER_OPTIONS], "in the order of --help"
    assert all(_is_default(table[flag_of(name)][0], name) for name in SERVER_OPTIONS)
    shared = ENGINE_FLAGS | ALIAS_FLAGS | {"--config"}
    assert _flags(_parser_of(serve)).keys() == table.keys() | shared


def test_flags_of_generate() -> None:
    flags = _flags(_parser_of(generate))
    assert flags.keys() >= ENGINE_FLAGS
    engine_aliases = {flag_of(name) for name, alias in ALIASES.items() if not alias.is_server}
    own = flags.keys() - ENGINE_FLAGS - engine_aliases - {"--config"}
    assert _tables()["stratakv generate"].keys() == own
    for flag in own:
        if flags[flag] not in (None, argparse.SUPPRESS, []):
            assert _tables()["stratakv generate"][flag][0] == _shown(flags[flag]), flag
    level = log_level(_parser_of(generate).parse_all([]))
    assert _tables()["stratakv generate"]["--log-level"][0] == f"`{level}`"


def test_flags_of_the_cache_server() -> None:
    table = _tables()["stratakv cache-server"]
    own = [*(flag_of(name) for name in cache_server.OPTIONS), "--config", "--new-token"]
    assert list(table) == own, "in the order of the options"
    assert _flags(_parser_of(cache_server)).keys() == set(own)
    for name in cache_server.OPTIONS:
        text = cache_server.OPTIONS[name].default_text
        assert table[flag_of(name)][0] in (text, f"`{text}`"), name


def test_flags_of_the_router() -> None:
    table = _tables()["stratakv route"]
    own = ["--decode", "--prefill", *(flag_of(name) for name in ROUTER_OPTIONS)]
    assert list(table) == own, "in the order of --help"
    assert _flags(_parser_of(route)).keys() == set(own)
    for name in ROUTER_OPTIONS:
        text = ROUTER_OPTIONS[name].default_text
        assert table[flag_of(name)][0] in (text, f"`{text}`"), name


def test_the_example_of_tenants() -> None:
    [example] = re.findall(r"```toml\n(.*?)```", read_command_pages(), re.DOTALL)
    [tenant] = read_tenants(example, "the example", readers.size)
    assert tenant.pool == "everyone"


def test_flags_of_config() -> None:
    parser = Parser(prog="probe")
    config.add_show_arguments(parser)
    own = _flags(parser).keys() - _flags(_parser_of(serve)).keys()
    commands = _tables()["Configuration"]
    assert list(commands) == [
        "stratakv config show", "stratakv config check FILE", "stratakv config vllm",
        "stratakv config lmcache", "stratakv config sglang",
    ]  # fmt: skip
    assert set(re.findall(r"`(--\S+)`", commands["stratakv config show"][0])) == {
        "--config", *own,
    }  # fmt: skip


def test_flags_of_doctor() -> None:
    parser, shared = Parser(prog="probe"), Parser(prog="probe")
    doctor.add_vllm_arguments(parser)
    config.add_vllm_arguments(shared)
    own = _flags(parser).keys() - _flags(shared).keys()
    assert _tables()["stratakv doctor vllm"].keys() == own
    host = Parser(prog="probe")
    doctor.add_host_arguments(host)
    assert _tables()["stratakv doctor"].keys() == _flags(host).keys()


def test_spellings_of_vllm() -> None:
    table = _tables()["vLLM's spellings"]
    assert list(table) == [flag_of(name) for name in ALIASES]
    for name, alias in ALIASES.items():
        [here] = table[flag_of(name)]
        assert here.endswith(" Of `serve`") == alias.is_server, name
        assert all(flag in ENGINE_FLAGS | SERVER_FLAGS for flag in _options_in(here)), name
        _check_meaning(name, here)
    text = read_command_pages()
    same = text[text.index("`--generation-config vllm`") : text.index("are the same here")]
    assert set(re.findall(r"`(--[a-z-]+)`", same)) <= ENGINE_FLAGS | SERVER_FLAGS | {"--config"}


def _options_in(text: str) -> list[str]:
    return [
        flag.replace("--no-", "--") for flag in re.findall(r"--[a-z-]+", text) if flag != "--seed"
    ]


def _check_meaning(name: str, here: str) -> None:
    """The row of an alias against what it does."""
    flags, words = _options_in(here), re.findall(r"`([a-z0-9]+)`", here)
    if here.startswith("refused"):
        with pytest.raises(ConfigError, match="is not taken"):
            resolve({name: "x"}, {})
    elif here.startswith("no effect"):
        value = "0.9" if name == "gpu_memory_utilization" else "true"
        settings = resolve({name: value}, {})
        assert settings.notes and not settings.given
    elif flags and here.startswith("`--"):
        option = OPTIONS.get(flags[0][2:].replace("-", "_"))
        values = {"num_blocks": "9", "block_hash": "sha256", "structured_outputs_backend": "auto",
                  "pooling": '{"pooling_type": "MEAN"}',
                  "method": '{"method": "ngram"}'}  # fmt: skip
        value = values.get(
            option.field if option else "", "true" if name.startswith("disable") else "info"
        )
        assert [flag_of(each) for each in resolve({name: value}, {}).given] == flags
    elif flags and here.startswith("GiB"):
        assert {flag_of(each) for each in resolve({name: "1"}, {}).given} == set(flags)
    else:
        neutral = [word for word in words if word not in ("seed", "serve", "generate")]
        assert neutral, name
        for word in neutral:
            settings = resolve({name: word}, {})
            assert not settings.given and not settings.notes
        with pytest.raises(ConfigError, match=f"takes {' or '.join(neutral)} here"):
            resolve({name: "x"}, {})


def test_variables() -> None:
    text = read_command_pages()
    named = set(re.findall(r"STRATAKV_[A-Z_]*[A-Z]", text))
    assert named >= OTHER_VARIABLES.keys()
    of_cache_server = {name for name in named if f"{name}_".startswith(CACHE_SERVER_PREFIX)}
    assert of_cache_server - {CACHE_SERVER_PREFIX[:-1], f"{CACHE_SERVER_PREFIX}CONFIG"} <= {
        CACHE_SERVER_PREFIX + name.upper() for name in cache_server.OPTIONS
    }
    assert (
        named - of_cache_server <= {variable_of(name) for name in SCHEMA} | OTHER_VARIABLES.keys()
    )


def test_the_example_file(tmp_path: Path) -> None:
    [example] = re.findall(r"```yaml\n(.*?)```", read_command_pages(), re.DOTALL)
    path = tmp_path / "stratakv.yaml"
    path.write_text(example)
    given = read_config_settings(path).given
    assert given["kv_offload"].value == ("cpu", "ssd")


def test_defaults_of_sampling() -> None:
    params = generate._sampling_params(_parser_of(generate).parse_all(["--prompt", "x"]))
    for name in generate._SAMPLING:
        cell = _tables()["stratakv generate"][flag_of(name)][0]
        value = getattr(params, name)
        assert cell == ("none" if value is None else f"`{value:g}`"), name


def test_flags_of_the_engine() -> None:
    table = _tables()["Engine"]
    assert list(table) == [flag_of(name) for name in OPTIONS], "in the order of --help"
    for name in OPTIONS:
        assert _is_default(table[flag_of(name)][0], name), name


@pytest.mark.parametrize("name", bench.BENCHMARKS)
def test_flags_of_a_benchmark(name: str) -> None:
    module = importlib.import_module(bench.BENCHMARKS[name], bench.__package__)
    flags = _flags(_parser_of(module))
    table = _tables()[f"stratakv bench {name}"]
    assert table.keys() == flags.keys() | {"--quick", "--out"}
    for flag, default in flags.items():
        if default is not None:
            assert table[flag][0] == _shown(default), flag


def test_routes() -> None:
    app = create_app(
        cast("Any", None),  # asked only when a request comes
        model_name="probe",
        model_path=EMBEDDED_MODEL,
        tokenizer=None,
        settings=ApiSettings(enable_dev_routes=True),
    )
    routes = {
        f"{method} {route.path}"
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    routes |= {f"GET {route.path}" for route in app.routes if isinstance(route, WebSocketRoute)}
    assert _tables()["HTTP routes"].keys() == routes


def _fields_of(kind: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(kind)} - NEUTRAL_VALUES.keys()


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("Fields of /v1/completions", CompletionRequest),
        ("Fields of /v1/chat/completions", ChatRequest),
    ],
)
def test_fields_of_a_body(heading: str, kind: type[msgspec.Struct]) -> None:
    shared = _fields_of(SamplingFields)
    assert _tables()["Fields of both bodies"].keys() == shared
    assert _tables()[heading].keys() == _fields_of(kind) - shared


def test_fields_of_embeddings() -> None:
    assert _tables()["Fields of /v1/embeddings"].keys() == _fields_of(EmbeddingRequest)


def test_limits() -> None:
    settings = ApiSettings()
    switches = {
        "api_key", "enable_dev_routes", "metrics_without_key", "cross_origin", "allowed_hosts",
        "tenant_header",
    }  # fmt: skip
    wanted = {
        field.name: getattr(settings, field.name)
        for field in fields(settings)
        if field.name not in switches
    }
    table = _tables()["Limits"]
    assert {name: float(cells[0]) for name, cells in table.items()} == wanted
