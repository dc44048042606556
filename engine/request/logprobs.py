# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of one position, in their form between the sampler and a client.

Natural logarithms of the model's own distribution, before temperature, penalties and truncation.
Values below -9999.0, and NaN, become -9999.0, because JSON has no infinity.
"""

from __future__ import annotations

import msgspec

# The most that OpenAI's API allows for a chat.
MAX_LOGPROBS = 20


class PositionLogprobs(msgspec.Struct, array_like=True):
    """The token at one position, and the likeliest ones there.

    Both lists begin with the token of the position, at any rank; the likeliest follow in descending
    order, and the token is among them a second time if it is one of them.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the position's token; 1 is the likeliest, equal ones do not count


# An entry for each prompt token; None for the first, which has no token before it.
PromptLogprobs = list[PositionLogprobs | None]
