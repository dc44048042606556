# SPDX-License-Identifier: Apache-2.0
"""StrataKV's tiers below vLLM's own KV offloading: what `spec_module_path` and `module_path` of its
configuration name.

    StrataSpec   the whole: vLLM's region in memory, the tiers below it, and on vLLM's CPU build the
                 copies too
    StrataTier   the tiers alone, one of the `secondary_tiers` of vLLM's TieringOffloadingSpec

docs/vllm.md says how to switch them on. Both are imported when they are first named, since that
imports vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .spec import StrataSpec
    from .tier import StrataTier

__all__ = ["StrataSpec", "StrataTier"]


def __getattr__(name: str) -> Any:
    if name == "StrataSpec":
        from .spec import StrataSpec

        return StrataSpec
    if name == "StrataTier":
        from .tier import StrataTier

        return StrataTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
