# SPDX-License-Identifier: Apache-2.0
"""`docs/commands.md` is true: flags, defaults, routes, fields and limits are those of the code."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from starlette.routing import Route

from stratakv.benchmarks import offload
from stratakv.engine.api.app import create_app
from stratakv.engine.api.protocol import (
    NEUTRAL_VALUES,
    ChatRequest,
    CompletionRequest,
    SamplingFields,
)
from stratakv.engine.api.settings import ApiSettings
from stratakv.engine.cli import bench, generate, serve
from stratakv.engine.cli.args import Parser
from stratakv.engine.config import show_size
from stratakv.engine.options import EMBEDDED_MODEL, OPTIONS, engine_config, flag_of

FILE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"
ENGINE_FLAGS = {flag_of(name) for name in OPTIONS}


@cache
def _tables() -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    """Heading → first cell, without its backticks → the other cells."""
    tables: dict[str, dict[str, tuple[str, ...]]] = {}
    heading = ""
    for line in FILE.read_text().splitlines():
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
    command.add_arguments(parser)
    return parser


def _flags(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Flag → default, for all but --help and the negative forms."""
    return {
        action.option_strings[0]: action.default
        for action in parser._actions
        if action.option_strings and action.dest != "help"
    }


def _shown(flag: str, default: Any) -> str:
    """A default as the table writes it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    option = OPTIONS.get(flag.removeprefix("--").replace("-", "_"))
    return f"`{show_size(default) if option and option.metavar == 'SIZE' else default}`"


@pytest.mark.parametrize(
    ("heading", "command"),
    [("stratakv serve", serve), ("stratakv generate", generate)],
    ids=["serve", "generate"],
)
def test_flags_of_a_command(heading: str, command: Any) -> None:
    flags = _flags(_parser_of(command))
    assert flags.keys() >= ENGINE_FLAGS
    own = {flag: default for flag, default in flags.items() if flag not in ENGINE_FLAGS}
    assert _tables()[heading].keys() == own.keys()
    for flag, default in own.items():
        if default not in (None, argparse.SUPPRESS, []):
            assert _tables()[heading][flag][0] == _shown(flag, default), flag


def test_defaults_of_sampling() -> None:
    params = generate._sampling_params(_parser_of(generate).parse_all(["--prompt", "x"]))
    for name in generate._SAMPLING:
        cell = _tables()["stratakv generate"][flag_of(name)][0]
        value = getattr(params, name)
        assert cell == ("none" if value is None else f"`{value:g}`"), name


def test_flags_of_the_engine() -> None:
    table = _tables()["Engine"]
    assert list(table) == [flag_of(name) for name in OPTIONS], "in the order of --help"
    config = engine_config(None, {})
    for name, option in OPTIONS.items():
        section = config if option.section == "engine" else getattr(config, option.section)
        default = getattr(section, option.field)
        cell = table[flag_of(name)][0]
        # What is None or empty, or made from the model, is described in words.
        if default not in (None, "", ()) and name != "served_model_name":
            assert cell == _shown(flag_of(name), default), name
        else:
            assert "`" not in cell or name == "kv_offload_ssd_path"


def test_flags_of_the_benchmark() -> None:
    assert list(bench.BENCHMARKS) == ["offload"], "another benchmark needs a table"
    flags = _flags(_parser_of(offload))
    table = _tables()["stratakv bench offload"]
    assert table.keys() == flags.keys() | {"--quick", "--out"}
    for flag, default in flags.items():
        if default is not None:
            assert table[flag][0] == f"`{default}`", flag


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


def test_limits() -> None:
    settings = ApiSettings()
    switches = {"api_key", "enable_dev_routes"}
    wanted = {
        field.name: getattr(settings, field.name)
        for field in fields(settings)
        if field.name not in switches
    }
    table = _tables()["Limits"]
    assert {name: float(cells[0]) for name, cells in table.items()} == wanted


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", FILE.read_text()):
        assert (FILE.parent / target).exists(), target
