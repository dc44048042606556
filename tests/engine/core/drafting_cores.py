# SPDX-License-Identifier: Apache-2.0
"""Cores with a model that drafts, and prompts for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.request.core_messages import AddRequest

from ...tiny_models import make_model
from .conftest import VOCAB, config_of, prompt_of, request

DRAFTS = {"num_speculative_tokens": 5, "speculative_adaptive": False}
WINDOW = 21
# Models whose layers see everything, windows, or both.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {}),
    "windows": ("mistral", {"sliding_window": WINDOW}),
    "both": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW,
                       "max_window_layers": 1}),
}  # fmt: skip


def make_kind(folder: Path, name: str) -> Path:
    """Save a model of one of KINDS."""
    kind, options = KINDS[name]
    return make_model(folder, kind, 3, vocab_size=VOCAB, **options)


@contextmanager
def core_with(
    model: Path,
    draft: Path | None,
    *,
    depth: int = 1,
    kernel_block_size: int | None = None,
    **options: Any,
) -> Iterator[EngineCore]:
    given = {} if draft is None else {"speculative_model": str(draft), **DRAFTS}
    config = config_of(model, **{**given, **options})
    config = replace(config, cache=replace(config.cache, kernel_block_size=kernel_block_size))
    core = EngineCore(config, max_steps_in_flight=depth)
    try:
        yield core
        assert core.scheduler.manager.pool.is_idle
    finally:
        core.shutdown(5.0)


def asked_of(tag: str) -> list[AddRequest]:
    """Prompts of one block to six, two of them with a common beginning."""
    root = prompt_of(48)
    prompts = [root, root[:32] + prompt_of(9, 1), prompt_of(5, 2), prompt_of(23, 3)]
    return [request(f"{tag}{i}", each, max_tokens=24 + i) for i, each in enumerate(prompts)]
