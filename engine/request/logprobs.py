# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of one position, in their form between the sampler and a client.

Natural logarithms of the model's own distribution, before temperature, penalties and truncation.
Values below -9999.0, and NaN, become -9999.0, because JSON has no infinity.
"""

from __future__ import annotations

import msgspec

# The most likely tokens at a position that OpenAI's API allows for a chat.
MAX_LOGPROBS = 20


class PositionLogprobs(msgspec.Struct, array_like=True):
    """The token at one position, and the likeliest tokens there.

    Both lists begin with the token of the position, at any rank; the likeliest tokens follow in
    descending order. If the token is one of the likeliest, it is in the lists twice.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the position's token: 1 + the number of likelier tokens


# An entry for each prompt token; None for the first, which no token precedes.
PromptLogprobs = list[PositionLogprobs | None]
