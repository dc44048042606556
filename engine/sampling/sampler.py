# SPDX-License-Identifier: Apache-2.0
"""Samples one token for each row of logits; a batch may have greedy and random rows.

    raw log-probabilities ─► bans, biases, penalties, thinking budgets ─► greedy choice
                          ─► temperature ─► min-p ─► top-k, top-p ─► draw

Random rows are sampled by inverting the cumulative distribution in the order of the vocabulary,
with one uniform number for each row. A seeded row's number is a hash of the seed and the number of
output tokens, draft tokens before the row included. So a seeded row needs no generator state, and
does not depend on other requests or on preemption. The logits stay on the device that computed
them. Parameters are copied to the device, and all results are copied to the host together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..batch.batch_update import BatchUpdate, IntArray
from ..request.logprobs import PositionLogprobs
from .copies import HostCopies, begin_to_host, to_device
from .logprob_tensors import position_entries, position_tensors, raw_logprobs
from .processor_loading import LoadedProcessor
from .processor_set import LogitsRows, ProcessorSet
from .processors.base import Drafts, ProcessorContext
from .row_states import NO_LOGPROBS, SamplingRows, row_parts
from .token_mask import TokenMask
from .truncation import draw_among_few, exp_, leaves_few, truncate

NO_NUMBERS: npt.NDArray[np.float64] = np.zeros(0)
_MASK_64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15

_NONE_SHORT: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)

# On the CPU torch finds the highest of many values four times as fast as the index of this value.
_HIGHEST_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Sampled:
    """The results of sampling, in the order of the rows. A token is invalid if `is_finite` is False
    (the model's logits were not finite) or `has_choice` is False (the request's own parameters ban
    every token)."""

    token_ids: list[int]
    is_finite: list[bool]
    has_choice: list[bool]
    # Error texts of rows whose logits processor raised, by index; their tokens are invalid.
    failures: dict[int, str]
    logprobs: list[PositionLogprobs | None] | None = None  # None: no row needs them


class Sampler:
    """The sampler of one batch. `apply_batch_update` must get every BatchUpdate before sampling."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        processors: Sequence[LoadedProcessor] = (),
        *,
        seed: int | None = None,
    ) -> None:
        """`processors` are the processors of other packages. `seed`, for tests, fixes the random
        numbers of requests without a seed. Raises ConfigError if a processor cannot be made."""
        self._rows = SamplingRows(max_rows, vocab_size)
        self._processors = ProcessorSet.built_in(
            ProcessorContext(max_rows, vocab_size, eos_token_ids), processors
        )
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def apply_batch_update(self, update: BatchUpdate) -> None:
        self._rows.apply_batch_update(update)
        self._processors.update_state(update)

    def failures(self, rows: IntArray) -> dict[int, str]:
        """Return the error texts of requests that must end, by index; see
        `ProcessorSet.failures`."""
        return self._processors.failures(rows)

    def tells_logprobs(self, rows: IntArray) -> bool:
        """Whether any of `rows` needs log-probabilities. If not, only the logits of tokens that a
        mask allows are needed."""
        return bool((self._rows.num_logprobs[rows] != NO_LOGPROBS).any())

    def take_drafts(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """Return, for each of `rows`, whether it may have draft tokens; `sample` refuses draft
        tokens in other rows."""
        return self._processors.take_drafts(rows)

    def sample(
        self,
        logits: Tensor,
        rows: IntArray,
        mask: TokenMask | None = None,
        masked: Sequence[int] = (),
        *,
        offsets: IntArray | None = None,
        drafts: Drafts | None = None,
    ) -> Sampled:
        """Sample a token for each row of `logits` `[len(rows), vocab]`. `rows` are the batch rows
        of the logits, and `masked` the indices of rows that `mask` restricts. `offsets` and
        `drafts` are as in `LogitsProcessor.apply`: a row after draft tokens gets the token that its
        request would get after these drafts. Overwrites logits that a request changes. Waits for
        the device once, for the result, or twice in the rare step in which top-p needs more
        candidates. Raises ValueError for offsets and drafts that do not fit."""
        return self.sample_async(logits, rows, mask, masked, offsets=offsets, drafts=drafts).wait()

    def sample_async(
        self,
        logits: Tensor,
        rows: IntArray,
        mask: TokenMask | None = None,
        masked: Sequence[int] = (),
        *,
        offsets: IntArray | None = None,
        drafts: Drafts | None = None,
    ) -> Choice:
        """Do the same as `sample`, but do not wait for the device."""
        belongs = LogitsRows(rows)
        if offsets is not None:
            belongs = LogitsRows(rows, offsets, () if drafts is None else drafts)
            _check_drafts(belongs)
            if not (self.take_drafts(rows) | (offsets == 0)).all():
                raise ValueError(
                    "a request is given draft tokens, and a logits processor that applies to it "
                    "does not follow them; see `take_drafts`"
                )
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        # A sum is finite only if every term is: this test needs one pass and no large temporary.
        is_finite = torch.isfinite(logits.sum(dim=-1))
        asked = np.flatnonzero(self._rows.num_logprobs[rows] != NO_LOGPROBS)
        raw = None
        if len(asked):  # a copy, since the logits may change
            raw = RawLogprobs(
                raw_logprobs(_take(logits, asked)), asked, self._rows.num_logprobs[rows]
            )
        if mask is not None:
            mask.apply(logits, masked)
        logits = self._processors.before_choice(logits, belongs)
        values, indices = highest(logits)
        drawn = Drawn(logits, values, indices, belongs)
        known = torch.stack((is_finite, torch.isfinite(values)))
        random = np.flatnonzero(self._rows.temperature[rows] > 0.0)
        numbers, short = NO_NUMBERS, []
        if len(random):
            numbers = self._uniform(belongs.at(random))
            short = self._draw_all(drawn, random, numbers)
        return Choice(self, drawn, known, raw, random, numbers, short)

    def draw_again(self, drawn: Drawn, random: IntArray, numbers: npt.NDArray[np.float64]) -> None:
        """Sample the rows at the indices `random` once more, among all candidates."""
        self._draw_all(drawn, random, numbers, all_candidates=True)

    def _draw_all(
        self,
        drawn: Drawn,
        random: IntArray,
        numbers: npt.NDArray[np.float64],
        *,
        all_candidates: bool = False,
    ) -> list[Tensor]:
        """Sample the rows at the indices `random` by uniform `numbers`. Return, for each part of
        these rows, whether each row must be sampled again with all candidates; an empty list if no
        row must be."""
        logits, short = drawn.logits, []
        parts = [*row_parts(len(random), logits.shape[1], logits.device.type)]
        for part in parts:
            index = to_device(random[part], logits.device)
            first, last = int(random[part][0]), int(random[part][-1])
            if last - first + 1 == len(random[part]):  # adjacent rows: one pass instead of two
                near = slice(first, last + 1)
                from_best = logits[near] - drawn.best[near, None]
            else:
                from_best = logits[index].sub_(drawn.best[index, None])
            part_rows = drawn.rows.at(random[part])
            tokens, is_short = self._draw(
                from_best, to_device(numbers[part], logits.device), part_rows, all_candidates
            )
            drawn.chosen[index] = tokens
            short.append(is_short)
        if all(one is None for one in short):
            return []
        return [
            torch.zeros(len(random[part]), dtype=torch.bool, device=logits.device)
            if one is None
            else one
            for one, part in zip(short, parts, strict=True)
        ]

    def _draw(
        self, from_best: Tensor, numbers: Tensor, belongs: LogitsRows, all_candidates: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return random tokens by uniform `numbers`, and the result of `truncate`. Overwrites
        `from_best`: the logits minus the highest of each row, so that no small temperature can
        overflow. No row has a temperature of 0."""
        rows = belongs.rows
        temperatures = to_device(self._rows.temperature[rows][:, None], from_best.device)
        scaled = from_best.div_(temperatures.to(from_best.dtype))
        scaled = self._processors.after_temperature(scaled, belongs)
        top_k, top_p = self._rows.top_k[rows], self._rows.top_p[rows]
        if leaves_few(top_k, scaled.shape[1], scaled.device):
            chosen = draw_among_few(scaled, top_k, top_p, numbers.numpy())
            return torch.from_numpy(chosen), None
        is_short = truncate(scaled, top_k, top_p, all_candidates=all_candidates)
        sums = exp_(scaled).cumsum(dim=-1, dtype=torch.float64)
        total = sums[:, -1:]
        target = numbers[:, None] * total
        # The target stays below the total even if the product was rounded up, so the token always
        # has a probability above zero.
        target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
        tokens = torch.searchsorted(sums, target, right=True)[:, 0]
        # The clamp changes only results of rows that are not finite.
        return tokens.clamp_(max=sums.shape[1] - 1), is_short

    def _uniform(self, belongs: LogitsRows) -> npt.NDArray[np.float64]:
        """Return a number in [0, 1) for each row, float64. The numbers of seeded rows depend on
        their seed."""
        rows, offsets, _ = belongs
        drawn = torch.rand(len(rows), dtype=torch.float64, generator=self._generator)
        numbers: npt.NDArray[np.float64] = drawn.numpy()
        for index, seeded in self._rows.seeded.of(rows):
            position = len(seeded.output_token_ids)
            if offsets is not None:
                position += int(offsets[index])
            numbers[index] = uniform_of(seeded.seed, position)
        return numbers


@dataclass(frozen=True, slots=True)
class Drawn:
    """The logits and chosen tokens of a batch that is being sampled."""

    logits: Tensor  # [rows, vocab], after the requests' changes; a draw works on copies
    best: Tensor  # [rows]: the highest logit of each row
    chosen: Tensor  # int64 [rows], greedy at first; draws replace random rows
    rows: LogitsRows


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """The model's own distributions in the rows that need log-probabilities."""

    logprobs: Tensor  # [asked, vocab]
    asked: IntArray  # indices among the rows
    counts: IntArray  # [rows]: the number of likeliest tokens to report

    def entries(self, num_rows: int, found: list[Tensor]) -> list[PositionLogprobs | None]:
        """Return an entry for each of `num_rows` rows, None for rows without log-probabilities."""
        made = position_entries(found, self.counts[self.asked].tolist())
        entries: list[PositionLogprobs | None] = [None] * num_rows
        for index, entry in zip(self.asked.tolist(), made, strict=True):
            entries[index] = entry
        return entries


class Choice:
    """The tokens of a step, which the device may still be sampling."""

    def __init__(
        self,
        sampler: Sampler,
        drawn: Drawn,
        known: Tensor,
        raw: RawLogprobs | None,
        random: IntArray,
        numbers: npt.NDArray[np.float64],
        short: list[Tensor],
    ) -> None:
        """`random` are the indices of the rows that were sampled with `numbers`. `short` holds, in
        parts, whether each of these rows must be sampled again."""
        self._sampler, self._known, self._raw = sampler, known, raw
        self._random, self._numbers, self._num_short = random, numbers, len(short)
        self._drawn: Drawn | None = drawn
        self._failures = sampler.failures(drawn.rows.rows)
        self.tokens = drawn.chosen  # int64 [rows], on the device
        self._copies = self._begin_copies(short)
        self._sampled: Sampled | None = None
        if not short:  # the logits are not needed again
            self._drawn = None

    @property
    def is_final(self) -> bool:
        """Whether `tokens` are final. If not, `wait` may change some tokens, and must be called
        before the sampler's rows change."""
        return self._drawn is None

    @property
    def is_done(self) -> bool:
        """Whether the first copies have arrived. `wait` still waits if rows must be sampled
        again."""
        return self._copies.have_arrived

    def wait(self) -> Sampled:
        """Wait for the device, and return the results."""
        if self._sampled is None:
            self._sampled, is_short = self._fetch()
            if self._drawn is not None and is_short.any():
                again = np.flatnonzero(is_short)
                self._sampler.draw_again(self._drawn, self._random[again], self._numbers[again])
                self._failures = self._sampler.failures(self._drawn.rows.rows)
                self._num_short = 0
                self._copies = self._begin_copies([])
                self._sampled, _ = self._fetch()
            self._drawn = None
        return self._sampled

    def _begin_copies(self, short: list[Tensor]) -> HostCopies:
        """Start the copies of all results to the host."""
        found, raw = [], self._raw
        if raw is not None:
            found = position_tensors(
                raw.logprobs, _take(self.tokens, raw.asked), raw.counts[raw.asked].tolist()
            )
        return begin_to_host([self.tokens, self._known, *short, *itertools.chain(*found)])

    def _fetch(self) -> tuple[Sampled, npt.NDArray[np.bool_]]:
        """Return the results, and for each random row whether it must be sampled again."""
        ids, (is_finite, has_choice), *others = self._copies.wait()
        is_short, found = others[: self._num_short], others[self._num_short :]
        entries = None if self._raw is None else self._raw.entries(len(ids), found)
        return (
            Sampled(ids.tolist(), is_finite.tolist(), has_choice.tolist(), self._failures, entries),
            torch.cat(is_short).numpy() if is_short else _NONE_SHORT,
        )


def _check_drafts(belongs: LogitsRows) -> None:
    rows, offsets, drafts = belongs
    assert offsets is not None and drafts is not None
    lengths = [len(tokens) for tokens in drafts]
    if len(offsets) != len(rows) or len(lengths) != len(rows):
        raise ValueError(
            f"{len(rows)} rows of logits need as many offsets and lists of draft tokens, not "
            f"{len(offsets)} and {len(lengths)}"
        )
    if (offsets < 0).any() or (offsets > lengths).any():
        raise ValueError(f"offsets {offsets.tolist()} for lists of {lengths} draft tokens")


def _take(tensor: Tensor, indices: IntArray) -> Tensor:
    """Return the rows at `indices`. For all rows, return the tensor itself, not a copy."""
    if len(indices) == len(tensor):
        return tensor
    return tensor[to_device(indices, tensor.device)]


def highest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the highest logit of each row, and the first token id with that logit. For a row with
    NaN, return NaN and the id of a token with NaN."""
    num_rows, vocab_size = logits.shape
    num_blocks = vocab_size // _HIGHEST_BLOCK
    if logits.device.type != "cpu" or num_blocks < _HIGHEST_BLOCK:
        values, indices = logits.max(dim=-1)
        return values, indices
    whole = num_blocks * _HIGHEST_BLOCK
    blocks = logits[:, :whole].reshape(num_rows, num_blocks, _HIGHEST_BLOCK)
    values, block = blocks.amax(dim=-1).max(dim=-1)
    index = blocks[torch.arange(num_rows), block].argmax(dim=-1) + block * _HIGHEST_BLOCK
    if whole < vocab_size:
        rest = logits[:, whole:].max(dim=-1)
        is_later = (rest.values > values) | (rest.values.isnan() & ~values.isnan())
        values = torch.where(is_later, rest.values, values)
        index = torch.where(is_later, rest.indices + whole, index)
    return values, index


def uniform_of(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends only on the two arguments."""
    mixed = _mix((_mix(seed & _MASK_64) + position * _GOLDEN) & _MASK_64)
    return (mixed >> 11) * 2.0**-53


def _mix(x: int) -> int:
    """Return a one-to-one mapping of a 64-bit number (the finaliser of SplitMix64): every input bit
    changes about half the output bits."""
    x = (x + _GOLDEN) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)
