# SPDX-License-Identifier: Apache-2.0
"""StrataKV's tiers as the storage of SGLang's HiCache, for `module_path` of its `dynamic` back end.

    StrataHiCacheStorage   SSD and cache servers below SGLang's host memory

docs/sglang.md describes the configuration. The first use of the class imports SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .storage import StrataHiCacheStorage

__all__ = ["StrataHiCacheStorage"]


def __getattr__(name: str) -> Any:
    if name != "StrataHiCacheStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .storage import StrataHiCacheStorage
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "sglang":
            raise
        raise ImportError(
            "StrataHiCacheStorage is a back end of SGLang, which is not installed here; install "
            "StrataKV where SGLang runs"
        ) from error
    return StrataHiCacheStorage
