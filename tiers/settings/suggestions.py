# SPDX-License-Identifier: Apache-2.0
"""The nearest right word to a wrong one, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MOST_BEGINNINGS = 3


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`"; did you mean X?"`, or nothing where no known word is near.

    Words that begin with the wrong one are nearest, since a person may have cut one short; where
    it is the beginning of many, it says little and the likeness decides.
    """
    # Without the dashes of flags, which make any two of them alike.
    stem, words = word.lstrip("-"), {each.lstrip("-"): each for each in known}
    near = [each for each in words if stem and each.startswith(stem)]
    if not 0 < len(near) <= _MOST_BEGINNINGS:
        near = difflib.get_close_matches(stem, words, n=1, cutoff=0.6)
    near = [words[each] for each in near]
    return f"; did you mean {' or '.join(near)}?" if near else ""
