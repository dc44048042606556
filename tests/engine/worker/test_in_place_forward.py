# SPDX-License-Identifier: Apache-2.0
"""Steps whose attention reads the pool in place: the same tokens as by gathering, which remains
where the library is missing or gathering is asked for."""

from __future__ import annotations

import pytest
import torch

from stratakv.engine.models.layer import Layer
from stratakv.engine.worker.forward.forward import GatherForward
from stratakv.engine.worker.forward.in_place_forward import InPlaceForward, reason_against_in_place
from stratakv.engine.worker.runtime.placement import AUTO, GATHER, Placement
from stratakv.kernels.cpu import paged_attention
from stratakv.kernels.cpu.library import Missing
from stratakv.tiers.block import BlockLayout

from .test_kernel_forward import crowd, wanted

BY_GATHERING = Placement(attention_backend=GATHER)
LAYOUT = BlockLayout(2, 16, 2, 8, "float64")
BUILT = pytest.mark.skipif(
    reason_against_in_place(LAYOUT, torch.float64) is not None,
    reason=f"needs the library: {reason_against_in_place(LAYOUT, torch.float64)}",
)


@BUILT
@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_in_place_answers_as_gathering_does(block_size, checkpoint, driver, prompt_of):
    options = {"block_size": block_size, "num_blocks": 1200}
    in_place = driver(checkpoint(), **options)
    assert isinstance(in_place.runner._forward, InPlaceForward)
    assert in_place.runner._forward._network is not None, "all layers are one call"
    gathered = driver(checkpoint(), placement=BY_GATHERING, **options)
    assert isinstance(gathered.runner._forward, GatherForward)
    assert crowd(in_place, prompt_of, wanted) == crowd(gathered, prompt_of, wanted)
    assert not in_place.runner.pool.tensor[0].any()


@BUILT
def test_a_model_that_the_library_has_not_all_of_is_computed_layer_by_layer(
    checkpoint, driver, prompt_of, monkeypatch
):
    expected = crowd(driver(checkpoint(), num_blocks=1200), prompt_of, wanted)
    monkeypatch.setattr(Layer, "in_library", lambda *_: None)
    by_layer = driver(checkpoint(), num_blocks=1200)
    assert isinstance(by_layer.runner._forward, InPlaceForward)
    assert by_layer.runner._forward._network is None
    assert crowd(by_layer, prompt_of, wanted) == expected


def test_without_the_library_blocks_are_gathered(checkpoint, driver, prompt_of, monkeypatch):
    expected = driver(checkpoint()).generate("a", prompt_of(40), 10)
    monkeypatch.setattr(paged_attention, "cpu_library", lambda: Missing("not built"))
    drive = driver(checkpoint(), placement=Placement(attention_backend=AUTO))
    assert isinstance(drive.runner._forward, GatherForward)
    assert drive.generate("a", prompt_of(40), 10) == expected


@BUILT
@pytest.mark.parametrize(
    ("layout", "compute", "reason"),
    [
        (LAYOUT, torch.float32, "in their own type"),
        (BlockLayout(2, 16, 2, 20, "float32"), torch.float32, "and these are 20"),
        (BlockLayout(2, 16, 2, 16, "fp8_e4m3"), torch.float32, "not torch.float8_e4m3fn"),
        (BlockLayout(2, 16, 2, 16, "float32"), torch.float32, None),
    ],
)
def test_what_cannot_be_read_in_place_is_known_before(layout, compute, reason):
    found = reason_against_in_place(layout, compute)
    assert found is None if reason is None else reason in (found or "")
