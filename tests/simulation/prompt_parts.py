# SPDX-License-Identifier: Apache-2.0
"""PromptParts: one prompt as a user sends it in parts, and the waits between them.

prompt          a b c d e f
plain           a b | c | d e f
nothing more    a b c d | e f |               the last part is empty
changed         a b | c x y | d e f           `num_kept` is 3: x and y are the prompt's no longer
"""

from __future__ import annotations

import random
from typing import NamedTuple

MOST_PARTS = 4  # before the last one
_WAITS = (0.0, 0.0, 0.001, 0.01, 0.1, 1.0)


class PromptParts(NamedTuple):
    """`num_kept`: of the tokens before the last part, how many are the prompt's own; -1: all."""

    tokens: list[list[int]]
    num_kept: int
    waits: list[float]  # before each part but the first, in seconds

    @classmethod
    def of(
        cls, prompt: list[int], rng: random.Random, most_tokens: int, idle_seconds: float
    ) -> PromptParts:
        """Drawn from `rng`, of up to `most_tokens` in all. A few waits are longer than
        `idle_seconds`, which a session may wait for a part."""
        kind = rng.choice(["plain", "plain", "plain", "nothing more", "changed", "all kept"])
        num_before, num_kept, changed = rng.randint(1, len(prompt)), -1, []
        if kind == "nothing more":
            num_before = len(prompt)
        elif kind == "changed":
            num_kept = num_before = rng.randint(0, len(prompt) - 1)
            num_changed = rng.randint(1, max(1, min(6, most_tokens - num_before)))
            changed = [rng.randint(1, 49) for _ in range(num_changed)]
        elif kind == "all kept":
            num_kept = num_before + rng.randint(0, 2)
        sent = prompt[:num_before] + changed
        places = sorted(
            rng.sample(range(1, len(sent)), rng.randint(0, min(len(sent), MOST_PARTS) - 1))
        )
        ends = zip([0, *places], [*places, len(sent)], strict=True)
        tokens = [*[sent[start:end] for start, end in ends], prompt[num_before:]]
        waits = [rng.choice(_WAITS) for _ in tokens[1:]]
        if rng.random() < 0.15:
            waits[rng.randrange(len(waits))] = 1.5 * idle_seconds
        return cls(tokens, num_kept, waits)
