# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of one position, as they travel from the sampler to a client.

Natural logarithms of the model's own distribution, before temperature, penalties and truncation.
Anything below -9999.0, and what has no number, is given as -9999.0, because JSON has no infinity.
"""

from __future__ import annotations

import msgspec

# The most that OpenAI's API allows for a chat.
MAX_LOGPROBS = 20


class PositionLogprobs(msgspec.Struct, array_like=True):
    """The token at one position, and the likeliest ones there.

    Both lists begin with the token that stands there, whatever its rank; the likeliest follow in
    descending order, and the token is among them a second time where it is one of them.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the token that stands there; 1 is the likeliest, equal ones do not count


# One entry for each prompt token; the first has nothing before it, so it has none.
PromptLogprobs = list[PositionLogprobs | None]
