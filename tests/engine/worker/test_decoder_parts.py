# SPDX-License-Identifier: Apache-2.0
"""The parts of the decoder through a step: all hidden states, inner ones, another kind of MLP."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from stratakv.engine.models.decoder import AuxStates, Embeds
from stratakv.engine.worker.block_table import BlockTable
from stratakv.engine.worker.forward.forward import StepInputs
from stratakv.engine.worker.runtime.placement import KERNELS, Placement

from .recording_runtime import RecordingRuntime

LAYERS, BLOCK = 2, 16


@pytest.fixture(params=["gather", "kernels", "recorded"])
def runner(request, checkpoint, driver):
    options = {}
    if request.param != "gather":
        options["placement"] = Placement(
            attention_backend=KERNELS, record_decodes=request.param == "recorded"
        )
        options["runtime"] = RecordingRuntime()
    return driver(checkpoint(), **options).runner


@pytest.fixture
def table():
    table = BlockTable(4, 8, BLOCK)
    for row in range(4):
        table.add_row([1 + row, 11 + row, 21 + row], row)
    return table


def step_of(table, prompts, computed, wanted) -> StepInputs:
    """Everything of each prompt behind `computed`."""
    rows = np.arange(len(prompts))
    before = np.full(len(prompts), computed)
    counts = np.array([len(prompt) - computed for prompt in prompts])
    positions = np.concatenate([np.arange(computed, len(prompt)) for prompt in prompts])
    ids = np.concatenate([prompt[computed:] for prompt in prompts]).astype(np.int64)
    slots = table.slot_mapping(np.repeat(rows, counts), positions)
    return StepInputs((table,), rows, before, counts, ids, positions, (slots,), wanted)


def run(runner, step: StepInputs) -> torch.Tensor:
    with torch.inference_mode():
        return runner._forward.prepare_step(step)().clone()


@pytest.mark.parametrize("computed", [0, 39])
def test_all_hidden_states(runner, table, prompt_of, computed):
    """Of prompts and of decodes; the last rows are what a step that wants only these gets."""
    prompts = [prompt_of(40, seed) for seed in range(3)]
    if computed:
        run(runner, step_of(table, [prompt[:computed] for prompt in prompts], 0, None))
    step = step_of(table, prompts, computed, None)
    every = run(runner, step)
    assert every.shape == (step.num_tokens, 32)
    last = np.cumsum(step.counts) - 1
    assert torch.equal(run(runner, replace(step, wanted=np.arange(step.num_tokens))), every)
    torch.testing.assert_close(run(runner, replace(step, wanted=last)), every[last])


def test_hidden_states_of_layers_are_those_of_transformers(runner, table, prompt_of, checkpoint):
    prompts = [prompt_of(40, seed) for seed in range(2)]
    near = {"rtol": 1e-4, "atol": 1e-4}  # cosines and norms of transformers are float32
    step, aux = step_of(table, prompts, 0, None), AuxStates((0, 1, LAYERS))
    hidden = run(runner, replace(step, aux=aux))
    assert torch.equal(hidden, run(runner, step))
    model = LlamaForCausalLM.from_pretrained(checkpoint(), dtype=torch.float64)
    with torch.inference_mode():
        out = model.model(torch.tensor(prompts), output_hidden_states=True)
        flat = [states.flatten(0, 1) for states in out.hidden_states]
        assert set(aux.found) == {0, 1, LAYERS}
        for layer in (0, 1):
            torch.testing.assert_close(aux.found[layer], flat[layer], **near)
        normed = model.model.norm(aux.found[LAYERS])
    torch.testing.assert_close(normed, hidden, **near)
    torch.testing.assert_close(hidden, flat[-1], **near)


def test_inner_states_are_of_the_rows_asked_for(runner, table, prompt_of):
    """Of decodes too, which are not taken from a record then."""
    prompts = [prompt_of(40, seed) for seed in range(3)]
    for step in (step_of(table, prompts, 0, None), step_of(table, prompts, 39, None)):
        every, some = AuxStates((1, LAYERS)), AuxStates((1, LAYERS))
        rows = np.array([step.num_tokens - 1, 0])
        hidden = run(runner, replace(step, aux=every))
        part = run(runner, replace(step, aux=some, wanted=rows))
        torch.testing.assert_close(part, hidden[rows])
        for layer in (1, LAYERS):
            torch.testing.assert_close(some.found[layer], every.found[layer][rows])


def test_forward_is_embed_and_run(checkpoint, driver, prompt_of):
    model = driver(checkpoint()).runner.model

    def first_values(q, k, v, layer, plan):  # attention to the first token only
        return v[:1].repeat(len(v), 1, 2).view(len(q), -1)

    ids, wanted = torch.tensor(prompt_of(9)), torch.tensor([8, 2])
    places = torch.arange(9)
    with torch.inference_mode():
        whole = model.forward(ids, places, first_values, None, wanted)
        x = model.embed(ids)
        assert torch.equal(model.run(x, places, first_values, None, wanted), whole)
        own = Embeds(torch.tensor([7, 3]), x[[7, 3]].float())
        assert torch.equal(model.embed(ids, own)[[7, 3]], own.values.double())
        assert torch.equal(model.embed(ids), x), "the embedding itself was overwritten"
