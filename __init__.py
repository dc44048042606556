# SPDX-License-Identifier: Apache-2.0
"""StrataKV: a tiered KV cache for LLM serving: GPU, then CPU memory, NVMe and network.

    from stratakv import LLM, SamplingParams

The Python API is imported when a name of it is first used. So `import stratakv` costs nothing and
needs no optional package; the tiers and the cache server run without torch. The repository root is
this package.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import (
        LLM,
        BeamSearchOutput,
        BeamSearchParams,
        CompletionOutput,
        RequestOutput,
        SamplingParams,
        StructuredOutputsParams,
    )

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import engine

    return getattr(engine, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _MovedModules:
    """Finds no module, but says where one lies that the redesign of 2026-11-28 has moved. Until
    0.1.0 (docs/moves.md)."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        package, _, module = name.partition(".")
        if package != __name__ or not module:
            return
        import json
        from pathlib import Path

        moved = json.loads((Path(__file__).parent / "engine" / "moved_modules.json").read_bytes())
        if module in moved:
            message = f"{name} is {package}.{moved[module]} now (docs/moves.md)"
            raise ModuleNotFoundError(message, name=name)


sys.meta_path.append(_MovedModules)  # asked where no other finds a module
