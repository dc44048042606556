# SPDX-License-Identifier: Apache-2.0
"""Layers with windows on every path of the runner: logits equal transformers' whatever the blocks
before a window hold, be they the null block or somebody else's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stratakv.engine.cache.group_spec import plan_groups
from stratakv.engine.models.layer_attention import chunk, full, window
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.worker.block_table import BlockTable
from stratakv.engine.worker.forward.forward import StepInputs, step_order
from stratakv.engine.worker.forward.grouped_attention import LayerViews, View
from stratakv.engine.worker.model_runner import ModelRunner
from stratakv.engine.worker.runtime.placement import KERNELS, Placement
from stratakv.tiers.block import BlockLayout

from ...tiny_models import make_model, reference_logits
from .recording_runtime import RecordingRuntime

BLOCK, WINDOW, LENGTH = 8, 21, 70
KINDS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "gemma3_text": {
        "rope_parameters": None,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 24,
        "num_hidden_layers": 5,
        "sliding_window_pattern": 3,
        "final_logit_softcapping": 15.0,
        "pad_token_id": 0,
    },
}
PATHS = ["gather", "kernels", "recorded"]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("windows")
    return make_model(directory, request.param, seed=5, **KINDS[request.param])


def make_runner(model: Path, path: str, **options: Any) -> ModelRunner:
    if path != "gather":
        options["placement"] = Placement(
            attention_backend=KERNELS, record_decodes=path == "recorded"
        )
        options["runtime"] = RecordingRuntime()
    return ModelRunner(
        load_model_spec(model),
        model,
        dtype="float64",
        num_blocks=200,
        block_size=BLOCK,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_model_len=256,
        **options,
    )


class Lives:
    """Prompts whose blocks are handed out by a plan's groups and taken away before windows. What is
    taken becomes NaN, and its entry the null block or stays as it was, by turns."""

    def __init__(self, runner: ModelRunner, prompts: list[list[int]]) -> None:
        self.runner, self.prompts = runner, prompts
        self.groups = runner.groups
        entry = runner.pool.kernel_layout.block_size
        self.tables = [BlockTable(len(prompts), 32, BLOCK, entry) for _ in self.groups.groups]
        ids = np.random.default_rng(4).permutation(np.arange(1, runner.pool.num_blocks))
        self.free = ids.tolist()
        self.blocks: list[list[list[int]]] = [[[] for _ in prompts] for _ in self.tables]
        self.computed = np.zeros(len(prompts), np.int64)
        runner.pool.tensor[1:] = float("nan")

    def step(self, counts: list[int]) -> dict[int, torch.Tensor]:
        """Compute `counts[i]` more tokens of prompt i: logits of each, by prompt."""
        rows = np.flatnonzero(np.array(counts))
        sizes = np.array(counts)[rows]
        order = step_order(rows, sizes)
        rows, sizes = rows[order], sizes[order]
        for row, size in zip(rows.tolist(), sizes.tolist(), strict=True):
            self._lay_down(row, int(self.computed[row]) + size)
        before = self.computed[rows]
        spans = [range(b, b + n) for b, n in zip(before.tolist(), sizes.tolist(), strict=True)]
        ids = [self.prompts[r][i] for r, s in zip(rows.tolist(), spans, strict=True) for i in s]
        positions = np.concatenate([np.array(span) for span in spans])
        token_rows = np.repeat(rows, sizes)
        slots = [table.slot_mapping(token_rows, positions) for table in self.tables]
        step = StepInputs(self.tables, rows, before, sizes, np.array(ids), positions, slots, None)
        with torch.inference_mode():
            hidden = self.runner._forward.prepare_step(step)()
            logits = self.runner.model.logits(hidden).clone()
        self.computed[rows] += sizes
        return dict(zip(rows.tolist(), logits.split(sizes.tolist()), strict=True))

    def _lay_down(self, row: int, end: int) -> None:
        for group, kind in enumerate(self.groups.attention):
            held, table = self.blocks[group][row], self.tables[group]
            first = kind.first_seen(int(self.computed[row])) // BLOCK
            for index in range(min(first, len(held))):
                if held[index] > 0:
                    self.runner.pool.tensor[held[index]] = float("nan")
                    self.free.append(held[index])
                    held[index] = -held[index] if index % 2 else 0
            while len(held) * BLOCK < end:
                held.append(self.free.pop(0))
            table.add_row([abs(block) for block in held], row)


@pytest.mark.parametrize("path", PATHS)
def test_logits_equal_transformers_in_chunks_of_any_size(model: Path, path: str) -> None:
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, 190, length).tolist() for length in (LENGTH, 50, 33)]
    lives = Lives(make_runner(model, path), prompts)
    got: list[list[torch.Tensor]] = [[], [], []]
    # All at once beyond a window; odd chunks among decodes; then decodes of several lengths.
    for counts in ([0, 45, 0], [29, 1, 7], [13, 1, 11], [1, 1, 12], [22, 1, 1]):
        for row, logits in lives.step(counts).items():
            got[row].append(logits)
    while (lives.computed < [len(p) for p in prompts]).any():
        left = [len(p) - done for p, done in zip(prompts, lives.computed.tolist(), strict=True)]
        for row, logits in lives.step([min(1, n) for n in left]).items():
            got[row].append(logits)
    for text, parts in zip(prompts, got, strict=True):
        expected = reference_logits(model, text, torch.float64)
        error = (torch.cat(parts) - expected).abs().amax() / expected.abs().amax()
        assert error < 1e-5, "transformers rounds norms to float32"
    assert not lives.runner.pool.tensor[0].any(), "the null block is never written"


@pytest.mark.parametrize("path", PATHS)
def test_attention_may_read_smaller_blocks_than_are_handed_out(model: Path, path: str) -> None:
    text = np.random.default_rng(8).integers(3, 190, LENGTH).tolist()
    found = []
    for kernel_block_size in (None, 4):
        lives = Lives(make_runner(model, path, kernel_block_size=kernel_block_size), [text])
        found.append([lives.step([count])[0] for count in (30, 17, 1, 1, 21)])
    assert lives.runner.pool.kernel_tensor.shape[0] == 2 * lives.runner.pool.num_blocks
    torch.testing.assert_close(found[1], found[0])
    assert torch.isfinite(found[1][-1]).all()


@pytest.mark.parametrize("path", PATHS)
def test_one_chunk_of_three_windows(model: Path, path: str) -> None:
    text = np.random.default_rng(3).integers(3, 190, 3 * WINDOW + 5).tolist()
    [logits] = Lives(make_runner(model, path), [text]).step([len(text)]).values()
    expected = reference_logits(model, text, torch.float64)
    assert (logits - expected).abs().amax() / expected.abs().amax() < 1e-5


def test_layers_of_one_group_may_differ_in_their_windows() -> None:
    layout = BlockLayout(4, BLOCK, 2, 4, "float32")
    kinds = (full(), window(9), full(), window(9))
    apart = LayerViews(plan_groups(layout, 1, kinds).places(), kinds)
    assert apart.views == (View(0, None), View(1, 9))
    assert apart.places == [(0, 0), (1, 0), (0, 1), (1, 1)]
    together = LayerViews(plan_groups(layout).places(), kinds)
    assert together.views == (View(0, None), View(0, 9))
    assert together.places == [(0, 0), (1, 1), (0, 2), (1, 3)]
    with pytest.raises(ValueError, match="computes chunked local attention of 5"):
        LayerViews(plan_groups(layout).places(), (full(), chunk(5), full(), full()))
