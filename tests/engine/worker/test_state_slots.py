# SPDX-License-Identifier: Apache-2.0
"""Which slot a request goes on from behind a step that checked drafts."""

from __future__ import annotations

import pytest

from stratakv.engine.worker.state_slots import _RequestSlots


@pytest.mark.parametrize(("num_computed", "slot"), [(9, 4), (10, 5), (11, 6), (12, 7)])
def test_a_request_goes_on_from_its_last_valid_row(num_computed: int, slot: int) -> None:
    """Where not even its own token counts, as after a step without finite logits, its present slot
    stays valid."""
    own = _RequestSlots([4, 5, 6, 7], 4, drafted_from=9, drafted=[5, 6, 7])
    own.move_to(num_computed)
    assert own.current == slot
    own.move_to(num_computed + 3)  # a step without drafts writes where it reads
    assert own.current == slot
