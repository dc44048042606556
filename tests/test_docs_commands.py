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
from types import ModuleType, SimpleNamespace
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
from stratakv.engine.cli import cache_server, config, generate, serve
from stratakv.engine.cli.args import Parser
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
from stratakv.tiers.cache_server.access.tenants import read_tenants
from stratakv.tiers.settings import readers
from stratakv.tiers.settings.option import flag_of
from stratakv.tiers.settings.values import ConfigError

from .pages import ROOT, read_command_pages

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


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    """All flags but --help and the negative forms."""
    return {
        action.option_strings[0]
        for action in parser._actions
        if action.option_strings and action.dest != "help"
    }


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        return importlib.import_module("command_pages")


def test_tables_of_flags_are_those_of_the_code(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    is_behind = tool.main(["--check"])
    assert not is_behind, f"`make pages` writes these rows:\n{capsys.readouterr().out}"


def test_what_has_changed_in_the_code_is_written(tool: ModuleType) -> None:
    """A new flag, one that is gone, another default and another order; words of the page stay."""
    heading, row = "stratakv x", tool.Row
    page = tool.written(
        f"## {heading}\n\n{tool.HEADER}\n|---|---|---|---|\n"
        "| `--gone` | none | text | what it was |\n"
        "| `--kept` | the model's | [links](a.md) | told at length |\n"
        "| `--other` | `3` | tokens | counted |\n\n| flag | here |\n|---|---|\n| `--x` | y |\n",
        {
            heading: [
                row("--other", "`4`", "N", "of the code"),
                row("--kept", "", "WORD", "of the code"),
                row("--new", "", "N", "of the code"),
            ]
        },
    )
    assert page.splitlines()[4:] == [
        "| `--other` | `4` | tokens | counted |",
        "| `--kept` | the model's | [links](a.md) | told at length |",
        "| `--new` | none | N | of the code |",
        "",
        "| flag | here |",
        "|---|---|",
        "| `--x` | y |",
    ]


def test_a_page_behind_the_code_is_found(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for page in tool.PAGES.glob("*.md"):
        text = page.read_text().replace("| `--block-size` | `16` |", "| `--block-size` | `32` |", 1)
        (tmp_path / page.name).write_text(text)
    monkeypatch.setattr(tool, "PAGES", tmp_path)
    assert tool.main(["--check"]) == 1
    assert "- | `--block-size` | `32` |" in capsys.readouterr().out


def test_every_flag_has_a_row() -> None:
    """The tables that `serve` and `generate` share, and the flags that stand elsewhere."""
    shared = ENGINE_FLAGS | ALIAS_FLAGS | {"--config"}
    assert _flags(_parser_of(serve)) == _tables()["stratakv serve"].keys() | shared
    aliases = {flag_of(name) for name, alias in ALIASES.items() if not alias.is_server}
    own = _tables()["stratakv generate"].keys()
    assert _flags(_parser_of(generate)) == own | ENGINE_FLAGS | aliases | {"--config"}


def test_the_example_of_tenants() -> None:
    [example] = re.findall(r"```toml\n(.*?)```", read_command_pages(), re.DOTALL)
    [tenant] = read_tenants(example, "the example", readers.size)
    assert tenant.pool == "everyone"


def test_flags_of_config() -> None:
    parser = Parser(prog="probe")
    config.add_show_arguments(parser)
    own = _flags(parser) - _flags(_parser_of(serve))
    commands = _tables()["Configuration"]
    assert list(commands) == [
        "stratakv config show", "stratakv config check FILE", "stratakv config vllm",
        "stratakv config lmcache", "stratakv config sglang",
    ]  # fmt: skip
    assert set(re.findall(r"`(--\S+)`", commands["stratakv config show"][0])) == {
        "--config", *own,
    }  # fmt: skip


def test_spellings_of_vllm() -> None:
    table = _tables()["vLLM's spellings"]
    assert list(table) == [flag_of(name) for name in ALIASES]
    for name, alias in ALIASES.items():
        [here] = table[flag_of(name)]
        assert here.endswith(" Of `serve`") == alias.is_server, name
        assert all(flag in ENGINE_FLAGS | SERVER_FLAGS for flag in _options_in(here)), name
        _check_meaning(name, here)
    text = read_command_pages()
    begin = text.index("`--generation-config vllm`")
    same = text[begin : text.index("have the same names and meanings", begin)]
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


def test_routes() -> None:
    app = create_app(
        # The rest is asked only when a request comes.
        cast("Any", SimpleNamespace(ready=SimpleNamespace(adapters=[]))),
        model_name="probe",
        model_path=EMBEDDED_MODEL,
        tokenizer=None,
        settings=ApiSettings(enable_dev_routes=True, lora_dir=ROOT),
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
        "tenant_header", "lora_dir", "media_domains",
    }  # fmt: skip
    wanted = {
        field.name: getattr(settings, field.name)
        for field in fields(settings)
        if field.name not in switches
    }
    table = _tables()["Limits"]
    assert {name: float(cells[0]) for name, cells in table.items()} == wanted
