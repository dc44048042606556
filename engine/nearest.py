# SPDX-License-Identifier: Apache-2.0
"""The nearest right word to a wrong one, for error messages. Knows nothing of options."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`"; did you mean X?"`, or nothing where no known word is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""
