# SPDX-License-Identifier: Apache-2.0
"""Chooses one token for each row of logits: greedy and random rows in one batch.

    raw log-probabilities ─► bans, biases, penalties ─► greedy choice ─► temperature ─► min-p
                                                            ─► top-k, top-p ─► draw

Random rows are drawn by inverting the cumulative distribution in the order of the vocabulary, with
one uniform number each. A seeded row's number is a hash of its seed and of how many tokens it has,
so it needs no generator state: it is the same whatever else is in the batch, and after preemption.
Top-k and top-p keep every token whose logit equals the last one kept, so the order in which equal
logits happen to be sorted changes nothing.

Knows nothing of requests or models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..logprobs import PositionLogprobs
from ..worker.batch_update import BatchUpdate
from ..worker.block_table import IntArray
from .logprobs import position_logprobs, raw_logprobs
from .processors.base import ProcessorContext
from .processors.processor_set import ProcessorSet
from .row_parts import row_parts
from .rows import NO_LOGPROBS, SamplingRows

# Top-p rarely needs more candidates; where it does, the whole vocabulary is sorted.
FIRST_CANDIDATES = 256

_MASK_64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Sampled:
    """In the order of the rows asked for. Where `is_finite` is False the token means nothing: the
    model's logits were not finite, or the request's own wishes left no token to choose."""

    token_ids: list[int]
    is_finite: list[bool]
    logprobs: list[PositionLogprobs | None] | None = None  # None: not asked for


class Sampler:
    """The sampler of one batch; `update` it with every BatchUpdate before sampling."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        *,
        seed: int | None = None,
    ) -> None:
        """`seed` fixes the draws of requests that bring no seed of their own; for tests."""
        self._rows = SamplingRows(max_rows, vocab_size)
        self._processors = ProcessorSet.built_in(
            ProcessorContext(max_rows, vocab_size, eos_token_ids)
        )
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def update(self, update: BatchUpdate) -> None:
        self._rows.update(update)
        self._processors.update_state(update)

    def sample(self, logits: Tensor, rows: IntArray) -> Sampled:
        """One token for each row of `logits` `[len(rows), vocab]`, which belong to these rows of
        the batch. The logits are overwritten where a request changes them."""
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        # A sum is finite only where every term is; one pass, and no temporary of the same size.
        is_finite = torch.isfinite(logits.sum(dim=-1))
        asked = np.flatnonzero(self._rows.num_logprobs[rows] != NO_LOGPROBS)
        raw = raw_logprobs(_take(logits, asked)) if len(asked) else None  # a copy: they may change
        logits = self._processors.before_choice(logits, rows)
        best = logits.max(dim=-1)
        is_finite &= torch.isfinite(best.values)
        chosen = best.indices
        random = np.flatnonzero(self._rows.temperature[rows] > 0.0)
        numbers = self._uniform(rows[random])
        for part in row_parts(len(random), logits.shape[1]):
            index = torch.from_numpy(random[part])
            from_best = logits[index].sub_(best.values[index, None])
            chosen[index] = self._draw(from_best, numbers[part], rows[random[part]])
        logprobs = None if raw is None else self._logprobs(raw, chosen, asked, rows)
        return Sampled(chosen.tolist(), is_finite.tolist(), logprobs)

    def _logprobs(
        self, raw: Tensor, chosen: Tensor, asked: IntArray, rows: IntArray
    ) -> list[PositionLogprobs | None]:
        """An entry for each of `rows`; `raw` belongs to those at the indices `asked`."""
        counts = self._rows.num_logprobs[rows[asked]].tolist()
        found = position_logprobs(raw, chosen[torch.from_numpy(asked)], counts)
        entries: list[PositionLogprobs | None] = [None] * len(rows)
        for index, entry in zip(asked.tolist(), found, strict=True):
            entries[index] = entry
        return entries

    def _draw(self, from_best: Tensor, numbers: Tensor, rows: IntArray) -> Tensor:
        """Random tokens by uniform `numbers`; overwrites `from_best`, the logits less the highest
        of each row, so that no small temperature can overflow. No row has a temperature of 0."""
        temperatures = torch.from_numpy(self._rows.temperature[rows])[:, None]
        scaled = from_best.div_(temperatures.to(from_best.dtype))
        scaled = self._processors.after_temperature(scaled, rows)
        self._truncate(scaled, rows)
        sums = scaled.exp_().cumsum(dim=-1, dtype=torch.float64)
        total = sums[:, -1:]
        target = numbers[:, None] * total
        # Below the total even where the product was rounded up, so the answer is always a token
        # with a probability above zero.
        target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
        tokens = torch.searchsorted(sums, target, right=True)[:, 0]
        return tokens.clamp_(max=sums.shape[1] - 1)  # only rows that are not finite get there

    def _uniform(self, rows: IntArray) -> Tensor:
        """One number in [0, 1) for each row, float64."""
        numbers = torch.rand(len(rows), dtype=torch.float64, generator=self._generator)
        for index, seeded in self._rows.seeded.of(rows):
            numbers[index] = uniform_of(seeded.seed, len(seeded.output_token_ids))
        return numbers

    def _truncate(self, scaled: Tensor, rows: IntArray) -> None:
        """Set to -inf what top-k and top-p leave out."""
        top_k, top_p = self._rows.top_k[rows], self._rows.top_p[rows]
        limited = np.flatnonzero((top_k < scaled.shape[1]) | (top_p < 1.0))
        if len(limited) == 0:
            return
        index = torch.from_numpy(limited)
        part = scaled[index]
        cutoff = _cutoff(part, torch.from_numpy(top_k[limited]), torch.from_numpy(top_p[limited]))
        scaled[index] = part.masked_fill_(part < cutoff, -torch.inf)


def _take(logits: Tensor, indices: IntArray) -> Tensor:
    """These rows; not a copy where they are all."""
    return logits if len(indices) == len(logits) else logits[torch.from_numpy(indices)]


def _cutoff(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest logit kept in each row, `[rows, 1]`: top-k first, then top-p over what is left.

    `scaled` is `[rows, vocab]`; a `top_k` of the vocabulary's size keeps all, and so does a
    `top_p` of 1.
    """
    vocab = scaled.shape[1]
    has_k, has_p = top_k < vocab, top_p < 1.0
    width = int(top_k[has_k].max()) if bool(has_k.any()) else 1
    # Where top-k limits a row too, top-p needs no more candidates than top-k leaves.
    width = min(vocab, max(width, FIRST_CANDIDATES if bool((has_p & ~has_k).any()) else 1))
    while True:
        best = scaled.topk(width, dim=-1).values  # descending
        kth = best.gather(1, (top_k.clamp(max=width) - 1)[:, None])
        kth.masked_fill_(~has_k[:, None], -torch.inf)
        if not bool(has_p.any()):
            return kth
        total = scaled.masked_fill(scaled < kth, -torch.inf).exp_().sum(-1, dtype=torch.float64)
        sums = best.masked_fill(best < kth, -torch.inf).exp_().cumsum(-1, dtype=torch.float64)
        # Kept are the first tokens whose sum reaches the share, so the last has `count` before it.
        count = (sums < (top_p * total)[:, None]).sum(dim=-1)
        if width == vocab or bool((count[has_p & ~has_k] < width).all()):
            break
        width = vocab
    pth = best.gather(1, count.clamp(max=width - 1)[:, None])
    pth.masked_fill_(~has_p[:, None], -torch.inf)
    return torch.maximum(kth, pth)


def uniform_of(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on both arguments only."""
    mixed = _mix((_mix(seed & _MASK_64) + position * _GOLDEN) & _MASK_64)
    return (mixed >> 11) * 2.0**-53


def _mix(x: int) -> int:
    """A bijection of 64-bit numbers in which every input bit moves about half the output bits
    (the finaliser of SplitMix64)."""
    x = (x + _GOLDEN) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)
