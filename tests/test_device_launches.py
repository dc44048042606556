# SPDX-License-Identifier: Apache-2.0
"""How many launches a layer takes in a step of Llama-3.1-8B's shape: those of three layers less
those of two."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="counts its kernels")

from .device_launches import DEVICE, DeviceLaunches, count_launches, fake_gpu, make_model, step_of

# The most launches of a layer, by kind of step. Numbers only go down.
MOST_LAUNCHES = {"decode": 9, "decode in splits": 10, "chunk": 9, "chunk beside decodes": 11}

CONTEXT, MAX_REQUESTS, LONG, SHORT = 100, 256, 8192, 128
# Tokens computed before and in the step, and the longest request, which decides into how many
# splits a context is cut.
STEPS = {
    "decode": ([CONTEXT] * MAX_REQUESTS, [1] * MAX_REQUESTS, SHORT),
    "decode in splits": ([CONTEXT] * 8, [1] * 8, LONG),
    "chunk": ([CONTEXT], [256], LONG),
    "chunk beside decodes": ([CONTEXT] * 9, [1] * 8 + [256], LONG),
}


def launches_of_a_layer(folder: Path, kind: str) -> tuple[Counter[str], Counter[str]]:
    """By operator: those of one more layer, and those of a step without any."""
    computed, counts, max_model_len = STEPS[kind]
    found = []
    with fake_gpu():
        for layers in (2, 3):
            model = make_model(folder, layers, max_model_len, MAX_REQUESTS)
            # A step of its own, since a block table tells what changed in it once.
            step = step_of(computed, counts, max_model_len)
            found.append(count_launches(model, step))
    two, three = found
    layer = three - two
    assert not two - three, "fewer launches with more layers"
    return layer, two - layer - layer


@pytest.mark.parametrize("kind", STEPS)
def test_a_layer_launches_no_more_than_before(tmp_path: Path, kind: str) -> None:
    layer, rest = launches_of_a_layer(tmp_path, kind)
    told = f"a layer: {dict(layer)}; beside the layers: {dict(rest)}"
    assert layer.total() <= MOST_LAUNCHES[kind], told
    assert layer.total() == MOST_LAUNCHES[kind], f"fewer launches: lower MOST_LAUNCHES; {told}"


def test_matrices_and_kernels_are_counted_by_name(tmp_path: Path) -> None:
    layer, _ = launches_of_a_layer(tmp_path, "decode in splits")
    kernels = {"rms_norm_kernel": 2, "rotate_write_kernel": 1, "gate_kernel": 1}
    kernels |= {"attend_split": 1, "combine_splits": 1}
    matrices = {"aten.mm": 2, "aten.addmm_": 2}
    assert layer == {f"triton.{name}": count for name, count in kernels.items()} | matrices


def test_views_sizes_and_new_memory_are_no_launches() -> None:
    with fake_gpu():
        x = torch.zeros(8, 6, device=DEVICE)
        launches = DeviceLaunches()
        with launches:
            first, second = x.view(4, 12).chunk(2, dim=-1)
            out = torch.empty_like(first, memory_format=torch.contiguous_format)
            x.new_empty(x.shape[0]).unsqueeze(0).expand(3, -1)
            assert launches.counts == {}
            torch.mul(first, second, out=out)
            out.add_(1).double()
            out[:0].zero_()
            F.linear(x, torch.ones(2, 6, device=DEVICE))
            torch.zeros(3, device=DEVICE)
            torch.zeros(3)  # of the host
        assert launches.counts == {
            "aten.mul": 1,
            "aten.add_": 1,
            "aten._to_copy": 1,
            "aten.mm": 1,
            "aten.ones": 1,
            "aten.zeros": 1,
        }
