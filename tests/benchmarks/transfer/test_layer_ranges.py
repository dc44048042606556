# SPDX-License-Identifier: Apache-2.0
"""Loading by layers: the same logits as loading whole, or no figure."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from stratakv.benchmarks.harness.comparison import WrongWork
from stratakv.benchmarks.transfer import layer_ranges
from stratakv.benchmarks.transfer.layer_ranges import (
    BLOCK_TOKENS,
    RANGES,
    Taken,
    _Place,
    _Prompt,
    _take_pair,
    _Waiting,
)


@pytest.fixture
def prompt() -> Iterator[_Prompt]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield _Prompt(_Place(8 * BLOCK_TOKENS), 4 * BLOCK_TOKENS, 40)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("ranges", RANGES)
def test_every_layer_is_there_when_it_is_computed(prompt: _Prompt, ranges: int) -> None:
    assert prompt._place.spec.num_layers % ranges == 0
    taken: Taken = {}
    for whole_first in (True, False):
        _take_pair(prompt, ranges, taken, whole_first=whole_first)
    assert len(taken[1]) == len(taken[ranges]) == 2


def test_what_is_loaded_is_looked_at(prompt: _Prompt) -> None:
    loaded = prompt.load_and_compute(1)
    prompt.forget()
    assert not torch.equal(loaded, prompt._compute(_Waiting(prompt._place.attention, [], 0)))


def test_who_does_not_wait_gets_no_figure(prompt: _Prompt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_ranges, "_wait", lambda event: None)
    monkeypatch.setattr(_Prompt, "_copy", lambda self, here: None)
    prompt._place.pool[:] = prompt._place.slab  # the first of each pair finds it there
    with pytest.raises(WrongWork, match="other logits"):
        _take_pair(prompt, RANGES[0], {}, whole_first=True)
