# SPDX-License-Identifier: Apache-2.0
"""RoutedRows: which experts of a model computed some tokens, as the core tells it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt


class RoutedRows(msgspec.Struct, array_like=True, gc=False):
    """The experts of tokens one behind the other: little-endian uint8, or uint16 where there are
    more than 256 experts, `[tokens, layers with experts, experts of a token]`."""

    start: int  # position of the first
    shape: tuple[int, int, int]
    data: bytes


def check_routed_start(start: int | None, tells_experts: bool) -> None:
    """Raise ValueError for a question that the engine does not answer."""
    if start is not None and not tells_experts:
        raise ValueError(
            "routed_experts_prompt_start asks for experts, which this engine does not tell; "
            "start it with --enable-return-routed-experts"
        )


def join_routed_rows(parts: Sequence[RoutedRows], num_tokens: int) -> npt.NDArray[np.integer]:
    """The experts `[tokens, layers, experts of a token]` of the positions from the first told one
    to before `num_tokens`, as uint8 or uint16. Of a position that is told twice the last counts."""
    first, (_, layers, each) = parts[0].start, parts[0].shape
    width = next(
        (len(part.data) // np.prod(part.shape, dtype=int) for part in parts if part.data), 1
    )
    dtype = np.dtype(np.uint8 if width == 1 else "<u2")
    joined = np.zeros((max(0, num_tokens - first), layers, each), dtype)
    for part in parts:
        rows = np.frombuffer(part.data, dtype).reshape(part.shape)
        at = part.start - first
        joined[at : at + len(rows)] = rows[: max(0, len(joined) - at)]
    return joined
