# SPDX-License-Identifier: Apache-2.0
"""One pass over pages of several cache groups: the hidden states of one group."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from stratakv.engine.worker.block_table import BlockTable
from stratakv.engine.worker.forward.forward import StepInputs
from stratakv.engine.worker.runtime.placement import KERNELS, Placement

from .recording_runtime import RecordingRuntime

BLOCK = 16


@pytest.fixture(params=["gather", "kernels", "recorded"])
def make_runner(request, checkpoint, driver):
    def make(num_groups):
        options = {}
        if request.param != "gather":
            options["placement"] = Placement(
                attention_backend=KERNELS, record_decodes=request.param == "recorded"
            )
            options["runtime"] = RecordingRuntime()
        # The driver fills what is not the null block with NaN.
        path = checkpoint(num_hidden_layers=4)
        return driver(path, num_groups=num_groups, **options).runner

    return make


def tables_of(num_groups: int) -> list[BlockTable]:
    """Ids as they come from one pool: none is in two groups."""
    ids = iter(np.random.default_rng(3).permutation(np.arange(1, 100)).tolist())
    tables = [BlockTable(4, 8, BLOCK) for _ in range(num_groups)]
    for table in tables:
        for row in range(4):
            table.add_row([next(ids) for _ in range(3)], row)
    return tables


def step_of(tables, prompts, computed, counts) -> StepInputs:
    """`counts[i]` tokens of each prompt behind `computed[i]`."""
    rows, before, counts = np.arange(len(prompts)), np.array(computed), np.array(counts)
    spans = [range(start, start + count) for start, count in zip(computed, counts, strict=True)]
    positions = np.concatenate([np.array(span) for span in spans])
    ids = np.concatenate([np.array(p)[list(s)] for p, s in zip(prompts, spans, strict=True)])
    token_rows = np.repeat(rows, counts)
    slots = [table.slot_mapping(token_rows, positions) for table in tables]
    return StepInputs(tables, rows, before, counts, ids.astype(np.int64), positions, slots, None)


def hidden_states(runner, tables, prompts) -> list[torch.Tensor]:
    """A step of fresh chunks, one of a decode and chunks with context, and one of decodes."""
    steps = [
        step_of(tables, prompts, [0, 0, 0], [30, 17, 8]),
        step_of(tables, prompts, [30, 17, 8], [1, 9, 24]),
        step_of(tables, prompts, [31, 26, 32], [1, 1, 1]),
    ]
    with torch.inference_mode():
        found = [runner._forward.prepare_step(step)().clone() for step in steps]
        last = replace(steps[2], wanted=np.array([2, 0]))
        return [*found, runner._forward.prepare_step(last)().clone()]


@pytest.mark.parametrize("num_groups", [2, 4])
def test_hidden_states_are_those_of_one_group(make_runner, prompt_of, num_groups):
    prompts = [prompt_of(40, seed) for seed in range(3)]
    expected = hidden_states(make_runner(1), tables_of(1), prompts)
    runner = make_runner(num_groups)
    assert runner.pool.tensor.shape[:2] == (200 * num_groups, 4 // num_groups)
    for mine, theirs in zip(
        hidden_states(runner, tables_of(num_groups), prompts), expected, strict=True
    ):
        assert torch.isfinite(mine).all()
        torch.testing.assert_close(mine, theirs)
    assert not runner.pool.tensor[0].any(), "the null block is never written"
