# SPDX-License-Identifier: Apache-2.0
"""`RoutedRows`: the experts (of a mixture-of-experts model) to which some tokens were routed."""

from __future__ import annotations

import msgspec


class RoutedRows(msgspec.Struct, array_like=True, gc=False):
    """The expert ids of consecutive tokens: little-endian uint8, or uint16 for more than 256
    experts, `[tokens, layers with experts, experts of a token]`."""

    start: int  # position of the first token
    shape: tuple[int, int, int]
    data: bytes


def check_routed_start(start: int | None, tells_experts: bool) -> None:
    """Raise ValueError if `start` is given but the engine does not report experts."""
    if start is not None and not tells_experts:
        raise ValueError(
            "routed_experts_prompt_start asks for experts, which this engine does not tell; "
            "start it with --enable-return-routed-experts"
        )
