# SPDX-License-Identifier: Apache-2.0
"""RoutedRows: which experts of a model computed some tokens, as the core tells it."""

from __future__ import annotations

import msgspec


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
