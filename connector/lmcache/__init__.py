# SPDX-License-Identifier: Apache-2.0
"""StrataKV's tiers as the L2 of LMCache's server, for `module_path` of its `--l2-adapter`.

    StrataL2Adapter   SSD and cache servers below LMCache's own memory

docs/lmcache.md describes the configuration. The first use of `StrataL2Adapter` imports LMCache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapter import StrataL2Adapter

__all__ = ["StrataL2Adapter"]


def __getattr__(name: str) -> Any:
    if name != "StrataL2Adapter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .adapter import StrataL2Adapter
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lmcache":
            raise
        raise ImportError(
            "StrataL2Adapter is a plug-in of LMCache, which is not installed here; install "
            "StrataKV where `lmcache server` runs"
        ) from error
    return StrataL2Adapter
