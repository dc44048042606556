# SPDX-License-Identifier: Apache-2.0
"""The engine: request queue, scheduler, model worker, sampler and API servers. Only `engine/cli`
may import `benchmarks`.

`LLM` and `SamplingParams` are the Python API. Both are imported at their first use, so that
importing a small part of this package does not import torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .config.optional_packages import explain_missing_module

if TYPE_CHECKING:
    from .llm import LLM
    from .offline.outputs import BeamSearchOutput, CompletionOutput, RequestOutput
    from .request.beam_params import BeamSearchParams
    from .request.sampling_params import SamplingParams
    from .request.structured_params import StructuredOutputsParams

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_HOMES = {
    "LLM": ".llm",
    "BeamSearchOutput": ".offline.outputs",
    "BeamSearchParams": ".request.beam_params",
    "CompletionOutput": ".offline.outputs",
    "RequestOutput": ".offline.outputs",
    "SamplingParams": ".request.sampling_params",
    "StructuredOutputsParams": ".request.structured_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(_HOMES[name], __name__)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(explain_missing_module(error), name=error.name) from error
    return getattr(module, name)
