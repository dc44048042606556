# SPDX-License-Identifier: Apache-2.0
"""`stratakv cache ls|du|rm`: lists, measures and removes SSD tiers on this machine.

The command searches the default cache folder and given folders for tiers, and reads no blocks."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ....tiers.errors import TierConfigError
from ....tiers.settings import readers
from ....tiers.settings.format import one_line
from ....tiers.settings.suggestions import did_you_mean
from ....tiers.settings.values import ConfigError
from ....tiers.ssd.folder.inventory import StoreEntry, find_stores, is_store, look_at, remove
from ...config.engine_options import default_ssd_path
from ..args import Parser

DESCRIPTION = "List the SSD tiers on this machine, what they take, and remove them."

_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_UNKNOWN = "unknown (no readable identity file)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's name to the parser. Each subcommand parses the remaining arguments."""
    parser.add_argument("word", metavar="ls|du|rm", nargs="?", help="see the documentation")
    parser.add_argument(
        "rest", metavar="...", nargs=argparse.REMAINDER,
        help="ls, du: folders, --json; rm: stores, --all, --unused, --yes",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if args.word not in _WORDS:
        near = did_you_mean(args.word or "", _WORDS)
        given = "" if args.word is None else f", not {args.word!r}{near}"
        raise ConfigError(f"stratakv cache takes {', '.join(_WORDS)}{given}")
    return _WORDS[args.word](args.rest)


def add_look_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", metavar="PATH", nargs="*", help="look here too: a --kv-offload-ssd-path, or above"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def add_rm_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", metavar="PATH", nargs="*", help="the directory of an SSD tier")
    parser.add_argument(
        "--all", action="store_true", help="all in the default cache folder, unless one is in use"
    )
    parser.add_argument(
        "--unused",
        action="store_true",
        help="those there that no process has open",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")


def _ls(words: list[str]) -> int:
    found, as_json = _look("ls", words)
    if as_json:
        print(json.dumps({"stores": [_as_json(entry) for entry in found]}, indent=2))
        return 0
    for entry in found:
        blocks = "unknown" if entry.blocks is None else f"{entry.blocks:,}"
        used = "" if entry.used_bytes is None else f"{_size(entry.used_bytes)} used by "
        print(
            f"{one_line(str(entry.path))}\n"
            f"  made for   {one_line(entry.layout_text or _UNKNOWN)}\n"
            f"  size       {_size(entry.allocated_bytes)} reserved, {used}{blocks} blocks\n"
            f"  last used  {_moment(entry)}{_use(entry)}"
        )
    if not found:
        print("no SSD tiers found; give the directory of one outside the default cache folder")
    return 0


def _du(words: list[str]) -> int:
    found, as_json = _look("du", words)
    total = sum(entry.allocated_bytes for entry in found)
    if as_json:
        sizes = {str(entry.path): entry.allocated_bytes for entry in found}
        print(json.dumps({"stores": sizes, "total_bytes": total}, indent=2))
        return 0
    for entry in found:
        print(f"{_size(entry.allocated_bytes):>10}  {one_line(str(entry.path))}")
    print(f"{_size(total):>10}  in {len(found)} SSD tier{'s' * (len(found) != 1)}")
    return 0


def _rm(words: list[str]) -> int:
    parser = Parser(prog="stratakv cache rm", description=DESCRIPTION)
    add_rm_arguments(parser)
    args = parser.parse_all(words)
    if bool(args.paths) + args.all + args.unused != 1:
        raise ConfigError("stratakv cache rm takes the paths of SSD tiers, or --all, or --unused")
    if args.paths:
        chosen = [_store_at(readers.path("PATH", path)) for path in args.paths]
    else:
        chosen = [s for folder in _default_folders(is_needed=True) for s in find_stores(folder)]
    if args.unused:
        chosen = [entry for entry in chosen if entry.owner is None]
    for entry in chosen:
        if entry.owner is not None:
            raise ConfigError(
                f"the SSD tier in {entry.path} is in use by process {entry.owner}; stop that "
                "process first. Nothing was removed"
            )
    if not chosen:
        print("no SSD tiers to remove")
        return 0
    if not args.yes and not _agrees(chosen):
        return 0
    for entry in chosen:
        try:
            print(f"removed {one_line(str(entry.path))}, {_size(remove(entry.path))}")
        except TierConfigError as error:  # another process has just opened the SSD tier
            raise ConfigError(str(error)) from error
    return 0


_WORDS: Mapping[str, Callable[[list[str]], int]] = {"ls": _ls, "du": _du, "rm": _rm}


def _look(word: str, words: list[str]) -> tuple[list[StoreEntry], bool]:
    parser = Parser(prog=f"stratakv cache {word}", description=DESCRIPTION)
    add_look_arguments(parser)
    args = parser.parse_all(words)
    given = [readers.path("PATH", path) for path in args.paths]
    for path in given:
        if not path.is_dir():
            raise ConfigError(f"{path} is no folder that can be looked into; give one that is")
    found = {
        os.path.realpath(entry.path): entry
        for folder in (*given, *_default_folders(is_needed=not given))
        for entry in find_stores(folder)
    }
    return sorted(found.values(), key=lambda entry: entry.path), bool(args.json)


def _store_at(path: Path) -> StoreEntry:
    if not is_store(path):
        raise ConfigError(
            f"{path} holds no SSD tier; `stratakv cache ls` lists the directories that hold one"
        )
    return look_at(path)


def _default_folders(*, is_needed: bool) -> tuple[Path, ...]:
    """Return the default folders of SSD tiers. For a user without a home directory, return () or,
    if a folder `is_needed`, raise ConfigError."""
    try:
        return (default_ssd_path().parent,)
    except ConfigError:
        if is_needed:
            raise
        return ()


def _agrees(chosen: Sequence[StoreEntry]) -> bool:
    """Return whether the user confirms the removal. Raises ConfigError without a terminal."""
    total = _size(sum(entry.allocated_bytes for entry in chosen))
    what = f"{len(chosen)} SSD tiers, {total}" if len(chosen) > 1 else f"{chosen[0].path}, {total}"
    if not sys.stdin.isatty():
        raise ConfigError(f"removing {what} takes --yes without a terminal to ask at")
    try:
        return input(f"remove {one_line(what)}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _use(entry: StoreEntry) -> str:
    return "" if entry.owner is None else f", in use by process {one_line(entry.owner)}"


def _moment(entry: StoreEntry) -> str:
    there = datetime.fromtimestamp(entry.last_used, UTC).astimezone()
    return there.strftime("%Y-%m-%d %H:%M %Z")


def _size(count: int) -> str:
    """Return a rounded size in the form that flags take: `5.2 GiB`."""
    for unit, factor in _UNITS:
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"


def _as_json(entry: StoreEntry) -> dict[str, Any]:
    return {
        "path": str(entry.path),
        "made_for": entry.layout_text,
        "allocated_bytes": entry.allocated_bytes,
        "blocks": entry.blocks,
        "used_bytes": entry.used_bytes,
        "last_used_unix_seconds": entry.last_used,
        "in_use": entry.owner is not None,
        "owner": entry.owner,
    }
