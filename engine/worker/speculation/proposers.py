# SPDX-License-Identifier: Apache-2.0
"""`make_proposer`: the settings name a proposer, here it is made."""

from __future__ import annotations

from ...config.speculative_config import SpeculativeConfig
from .ngram import NgramProposer
from .proposer import Proposer
from .suffix import SuffixProposer


def make_proposer(config: SpeculativeConfig) -> Proposer | None:
    """The proposer of a worker; None: no drafts are asked for."""
    if not config.is_on:
        return None
    kind = SuffixProposer if config.method == "suffix" else NgramProposer
    return kind(config.prompt_lookup_min, config.prompt_lookup_max)
