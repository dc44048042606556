# SPDX-License-Identifier: Apache-2.0
"""TokenMask: the tokens that the grammars of requests allow, as one bit per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.cpu.library import CpuLibrary, cpu_library
from ..batch.batch_update import IntArray
from .copies import address_of, to_device

_WORD = np.dtype("<u4")


@dataclass(frozen=True, slots=True)
class TokenMask:
    """`allowed[i]` is the mask of `request_ids[i]`: bit `t % 32` of word `t // 32` is set if token
    `t` may follow. Requests without a mask may choose any token. Tokens beyond the last word are
    banned."""

    request_ids: Sequence[str]
    allowed: npt.NDArray[np.uint32]  # [requests, words]

    @property
    def of_any(self) -> npt.NDArray[np.uint32]:
        """The tokens that at least one of the requests may choose, `[words]`."""
        words: npt.NDArray[np.uint32] = np.bitwise_or.reduce(self.allowed, axis=0)
        return words

    def places_among(self, rows: IntArray, row_of: Mapping[str, int]) -> Sequence[int]:
        """Return, for each row of the mask, the index of its row of logits. `rows` are the batch
        rows of the logits. The rows of one request are consecutive in the mask and in the logits.
        Surplus mask rows of a request restrict its last row of logits. Raises ValueError for a
        request without a row of logits."""
        choosing = rows.tolist()
        own = [row_of.get(request_id, -1) for request_id in self.request_ids]
        if own == choosing:  # each row of logits has one mask row, in the same order
            return range(len(own))
        left: dict[int, list[int]] = {}
        for place in range(len(choosing) - 1, -1, -1):
            left.setdefault(choosing[place], []).append(place)
        places = []
        for request_id, row in zip(self.request_ids, own, strict=True):
            if (of_row := left.get(row)) is None:
                raise ValueError(
                    f"the mask names {request_id}, which chooses no token in this step"
                )
            places.append(of_row.pop() if len(of_row) > 1 else of_row[0])
        return places

    def apply(self, logits: Tensor, indices: Sequence[int]) -> None:
        """Ban the tokens that are not allowed, in place. Row `indices[i]` of `logits` `[rows,
        vocab]` belongs to `request_ids[i]`. Raises ValueError if the mask does not have a row for
        each request, or an index is out of range."""
        allowed, count = self.allowed, len(self.request_ids)
        if allowed.ndim != 2 or len(allowed) != count:
            raise ValueError(
                f"a mask of {count} requests has a row of words for each, not the shape "
                f"{allowed.shape}"
            )
        num_logits, num_tokens = logits.shape
        is_all = indices == range(num_logits) or list(indices) == list(range(num_logits))
        if len(indices) != count or not (is_all or all(0 <= i < num_logits for i in indices)):
            raise ValueError(
                f"a mask of {count} requests is for as many rows of the {num_logits} that there "
                f"are, not for {list(indices)}"
            )
        words = allowed
        if words.dtype is not _WORD or not words.flags.c_contiguous:
            words = words.astype(_WORD, order="C")
        if logits.is_cpu:
            _ban_on_host(logits, num_tokens, words, None if is_all else indices)
            return
        octets = np.array(words).view(np.uint8)  # a writable copy, as torch needs
        banned = banned_on(octets, num_tokens, logits.device)
        if is_all:  # no copy is needed
            logits.masked_fill_(banned, -torch.inf)
            return
        rows = to_device(np.asarray(indices, np.int64), logits.device)
        logits[rows] = logits[rows].masked_fill_(banned, -torch.inf)


def _ban_on_host(
    logits: Tensor,
    num_tokens: int,
    words: npt.NDArray[np.uint32],
    indices: Sequence[int] | None,
) -> None:
    """Ban tokens in place. The compiled kernels read the words and write only banned logits.
    Without the kernels numpy does so, three times as fast as torch. `indices` None means all
    rows."""
    library = cpu_library()
    if isinstance(library, CpuLibrary) and logits.dtype == torch.float32:
        row, one = logits.stride()
        if one == 1:
            places = None if indices is None else np.array(indices, np.int64)
            library.ban(
                logits.data_ptr(),
                row,
                num_tokens,
                address_of(words),
                words.shape[1],
                None if places is None else address_of(places),
                len(words),
            )
            return
    banned = banned_on_host(words.view(np.uint8), num_tokens)
    values = logits.numpy()
    if indices is None:
        np.copyto(values, -np.inf, where=banned)
        return
    for index, row_banned in zip(indices, banned, strict=True):
        np.copyto(values[index], -np.inf, where=row_banned)


def banned_on_host(octets: npt.NDArray[np.uint8], num_tokens: int) -> npt.NDArray[np.bool_]:
    """Do the same as `banned_on`, on the host."""
    count = min(octets.shape[1] * 8, num_tokens)
    # The packed bits are inverted first; unpacked bytes are 0 or 1, which are valid bools.
    banned = np.unpackbits(~octets, axis=1, count=count, bitorder="little").view(np.bool_)
    if count < num_tokens:
        banned = np.pad(banned, ((0, 0), (0, num_tokens - count)), constant_values=True)
    return banned


def banned_on(octets: npt.NDArray[np.uint8], num_tokens: int, device: torch.device) -> Tensor:
    """Return the banned tokens, bool `[rows, num_tokens]`, from `[rows, octets]` with one bit for
    each allowed token. The bits are copied to the device in one piece and expanded there."""
    packed = to_device(octets, device)
    bit = 1 << torch.arange(8, dtype=torch.uint8, device=device)
    banned = ((packed[:, :, None] & bit) == 0).flatten(1)[:, :num_tokens]
    missing = num_tokens - banned.shape[1]
    return torch.nn.functional.pad(banned, (0, missing), value=True) if missing else banned
