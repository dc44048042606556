# SPDX-License-Identifier: Apache-2.0
"""StrataKV's tiers for vLLM. Two classes put them below vLLM's own KV offloading
(`spec_module_path` and `module_path`):

    StrataSpec   vLLM's region in memory, the tiers below it, and on vLLM's CPU build the copies too
    StrataTier   the tiers alone, one of the `secondary_tiers` of vLLM's TieringOffloadingSpec

A third class replaces vLLM's KV offloading (set by `kv_connector_module_path`):

    StrataConnector    a KV connector between vLLM's KV cache and StrataKV's slab

docs/vllm.md describes when and how to use each class. The first use of a class imports vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .kv_connector.connector import StrataConnector
    from .spec import StrataSpec
    from .tier import StrataTier

__all__ = ["StrataConnector", "StrataSpec", "StrataTier"]


def __getattr__(name: str) -> Any:
    if name == "StrataSpec":
        from .spec import StrataSpec

        return StrataSpec
    if name == "StrataTier":
        from .tier import StrataTier

        return StrataTier
    if name == "StrataConnector":
        from .kv_connector.connector import StrataConnector

        return StrataConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
