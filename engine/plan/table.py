# SPDX-License-Identifier: Apache-2.0
"""Prints a plan as tables, from the plan's JSON form. This module measures and computes nothing.

Sizes that the user gave are printed in the user's unit. Other sizes are printed in powers of 1024
if the user gave all sizes in powers of 1024, else in powers of 1000; rates in powers of 1000."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

_BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_BINARY_UNITS = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))
_TYPED = re.compile(r"([0-9.]+) *([A-Za-z]+)")
_RATE_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


Show = Callable[[float], str]


def print_plan(made: dict[str, Any], typed: Mapping[str, str] | None = None) -> None:
    """Print the plan on standard output. `typed` has the user's text of each size, by flag name."""
    typed = {
        name: " ".join(found.groups())
        for name, text in (typed or {}).items()
        if (found := _TYPED.fullmatch(text.strip()))
    }
    are_binary = [text.endswith("iB") for text in typed.values()]
    show = partial(show_bytes, binary=bool(are_binary) and all(are_binary))
    console = Console()
    # The width for a file or a pipe is 110 columns, so that every row fits on one line.
    console = console if console.is_terminal else Console(width=110)
    console.print(_summary(made, show), soft_wrap=True, markup=False, highlight=False)
    parts = [
        _memory(made, show, typed),
        _tiers(made, show, typed),
        _loads(made, show),
        _rates(made),
    ]
    if len(made["groups"]) > 1:
        parts.insert(1, _groups(made, show))
    for title, columns, rows in parts:
        console.print(_table(title, columns, rows))
    for line in (_verdict(made), _waste(made, show), *made["notes"]):
        console.print(f"- {line}", soft_wrap=True, markup=False, highlight=False)


def show_bytes(count: float, *, binary: bool = False) -> str:
    """Return a size with three digits and a unit: `5.24 MB`, or `5.00 MiB`."""
    for factor, unit in _BINARY_UNITS if binary else _BYTE_UNITS:
        if count >= factor:
            return f"{_three(count / factor)} {unit}"
    return f"{count:.0f} B"


def show_seconds(seconds: float) -> str:
    """Return a time with three digits and a unit: `46.8 ms`."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{_three(seconds / factor)} {unit}"
    return f"{_three(seconds / 1e-6)} µs"


def show_rate(per_second: float, what: str) -> str:
    """Return a rate with three digits and a unit: `28.0 GB/s`, or `1.20 T operations/s`."""
    unit = what.partition(",")[0]
    if unit == "bytes":
        return f"{show_bytes(per_second)}/s"
    for factor, prefix in _RATE_PREFIXES:
        if per_second >= factor:
            return f"{_three(per_second / factor)} {prefix} {unit}/s"
    return f"{_three(per_second)} {unit}/s"


def _three(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{decimals}f}"


def _summary(made: dict[str, Any], show: Show) -> str:
    model, block = made["model"], made["block"]
    files = model["weight_files"]
    there = "no whole set of safetensors files is there"
    if files is not None:
        there = f"safetensors files of {show(files['bytes'])} are there"
    return (
        f"{model['path']}: {model['architecture']}, {model['parameters']:,} parameters, "
        f"{show(model['parameter_bytes'])} in {model['dtype']} "
        f"(counted from config.json; {there})\n"
        f"KV cache in {block['kv_dtype']}: {block['bytes_per_token']:,} bytes a token, "
        f"{block['bytes']:,} bytes ({show(block['bytes'])}) a block of {block['tokens']} "
        f"tokens, in one piece{_on_each(model)}"
    )


def _on_each(model: dict[str, Any]) -> str:
    devices = model["tensor_parallel_size"]
    return f", on each of {devices} devices" if devices > 1 else ""


_Part = tuple[str, Sequence[str], list[list[str]]]


def _memory(made: dict[str, Any], show: Show, typed: Mapping[str, str]) -> _Part:
    memory = made["memory"]
    names = {
        "total_bytes": "memory",
        "weight_bytes": "weights",
        "reserve_bytes": "reserve for activations",
        "state_bytes": "states of requests",
        "kv_bytes": "KV pool",
    }
    flags = {"total_bytes": "memory", "reserve_bytes": "reserve"}
    rows = []
    for key, name in names.items():
        if key == "state_bytes" and not memory[key]:
            continue
        size = typed.get(flags.get(key, ""), show(memory[key]))
        rows.append([name, size, f"{memory[key] / memory['total_bytes']:.1%}"])
    return f"Memory{_on_each(made['model'])}", ("what", "size", "share"), rows


def _groups(made: dict[str, Any], show: Show) -> _Part:
    rows = [
        [
            str(number),
            group["attention"],
            f"{len(group['layers'])}",
            show(group["page_bytes"]),
            f"{group['pages']:,}",
            show(group["size_bytes"]),
        ]
        for number, group in enumerate(made["groups"])
    ]
    longest = f"{made['model']['max_model_len']:,}"
    columns = ("group", "attention", "layers", "block", f"blocks of {longest} tokens", "bytes")
    return "Cache groups", columns, rows


def _tiers(made: dict[str, Any], show: Show, typed: Mapping[str, str]) -> _Part:
    model = made["model"]
    columns = (
        "tier", "size", "blocks", "tokens", f"requests of {model['max_model_len']:,}",
        f"of {model['typical_tokens']:,}",
    )  # fmt: skip
    rows = [
        [
            name,
            typed.get(name, show(tier["size_bytes"])),
            f"{tier['blocks']:,}",
            f"{tier['tokens']:,}",
            f"{tier['requests_of_max_model_len']:,}",
            f"{tier['requests_of_typical_length']:,}",
        ]
        for name, tier in made["tiers"].items()
    ]
    return "What fits (of the pool's blocks one is the null block)", columns, rows


def _loads(made: dict[str, Any], show: Show) -> _Part:
    places = list(made["break_even_tokens"])
    columns = ["prefix", "blocks", "size", "computed in", *(f"from {name}" for name in places)]
    rows = [
        [
            f"{load['tokens']:,}",
            f"{load['blocks']:,}",
            show(load["size_bytes"]),
            show_seconds(load["prefill_seconds"]),
            *(_load(load, load["load_seconds"][place]) for place in places),
        ]
        for load in made["loads"]
    ]
    return "A prefix computed, and loaded instead", columns, rows


def _load(load: dict[str, Any], seconds: float) -> str:
    return f"{show_seconds(seconds)} ({_three(load['prefill_seconds'] / seconds)}x)"


def _rates(made: dict[str, Any]) -> _Part:
    rows = [
        [name.replace("_", " "), show_rate(rate["per_second"], rate["what"]), rate["origin"],
         rate["what"].partition(", ")[2]]
        for name, rate in made["rates"].items()
    ]  # fmt: skip
    return "Rates", ("of", "rate", "origin", "how"), rows


def _verdict(made: dict[str, Any]) -> str:
    """Return a text that says from which prefix length loading saves time, and how much."""
    longest, block = made["model"]["max_model_len"], made["block"]["tokens"]
    words, pays = [], False
    for place, tokens in made["break_even_tokens"].items():
        if tokens is None or tokens > longest:
            words.append(f"from {place} never")
            continue
        words.append(
            f"from {place} {'always' if tokens == block else f'from {tokens:,} tokens on'}"
        )
        pays = True
    if pays:
        return f"loading a prefix is quicker than computing it: {', '.join(words)}"
    names = " or ".join(made["break_even_tokens"])
    text = f"tiers do not pay here: no prefix is loaded from {names} sooner than it is computed"
    if made["loads"]:
        load = made["loads"][-1]
        place = min(load["load_seconds"], key=load["load_seconds"].__getitem__)
        text += (
            f"; {load['tokens']:,} tokens are computed in {show_seconds(load['prefill_seconds'])} "
            f"and loaded from {place} in {show_seconds(load['load_seconds'][place])}"
        )
    guessed = [name for name, rate in made["rates"].items() if rate["origin"] == "reference"]
    if guessed:
        text += (
            f"; {', '.join(guessed)} are reference figures of a large GPU's host, and without "
            "--no-probe this machine's count"
        )
    return text


def _waste(made: dict[str, Any], show: Show) -> str:
    waste = made["waste"]
    return (
        f"half-filled last blocks: {waste['tokens_per_request']:g} tokens "
        f"({show(waste['bytes_per_request'])}) of a request on average, "
        f"{waste['share_of_typical']:.2%} of one of {made['model']['typical_tokens']:,}"
    )


def _table(title: str, columns: Sequence[str], rows: list[list[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    is_text = {"what", "tier", "of", "origin", "how"}
    for column in columns:
        table.add_column(column, justify="left" if column in is_text else "right")
    for row in rows:
        table.add_row(*row)
    return table
