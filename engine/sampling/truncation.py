# SPDX-License-Identifier: Apache-2.0
"""Top-k and top-p: find the logits of a row that random sampling leaves out.

Tokens whose logit equals the smallest kept logit are kept too, so the order of equal logits has no
effect."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..batch.batch_update import IntArray
from .copies import to_device

# The first number of candidates for top-p; if top-p needs more, the whole vocabulary is sorted.
FIRST_CANDIDATES = 256
# The largest top-k for which a row is drawn without a pass over the logits that top-k leaves out.
MOST_FEW = 1024

_LOG2_E = math.log2(math.e)

FloatArray = npt.NDArray[np.float64]


def truncate(
    scaled: Tensor, top_k: IntArray, top_p: FloatArray, *, all_candidates: bool = False
) -> Tensor | None:
    """Set to -inf, in place, the logits that top-k leaves out, and then the remaining logits that
    top-p leaves out.

    `scaled` is `[rows, vocab]`. A `top_k` of the vocabulary's size keeps all logits, and so does a
    `top_p` of 1. On the CPU the function checks whether the first candidates were enough, finishes
    all rows, and returns None. On other devices this check would wait for the device, so the
    function returns a bool `[rows]`, True for rows to truncate again with `all_candidates`, or None
    if every row is done."""
    limited = np.flatnonzero((top_k < scaled.shape[1]) | (top_p < 1.0))
    if len(limited) == 0:
        return None
    if len(limited) == len(scaled):
        cutoff, is_short = _cutoff(scaled, top_k, top_p, all_candidates)
        scaled.masked_fill_(scaled < cutoff, -torch.inf)
        return is_short
    index = to_device(limited, scaled.device)
    part = scaled[index]
    cutoff, is_short = _cutoff(part, top_k[limited], top_p[limited], all_candidates)
    scaled[index] = part.masked_fill_(part < cutoff, -torch.inf)
    if is_short is None:
        return None
    return torch.zeros(len(scaled), dtype=torch.bool, device=scaled.device).index_copy_(
        0, index, is_short
    )


def leaves_few(top_k: IntArray, vocab_size: int, device: torch.device) -> bool:
    """Whether `draw_among_few` can sample rows with these `top_k`: on the CPU, if all are small."""
    return is_free_to_look(device) and bool((top_k <= min(MOST_FEW, vocab_size - 1)).all())


def draw_among_few(
    scaled: Tensor, top_k: IntArray, top_p: FloatArray, numbers: FloatArray
) -> npt.NDArray[np.int64]:
    """Sample a token for each row of `scaled` `[rows, vocab]`, by the row's number in [0, 1), among
    the logits that top-k and top-p keep. Sampling from the whole row gives the same token, because
    the other logits add 0 to every sum. Rows that are not finite get token 0."""
    cutoff, _ = _cutoff(scaled, top_k, top_p, False)
    num_rows, vocab = scaled.shape
    places = np.flatnonzero((scaled >= cutoff).numpy())
    row, tokens = np.divmod(places, vocab)
    counts = np.bincount(row, minlength=num_rows)
    ends = counts.cumsum()
    starts = ends - counts
    shares = exp_(scaled.reshape(-1)[torch.from_numpy(places)]).numpy()
    sums = np.zeros((num_rows, max(1, counts.max(initial=0))))
    sums[row, np.arange(len(places)) - starts[row]] = shares
    sums.cumsum(axis=1, out=sums)
    total = sums[:, -1]
    # The target stays below the total even if the product was rounded up.
    target = np.minimum(numbers * total, np.nextafter(total, 0.0))
    at = np.minimum((sums <= target[:, None]).sum(axis=1), np.maximum(counts, 1) - 1)
    chosen = np.zeros(num_rows, np.int64)
    has_any = counts > 0
    chosen[has_any] = tokens[(starts + at)[has_any]]
    return chosen


def _cutoff(
    scaled: Tensor, top_k: IntArray, top_p: FloatArray, all_candidates: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the smallest kept logit of each row, `[rows, 1]`, and a bool `[rows]`, True for rows
    with too few candidates to find that logit. If all rows have enough, None replaces the bools."""
    vocab, device = scaled.shape[1], scaled.device
    has_k, has_p = top_k < vocab, top_p < 1.0
    by_share_alone = has_p & ~has_k
    width = int(top_k[has_k].max()) if has_k.any() else 1
    # In rows with top-k, top-p needs only the candidates that top-k keeps.
    if by_share_alone.any():
        width = vocab if all_candidates else max(width, FIRST_CANDIDATES)
    width = min(vocab, width)
    no_k = to_device(~has_k[:, None], device)
    share = to_device(top_p, device)
    while True:
        found = scaled.topk(min(vocab, width + 1), dim=-1).values  # descending
        best = found[:, :width]
        kth = best.gather(1, to_device(np.minimum(top_k, width)[:, None] - 1, device))
        kth.masked_fill_(no_k, -torch.inf)
        if not has_p.any():
            return kth, None
        sums = exp_(best.masked_fill(best < kth, -torch.inf)).cumsum(-1, dtype=torch.float64)
        # Candidates that are all the tokens of top-k have the whole sum.
        is_whole = ~no_k[:, 0]
        if width < vocab:
            beyond = found[:, -1]
            is_whole = is_whole & ((beyond < kth[:, 0]) | (beyond == -torch.inf))
        total = sums[:, -1]
        if not (is_free_to_look(device) and bool(is_whole.all())):
            total = torch.where(is_whole, total, _sum_of(scaled, kth))
        # Top-p keeps the fewest best tokens whose sum reaches the share: `count` tokens and one
        # more.
        count = (sums < (share * total)[:, None]).sum(dim=-1)
        is_short = None
        if width < vocab and by_share_alone.any():
            is_short = (count >= width) & to_device(by_share_alone, device)
        if is_short is None or not is_free_to_look(device) or not bool(is_short.any()):
            break
        width = vocab
    pth = best.gather(1, count.clamp(max=width - 1)[:, None])
    pth.masked_fill_(to_device(~has_p[:, None], device), -torch.inf)
    return torch.maximum(kth, pth), None if is_free_to_look(device) else is_short


def _sum_of(scaled: Tensor, kth: Tensor) -> Tensor:
    return exp_(scaled.masked_fill(scaled < kth, -torch.inf)).sum(-1, dtype=torch.float64)


def exp_(logits: Tensor) -> Tensor:
    """Replace the logits by e to their power, in place. The function uses powers of 2, because
    torch's `exp` on the CPU takes 4 times as long for -inf, and 25 times as long for results near 0
    (most results)."""
    return logits.mul_(_LOG2_E).exp2_()


def is_free_to_look(device: torch.device) -> bool:
    """Whether results can be read without a wait for the device, as on the CPU."""
    return device.type == "cpu"
