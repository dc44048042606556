# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of states at multiples of an interval, in answers of which drafts are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.core.engine_core import EngineCore

from ...test_exactness import prompt
from ..models.states.state_models import make_state_model
from .conftest import config_of, request, run

INTERVAL, BLOCK = 16, 8
NGRAM = {
    "speculative_method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1,
    "speculative_adaptive": False,
}  # fmt: skip
SUFFIX = {
    "speculative_method": "suffix", "num_speculative_tokens": 3, "speculative_adaptive": False
}  # fmt: skip


@pytest.mark.parametrize("speculative", [NGRAM, SUFFIX], ids=["ngram", "suffix"])
def test_every_multiple_has_its_checkpoint(tmp_path: Path, speculative: dict[str, Any]) -> None:
    """No step checks drafts across a multiple, so each is the end of what a step computes for
    sure."""
    model = make_state_model(tmp_path, "lfm2-state-last")
    made = {}
    for name, wanted in (("without", {}), ("with", speculative)):
        options = {"num_blocks": 400, "block_size": BLOCK, "max_model_len": 300} | wanted
        core = EngineCore(config_of(model, state_checkpoint_interval=INTERVAL, **options))
        try:
            text = prompt(3, 41)
            # All tokens of the answer are the same, so all drafts are right.
            first = run(core, request("a", text, max_tokens=150, logit_bias=[(7, 100.0)]))["a"]
            made[name] = core.scheduler.stats()["state_checkpoints"]
            longer = [*text, *first.new_token_ids[:120], 5]
            again = run(core, request("b", longer, max_tokens=1))["b"]
            assert sum(again.cached_tokens_by_tier.values()) == (41 + 120) // INTERVAL * INTERVAL
            if (speculation := core.scheduler.speculation) is not None:
                assert speculation.stats()["num_accepted_tokens"] > 80
        finally:
            core.shutdown(5.0)
    assert made["with"] == made["without"] >= 150 // INTERVAL
