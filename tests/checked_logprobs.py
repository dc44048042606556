# SPDX-License-Identifier: Apache-2.0
"""All log-probabilities that a request got, compared with one pass of transformers in float64."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch

from stratakv.engine.request.logprobs import PositionLogprobs, PromptLogprobs
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.sampling.logprob_tensors import LOGPROB_FLOOR

from .tiny_models import load_reference

# transformers rounds its norms to float32 in float64 models too, so it is the one that is off.
TOLERANCE = 1e-4


def check_logprobs(
    model: Path,
    prompt: Sequence[int],
    token_ids: Sequence[int],
    params: SamplingParams,
    logprobs: Sequence[PositionLogprobs],
    prompt_logprobs: PromptLogprobs | None,
    *,
    prompt_may_lack_numbers: bool = False,
) -> None:
    """`token_ids` are what came until now: all of them have an entry, and with the first of them
    the prompt, where `params` ask for it, and nothing has where not."""
    asks, asks_prompt = params.logprobs is not None, params.prompt_logprobs is not None
    assert len(logprobs) == (len(token_ids) if asks else 0)
    assert (prompt_logprobs is not None) == (asks_prompt and len(token_ids) > 0)
    if not logprobs and prompt_logprobs is None:
        return
    expected = _reference(model, (*prompt, *token_ids))
    if params.logprobs is not None:
        _check(logprobs, expected[len(prompt) - 1 : -1], token_ids, params.logprobs, False)
    if params.prompt_logprobs is not None and prompt_logprobs is not None:
        first, *entries = prompt_logprobs
        assert first is None
        before = expected[: len(prompt) - 1]
        _check(entries, before, prompt[1:], params.prompt_logprobs, prompt_may_lack_numbers)


@lru_cache(maxsize=1000)
@torch.inference_mode()
def _reference(model: Path, ids: tuple[int, ...]) -> torch.Tensor:
    """`[tokens, vocab]`; the same texts are asked for over and over."""
    return load_reference(model)(torch.tensor([ids])).logits[0].log_softmax(dim=-1)


def _check(
    entries: Sequence[PositionLogprobs | None],
    expected: torch.Tensor,
    token_ids: Sequence[int],
    count: int,
    may_lack_numbers: bool,
) -> None:
    """One entry for each token, with its own and the `count` best values of its row."""
    assert len(entries) == len(expected) == len(token_ids)
    best = expected.topk(count).indices.tolist()
    own = expected[torch.arange(len(expected)), torch.tensor(token_ids, dtype=torch.long)]
    ranks = (1 + (expected > own[:, None]).sum(dim=1)).tolist()
    rows = zip(entries, expected, token_ids, best, ranks, strict=True)
    for entry, row, token, others, rank in rows:
        assert entry is not None
        if may_lack_numbers and entry.logprobs[0] == LOGPROB_FLOOR:
            continue
        assert entry.token_ids == [token, *others]
        pairs = list(zip(entry.logprobs, row[entry.token_ids].tolist(), strict=True))
        assert all(abs(found - wanted) <= TOLERANCE for found, wanted in pairs), pairs
        assert entry.rank == rank
