# SPDX-License-Identifier: Apache-2.0
"""`stratakv check PATH`: reads a whole SSD tier, reports faults, and repairs faults on request.

`stratakv check PATH --tenants FILE` reads the folder of a cache server instead, and lists the data
of tenants that are not in FILE.

Exit codes: 0 no fault, 1 at least one fault, even if the fault was repaired."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ....tiers.cache_server.layout_note import remove_left, stores_left
from ....tiers.errors import TierConfigError
from ....tiers.mac_key import MacKey, read_mac_key
from ....tiers.settings import readers
from ....tiers.settings.format import one_line
from ....tiers.settings.sizes import rough_size
from ....tiers.settings.values import ConfigError
from ....tiers.ssd.folder.reconcile import CheckResult
from ....tiers.ssd.store_check import check_store

DESCRIPTION = "Check an SSD tier that no engine uses: its index against its records, and back."

EXIT_PROBLEMS = 1
_MOST_SHOWN = 20
_KEY_FLAG = "--mac-key-file"
_TENANTS_FLAG = "--tenants"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="the directory of the SSD tier")
    parser.add_argument(
        "--fix", action="store_true",
        help="remove rows that are wrong; make a lost index again from the records",
    )  # fmt: skip
    parser.add_argument(
        _KEY_FLAG, metavar="FILE",
        help="file with the key of a tier whose blocks are sealed, to verify them",
    )  # fmt: skip
    parser.add_argument(
        _TENANTS_FLAG, metavar="FILE",
        help="a cache server's tenants file, PATH being its --ssd-path: name the stores of tenants "
        "who are not in it; --fix removes them",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    path = readers.path("PATH", args.path)
    if args.tenants is not None:
        if args.mac_key_file is not None:
            raise ConfigError(
                f"{_KEY_FLAG} is for checking blocks; leave it or {_TENANTS_FLAG} out"
            )
        return _check_tenants(path, readers.path(_TENANTS_FLAG, args.tenants), args)
    began = time.monotonic()
    try:
        key = _read_key(args.mac_key_file)
        result = check_store(path, fix=args.fix, mac_key=key, max_problems=_MOST_SHOWN)
    except TierConfigError as error:
        raise ConfigError(str(error)) from error
    if args.json:
        print(json.dumps(_as_json(result), indent=2))
    else:
        _print(result, time.monotonic() - began)
    return 0 if result.is_clean else EXIT_PROBLEMS


def _check_tenants(path: Path, file: Path, args: argparse.Namespace) -> int:
    """Print the stores of tenants that are not in `file`, and remove these stores on request."""
    from ....tiers.cache_server.access.tenants import read_tenants

    try:
        text = file.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{_TENANTS_FLAG} names {file}, which cannot be read as text ({error})"
        ) from error
    try:
        tenants = read_tenants(text, f"the tenants file {file}", readers.size)
        left = stores_left(path, tenants.quotas)
        if args.fix:
            for entry in left:
                remove_left(entry.path)
    except TierConfigError as error:
        raise ConfigError(str(error)) from error
    word = "removed" if args.fix else "left of a tenant who is not in the file"
    if args.json:
        rows = [
            {
                "path": str(e.path),
                "allocated_bytes": e.allocated_bytes,
                "in_use": e.owner is not None,
            }
            for e in left
        ]
        print(json.dumps({"path": str(path), "left": rows, "removed": bool(args.fix)}, indent=2))
        return EXIT_PROBLEMS if left else 0
    for entry in left:
        use = "" if entry.owner is None or args.fix else f", in use by process {entry.owner}"
        print(f"{one_line(str(entry.path))}: {word}, {rough_size(entry.allocated_bytes)}{use}")
    print(f"{len(left)} stores of tenants who are gone" if left else "clean")
    return EXIT_PROBLEMS if left else 0


def _read_key(name: str | None) -> MacKey | None:
    return None if name is None else read_mac_key(readers.path(_KEY_FLAG, name), _KEY_FLAG)


def _as_json(result: CheckResult) -> dict[str, Any]:
    values = asdict(result)
    del values["max_problems"]
    return values | {"path": str(result.path), "is_clean": result.is_clean}


def _print(result: CheckResult, seconds: float) -> None:
    rate = result.bytes_read / max(seconds, 1e-9) / 1e9
    print(
        f"{result.path}: {result.slots} slots, {result.rows} blocks, {result.whole} of them whole, "
        f"{result.orphans} orphans; {rough_size(result.bytes_read)} read in {seconds:.1f} s "
        f"({rate:.2f} GB/s)"
    )
    for note in result.notes:
        print(f"note: {note}")
    for problem in result.problems:
        print(f"problem ({problem.kind}): {problem.text}")
    total = sum(result.counts.values())
    if total > len(result.problems):
        print(f"... and {total - len(result.problems)} more")
    if result.removed_rows:
        print(f"mended: {result.removed_rows} rows removed")
    if result.rebuilt_rows:
        print(f"mended: an index of {result.rebuilt_rows} blocks was made from the records")
    print(_summary(result))


def _summary(result: CheckResult) -> str:
    if result.is_clean:
        return "clean" if result.payloads_verified else "clean, as far as that goes without the key"
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(result.counts.items()))
    return f"{sum(result.counts.values())} problems: {kinds}"
