# SPDX-License-Identifier: Apache-2.0
"""Suggests the known word that is nearest to a wrong word, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MOST_BEGINNINGS = 3


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `"; did you mean X?"`, or an empty text if no known word is near. Up to three known
    words that begin with the wrong word are suggested, because the wrong word may be cut short. If
    no word or more words begin so, the most similar known word is suggested."""
    # The leading dashes of flags are ignored, since they make any two flags similar.
    stem, words = word.lstrip("-"), {each.lstrip("-"): each for each in known}
    near = [each for each in words if stem and each.startswith(stem)]
    if not 0 < len(near) <= _MOST_BEGINNINGS:
        near = difflib.get_close_matches(stem, words, n=1, cutoff=0.6)
    near = [words[each] for each in near]
    return f"; did you mean {' or '.join(near)}?" if near else ""
