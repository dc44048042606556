# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities at one token position, as the engine core sends them to the front.

The values are natural logarithms of the model's own distribution, before temperature, penalties and
truncation. Values below -9999.0, and NaN, become -9999.0, because JSON has no infinity."""

from __future__ import annotations

import msgspec

# The most likely tokens at a position that OpenAI's API allows for a chat.
MAX_LOGPROBS = 20


class PositionLogprobs(msgspec.Struct, array_like=True):
    """The token at one position, and the likeliest tokens at that position.

    Both lists begin with the position's token, whatever its rank; the likeliest tokens follow in
    descending order. If the position's token is one of the likeliest, it is in both lists twice."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the position's token: 1 + the number of likelier tokens


# An entry for each prompt token; None for the first, which no token precedes.
PromptLogprobs = list[PositionLogprobs | None]
