# SPDX-License-Identifier: Apache-2.0
"""Records the plug-in interfaces of LMCache and SGLang, for tests without LMCache and SGLang.

    python tools/record_hosts.py WHEEL_OR_SITE_PACKAGES ...

The tool reads the source code in a wheel or an installation and imports nothing. For each host it
writes tests/connector/HOST/signatures/VERSION.json with each class's bases, methods with their
parameters, and fields."""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests" / "connector"

L2 = "lmcache/v1/distributed/"
HICACHE = "sglang/srt/mem_cache/"
CLASSES = {
    "lmcache": {
        "lmcache/lmcache_native.pyi": ("Bitmap",),
        L2 + "api.py": ("ObjectKey", "MemoryLayoutDesc"),
        L2 + "internal_api.py": ("L2StoreResult",),
        L2 + "l2_adapters/base.py": ("AdapterUsage", "L2AdapterInterface"),
        "lmcache/v1/memory_management.py": ("MemoryObj", "MemoryObjMetadata"),
    },
    "sglang": {
        HICACHE + "hicache_storage.py": (
            "HiCacheStorage", "HiCacheStorageConfig", "HiCacheStorageExtraInfo",
        ),
        HICACHE + "pool_host/base.py": ("HostKVCache",),
    },
}  # fmt: skip
# The call with which the host constructs the plug-in; its arguments are recorded.
CALLS = {
    "lmcache": {L2 + "l2_adapters/plugin_l2_adapter.py": "adapter_cls"},
    "sglang": {HICACHE + "storage/backend_factory.py": "backend_class"},
}

Source = Callable[[str], str]


def record(host: str, source: Source, version: str, origin: str) -> dict[str, Any]:
    """Return the record of one host. `source` returns the text of a file of the host."""
    classes: dict[str, Any] = {}
    for path, names in CLASSES[host].items():
        found = {
            node.name: node
            for node in ast.parse(source(path)).body
            if isinstance(node, ast.ClassDef)
        }
        module = path.rpartition(".")[0].replace("/", ".")
        for name in names:
            classes[name] = {"module": module, **_class(found[name])}
    return {
        "host": host,
        "version": version,
        "taken_from": origin,
        "classes": classes,
        "calls": {
            name: _arguments(ast.parse(source(path)), name) for path, name in CALLS[host].items()
        },
    }


def _class(node: ast.ClassDef) -> dict[str, Any]:
    methods: dict[str, Any] = {}
    fields: dict[str, bool] = {}
    for each in node.body:
        if isinstance(each, ast.FunctionDef):
            decorators = {ast.unparse(d).rpartition(".")[2] for d in each.decorator_list}
            methods[each.name] = {
                "parameters": _parameters(each.args),
                "is_abstract": "abstractmethod" in decorators,
                "is_property": "property" in decorators,
            }
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            fields[each.target.id] = each.value is not None
    return {
        "bases": [ast.unparse(base) for base in node.bases],
        "methods": methods,
        "fields": fields,
    }


def _parameters(args: ast.arguments) -> list[list[Any]]:
    """Return the name of each parameter after the first, and whether it has a default."""
    positional = [*args.posonlyargs, *args.args]
    first_default = len(positional) - len(args.defaults)
    made: list[list[Any]] = [[each.arg, i >= first_default] for i, each in enumerate(positional)]
    made = made[1:]
    if args.vararg is not None:
        made.append(["*" + args.vararg.arg, True])
    for each, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        made.append([each.arg, default is not None])
    if args.kwarg is not None:
        made.append(["**" + args.kwarg.arg, True])
    return made


def _arguments(tree: ast.Module, name: str) -> list[list[str]]:
    return [
        [*map(ast.unparse, node.args), *(f"{each.arg or '**'}=" for each in node.keywords)]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name
    ]


def _open(host: str, place: Path) -> tuple[Source, str] | None:
    """Return a reader of the host's files in `place`, and its version; None without the host."""
    if place.suffix == ".whl":
        if not place.name.startswith(host + "-"):
            return None
        wheel = zipfile.ZipFile(place)
        return lambda path: wheel.read(path).decode(), place.name.split("-")[1]
    found = sorted(place.glob(f"{host}-*.dist-info"))
    match = re.search(r"-(\d[^-]*)\.dist-info", found[0].name) if found else None
    return None if match is None else ((lambda path: (place / path).read_text()), match[1])


def main() -> None:
    """Record the hosts in each wheel or folder of the command line."""
    if not sys.argv[1:]:
        raise SystemExit(__doc__)
    for place in map(Path, sys.argv[1:]):
        found = {host: opened for host in CLASSES if (opened := _open(host, place))}
        if not found:
            raise SystemExit(f"{place} is no wheel of {' or '.join(CLASSES)}, and has none of them")
        for host, (source, version) in found.items():
            origin = place.name if place.suffix == ".whl" else "an installation"
            path = TESTS / host / "signatures" / f"{version}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record(host, source, version, origin), indent=1) + "\n")
            print(path)


if __name__ == "__main__":
    main()
