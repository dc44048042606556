# SPDX-License-Identifier: Apache-2.0
"""Makes proposers: `make_proposer` from the settings, `make_drafter` for a draft model."""

from __future__ import annotations

from collections.abc import Callable

from ...config.speculative_config import SpeculativeConfig
from ...models.decoder import Decoder
from ...models.dtypes import pool_dtype
from ...models.eagle.eagle_head import EagleHead
from ..forward.forward import StepForward
from ..input_batch import InputBatch
from ..kv_pool import ModelPages
from .draft_model import DraftModel
from .eagle import EagleDrafts
from .hidden_pages import HiddenPages
from .ngram import NgramProposer
from .proposer import Proposer
from .suffix import SuffixProposer


def make_proposer(config: SpeculativeConfig) -> Proposer | None:
    """Make the worker's proposer from the settings; None if the settings enable no drafts. If there
    is a draft model, `make_drafter` replaces it."""
    if not config.is_on:
        return None
    kind = SuffixProposer if config.method == "suffix" else NgramProposer
    return kind(config.prompt_lookup_min, config.prompt_lookup_max)


def make_drafter(
    model: Decoder,
    make: Callable[..., StepForward],
    batch: InputBatch,
    pages: ModelPages,
    *,
    vocab_size: int,
    max_tokens: int,
    dtype: str,
) -> Proposer:
    """Make the proposer for a draft model or an EAGLE head, which computes in type `dtype` over its
    part of the pool's pages. `make` makes the forward pass of a model over pages."""
    sizes = {"vocab_size": vocab_size, "max_tokens": max_tokens}
    if not isinstance(model, EagleHead):
        return DraftModel(model, make(model, pages, max_tokens=max_tokens), batch, pages, **sizes)
    num_layers = model.spec.num_layers
    own = pages._replace(places=pages.places[:num_layers])
    rest = pages._replace(places=pages.places[num_layers:])
    states = HiddenPages(rest, batch.tables, model.spec.hidden_size, pool_dtype(dtype))
    forward = make(model, own, max_tokens=max_tokens)
    return EagleDrafts(model, forward, batch, own, states, **sizes)
