# SPDX-License-Identifier: Apache-2.0
"""Joins the routed experts (of a mixture-of-experts model) in a request's outputs to one array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..request.routed_rows import RoutedRows


def join_routed_rows(parts: Sequence[RoutedRows], num_tokens: int) -> npt.NDArray[np.integer]:
    """Return the experts `[tokens, layers, experts of a token]` from the first position in `parts`
    up to `num_tokens`, exclusive, as uint8 or uint16. If parts overlap, the later part is used."""
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
