# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of flags in docs/commands/ from the option tables and the commands' parsers.

    python tools/command_pages.py            rewrite the pages
    python tools/command_pages.py --check    name the rows that would change; 1 if there are any

A table has the columns flag, default, unit and what (the description). Flags, their order and their
defaults come from the code. The units and descriptions of the page are kept, because the page has
links and longer texts than `--help`. The row of a new flag has the unit and the description of the
code; the row of a removed flag is deleted."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from stratakv.engine.cli import bench, cache_server, doctor, generate, plan, route, serve
from stratakv.engine.cli.args import Parser, log_level
from stratakv.engine.cli.config import add_vllm_arguments
from stratakv.engine.cli.tiers import check, describe, ping
from stratakv.engine.config.engine_options import OPTIONS
from stratakv.engine.config.server_options import SERVER_OPTIONS
from stratakv.engine.router.router_settings import ROUTER_OPTIONS
from stratakv.tiers.settings.option import Option, flag_of

PAGES = Path(__file__).resolve().parents[1] / "docs" / "commands"
HEADER = "| flag | default | unit | what |"
WORDLESS = (None, argparse.SUPPRESS, [])  # defaults that the code cannot show as text


class Row(NamedTuple):
    """A row of a table of flags. An empty default or unit is replaced by that of the page."""

    flag: str
    default: str
    unit: str
    what: str


def rows_of_options(table: Mapping[str, Option]) -> Iterator[Row]:
    """The rows of an option table, in its order."""
    for name, option in table.items():
        is_word = option.file_value(option.default) is None or option.metavar == ""
        text = option.default_text
        unit = option.metavar or "switch"
        yield Row(flag_of(name), text if is_word else f"`{text}`", unit, option.help)


def rows_of_parser(add_arguments: Callable[[Parser], None] | None) -> Iterator[Row]:
    """The rows of a command's own flags, in the order of `--help`."""
    parser = Parser(prog="command_pages")
    if add_arguments is not None:
        add_arguments(parser)
    for action in parser._actions:
        if not action.option_strings or action.dest == "help":
            continue
        default, unit = action.default, action.metavar or action.dest.upper()
        if isinstance(default, bool):
            shown, unit = "on" if default else "off", "switch"
        else:
            shown = "" if default in WORDLESS else f"`{default}`"
        yield Row(action.option_strings[0], shown, str(unit), str(action.help or ""))


def rows_of_benchmark(name: str) -> Iterator[Row]:
    """Yield the rows of a benchmark's own flags, without the common `--quick` and `--out`."""
    module = importlib.import_module(bench.BENCHMARKS[name], bench.__package__)
    yield Row("--quick", "off", "switch", "a small form, for a demonstration")
    yield Row("--out", f"`build/bench/{name}`", "directory", "where the results go")
    yield from rows_of_parser(getattr(module, "add_arguments", None))


def rows_of_generate() -> Iterator[Row]:
    """Yield the rows of `generate`, without the engine's flags. The default of the log level is
    that of the command, and the defaults of sampling flags are those of `SamplingParams`."""
    parser = Parser(prog="command_pages")
    generate.add_arguments(parser)
    asked = parser.parse_all(["--prompt", "x"])
    params, level = generate._sampling_params(asked), log_level(asked)
    shared = {row.flag for row in rows_of_parser(serve.add_arguments)}
    for row in rows_of_parser(generate.add_arguments):
        name = row.flag.removeprefix("--").replace("-", "_")
        if name == "log_level":
            yield row._replace(default=f"`{level}`")
        elif name in generate._SAMPLING:
            value = getattr(params, name)
            yield row._replace(default="none" if value is None else f"`{value:g}`")
        elif row.flag not in shared:
            yield row


def _without(rows: Iterable[Row], others: Iterable[Row]) -> list[Row]:
    flags = {row.flag for row in others}
    return [row for row in rows if row.flag not in flags]


def tables() -> dict[str, list[Row]]:
    """The rows of each table, by the heading above the table."""
    cache_servers = list(rows_of_options(cache_server.OPTIONS))
    routers = list(rows_of_options(ROUTER_OPTIONS))
    others = _without(rows_of_parser(cache_server.add_arguments), cache_servers)
    return {
        "Engine": list(rows_of_options(OPTIONS)),
        "stratakv serve": list(rows_of_options(SERVER_OPTIONS)),
        "stratakv generate": list(rows_of_generate()),
        "stratakv cache-server": [*cache_servers, *others],
        "stratakv route": [*_without(rows_of_parser(route.add_arguments), routers), *routers],
        "stratakv doctor": list(rows_of_parser(doctor.add_host_arguments)),
        "stratakv doctor vllm": _without(
            rows_of_parser(doctor.add_vllm_arguments), rows_of_parser(add_vllm_arguments)
        ),
        "stratakv plan": list(rows_of_parser(plan.add_arguments)),
        "stratakv check": list(rows_of_parser(check.add_arguments)),
        "stratakv ping": list(rows_of_parser(ping.add_arguments)),
        "stratakv describe": list(rows_of_parser(describe.add_arguments)),
        **{f"stratakv bench {name}": list(rows_of_benchmark(name)) for name in bench.BENCHMARKS},
    }


def written(page: str, rows_by_heading: Mapping[str, list[Row]]) -> str:
    """Return the text of the page `page`, with its tables of flags updated from the code."""
    lines: list[str] = []
    heading, kept = "", None
    for line in [*page.splitlines(), ""]:
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if kept is not None:
            if line.startswith("|"):
                flag, *cells = [cell.strip() for cell in line.strip("|").split(" | ")]
                kept[flag.strip("` ")] = cells
                continue
            lines += map(_line, _filled(rows_by_heading[heading], kept))
            kept = None
        lines.append(line)
        if line.startswith("|---") and lines[-2] == HEADER and heading in rows_by_heading:
            kept = {}
    return "\n".join(lines[:-1]) + "\n"


def _filled(rows: Iterable[Row], kept: Mapping[str, list[str]]) -> Iterator[Row]:
    """Yield the rows, with each flag's unit and description from the page. The default of the page
    is kept if the code has no default, or if the defaults differ only in backticks."""
    for row in rows:
        if row.flag not in kept:
            yield row._replace(default=row.default or "none")
            continue
        default, unit, what = kept[row.flag]
        is_same = row.default.strip("`") in ("", default.strip("`"))
        yield Row(row.flag, default if is_same else row.default, unit, what)


def _line(row: Row) -> str:
    return f"| `{row.flag}` | {row.default} | {row.unit} | {row.what} |"


def main(arguments: list[str]) -> int:
    """Run the command line; return 1 if `--check` is given and a page differs from the code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    checks = parser.parse_args(arguments).check
    rows, status = tables(), 0
    for path in sorted(PAGES.glob("*.md")):
        old = path.read_text()
        new = written(old, rows)
        if not checks:
            path.write_text(new)
            continue
        before, after = old.splitlines(), new.splitlines()
        for sign, here, there in (("-", before, set(after)), ("+", after, set(before))):
            for line in here:
                if line not in there:
                    print(f"{path.name}: {sign} {line}")
        status |= old != new
        if old != new and sorted(before) == sorted(after):
            print(f"{path.name}: rows in another order")
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
