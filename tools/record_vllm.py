# SPDX-License-Identifier: Apache-2.0
"""Records vLLM's interfaces for offloading and KV connectors, for tests that run without vLLM.

    python tools/record_vllm.py WHEEL_OR_SITE_PACKAGES ...

The tool reads the source code in a wheel or an installation and imports nothing. For each wheel or
installation it writes tests/connector/vllm/signatures/VERSION.json with each class's bases, methods
with their parameters, fields, and the attributes that its constructor sets."""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "tests" / "connector" / "vllm" / "signatures"

OFFLOAD = "vllm/v1/kv_offload/"
CONNECTOR = "vllm/distributed/kv_transfer/kv_connector/v1/"
CLASSES = {
    OFFLOAD + "base.py": (
        "ReqContext", "LookupResult", "Medium", "RequestOffloadingContext", "ScheduleEndContext",
        "BlockIDsLoadStoreSpec", "GPULoadStoreSpec", "CanonicalKVCaches", "CanonicalKVCacheTensor",
        "CanonicalKVCacheRef", "TransferResult", "OffloadingWorker", "OffloadingSpec",
        "OffloadingMetricMetadata", "OffloadingCounterMetadata", "OffloadingGaugeMetadata",
    ),
    OFFLOAD + "config.py": (
        "OffloadingGroupConfig", "OffloadingModelConfig", "OffloadingCacheConfig",
        "OffloadingParallelConfig", "OffloadingConfig",
    ),
    OFFLOAD + "cpu/spec.py": ("CPUOffloadingSpec",),
    OFFLOAD + "cpu/shared_offload_region.py": ("SharedOffloadRegion",),
    OFFLOAD + "tiering/base.py": ("TransferJob", "JobResult", "SecondaryTierManager"),
    OFFLOAD + "tiering/spec.py": ("TieringOffloadingSpec",),
    CONNECTOR + "offloading/metrics.py": ("OffloadingConnectorStats",),
}  # fmt: skip
# Classes for a KV connector: classes that the adapter inherits from, and classes that it reads.
CONNECTOR_CLASSES = {
    CONNECTOR + "base.py": (
        "KVConnectorBase_V1", "SupportsHMA", "KVConnectorRole", "KVConnectorMetadata",
        "KVConnectorWorkerMetadata", "KVConnectorTransferResults",
    ),
    CONNECTOR + "metrics.py": ("KVConnectorStats", "KVConnectorPromMetrics"),
    "vllm/v1/core/block_pool.py": ("BlockPool",),
    "vllm/v1/core/kv_cache_utils.py": ("KVCacheBlock", "FreeKVCacheBlockQueue"),
    "vllm/v1/core/sched/output.py": ("SchedulerOutput", "NewRequestData", "CachedRequestData"),
    "vllm/v1/kv_cache_interface.py": (
        "KVCacheConfig", "KVCacheGroupSpec", "KVCacheTensor", "KVCacheSpec", "FullAttentionSpec",
        "SinkFullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MambaSpec",
    ),
    "vllm/v1/outputs.py": ("KVConnectorOutput",),
    "vllm/v1/request.py": ("Request",),
    "vllm/config/kv_transfer.py": ("KVTransferConfig",),
    "vllm/distributed/kv_events.py": ("BlockStored", "BlockRemoved"),
    "vllm/v1/metrics/cache_hit_source.py": ("CacheHitSource",),
}  # fmt: skip
# Files that older versions of vLLM do not have.
NEW = ("vllm/v1/metrics/cache_hit_source.py",)
# Classes of which the adapter reads only fields.
READ_ONLY = (
    "KVCacheConfig", "KVConnectorOutput", "KVTransferConfig", "Request", "FullAttentionSpec",
    "SinkFullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec",
)  # fmt: skip
INIT = "__init__"
# Module → names of the module that the adapter reads.
NAMES = {"vllm/v1/core/kv_cache_utils.py": ("_NONE_HASH_SEED", "DEFAULT_NONE_HASH_SEED")}
# The calls with which vLLM passes a job to a tier; their keywords are recorded.
CALLS = {OFFLOAD + "tiering/factory.py": "tier_cls", OFFLOAD + "tiering/manager.py": "TransferJob"}


def record(source: Callable[[str], str], version: str, origin: str) -> dict[str, Any]:
    """Return the record of one version of vLLM. `source` returns the text of a file."""
    return {
        "version": version,
        "taken_from": origin,
        "classes": _classes(source, CLASSES),
        "connector_classes": _classes(source, CONNECTOR_CLASSES),
        "names": {
            path[:-3].replace("/", "."): sorted(_assigned(ast.parse(source(path)), names))
            for path, names in NAMES.items()
        },
        "calls": {name: _keywords(ast.parse(source(path)), name) for path, name in CALLS.items()},
    }


def _classes(source: Callable[[str], str], wanted: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for path, names in wanted.items():
        try:
            text = source(path)
        except (KeyError, FileNotFoundError):
            if path not in NEW:
                raise
            continue
        found = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
        for name in names:
            made[name] = {"module": path[:-3].replace("/", "."), **_class(found[name])}
            methods = made[name]["methods"]
            if name in READ_ONLY:
                made[name]["methods"] = {each: methods[each] for each in methods.keys() & {INIT}}
    return made


def _class(node: ast.ClassDef) -> dict[str, Any]:
    methods: dict[str, Any] = {}
    fields: dict[str, bool] = {}
    attributes: set[str] = set()
    for each in node.body:
        if isinstance(each, ast.FunctionDef):
            decorators = {ast.unparse(d).rpartition(".")[2] for d in each.decorator_list}
            methods[each.name] = {
                "parameters": _parameters(each.args),
                "is_abstract": "abstractmethod" in decorators,
                "kind": next((d for d in ("classmethod", "property") if d in decorators), ""),
            }
            if each.name == "__init__":
                attributes = {
                    target.attr
                    for target in ast.walk(each)
                    if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
                }
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            fields[each.target.id] = each.value is not None
        elif isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
            fields[each.targets[0].id] = True
    return {
        "bases": [ast.unparse(base) for base in node.bases],
        "methods": methods,
        "fields": fields,
        "attributes": sorted(attributes),
    }


def _parameters(args: ast.arguments) -> list[list[Any]]:
    """Return name and kind of each parameter after the first, and whether it has a default."""
    positional = [*args.posonlyargs, *args.args]
    first_default = len(positional) - len(args.defaults)
    made: list[list[Any]] = [
        [each.arg, "positional", i >= first_default] for i, each in enumerate(positional)
    ][1:]
    if args.vararg is not None:
        made.append([args.vararg.arg, "rest", True])
    for each, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        made.append([each.arg, "keyword", default is not None])
    if args.kwarg is not None:
        made.append([args.kwarg.arg, "keywords", True])
    return made


def _assigned(tree: ast.Module, names: tuple[str, ...]) -> set[str]:
    targets = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return targets & set(names)


def _keywords(tree: ast.Module, name: str) -> list[list[str]]:
    return [
        [keyword.arg or "**" for keyword in node.keywords]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name
    ]


def _open(place: Path) -> tuple[Callable[[str], str], str]:
    """Return a reader of vLLM's files in `place`, and the version of vLLM."""
    if place.suffix == ".whl":
        wheel = zipfile.ZipFile(place)
        version = place.name.split("-")[1]
        return lambda path: wheel.read(path).decode(), version
    found = sorted(place.glob("vllm*.dist-info"))
    match = re.search(r"-(\d[^-]*)\.dist-info", found[0].name) if found else None
    if match is None:
        raise SystemExit(f"{place} is neither a wheel of vLLM nor a folder with one installed")
    return lambda path: (place / path).read_text(), match[1]


def main() -> None:
    """Record vLLM in each wheel or folder of the command line."""
    if not sys.argv[1:]:
        raise SystemExit(__doc__)
    OUT.mkdir(parents=True, exist_ok=True)
    for place in map(Path, sys.argv[1:]):
        source, version = _open(place)
        origin = place.name if place.suffix == ".whl" else "an installation"
        path = OUT / f"{version}.json"
        path.write_text(json.dumps(record(source, version, origin), indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
