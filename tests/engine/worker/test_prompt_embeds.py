# SPDX-License-Identifier: Apache-2.0
"""Prompts that come as embeddings answer what transformers answers to the same `inputs_embeds`."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from stratakv.engine.core.worker_process.worker_messages import (
    Begin,
    decode_to_worker,
    encode,
)
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from stratakv.engine.worker.runtime.placement import KERNELS, Placement

from .recording_runtime import RecordingRuntime

BY_KERNELS = Placement(attention_backend=KERNELS)
HIDDEN = 32
COUNT = 12


def embeds_of(length: int, seed: int = 0) -> np.ndarray:
    """Numbers that no row of the embedding has."""
    return np.random.default_rng(seed).normal(0.0, 0.5, (length, HIDDEN))


@pytest.fixture(scope="module")
def expected(checkpoint):
    """`expected(embeds)`: the first tokens of transformers' greedy answer in float64."""
    model = LlamaForCausalLM.from_pretrained(checkpoint(), dtype=torch.float64).eval()

    @torch.inference_mode()
    def answer(embeds: np.ndarray, count: int = COUNT) -> list[int]:
        table = model.get_input_embeddings()
        known, tokens = torch.from_numpy(embeds), []
        for _ in range(count):
            logits = model(inputs_embeds=known[None]).logits[0, -1]
            best = logits.topk(2).values
            assert best[0] - best[1] > 1e-6
            tokens.append(int(logits.argmax()))
            known = torch.cat([known, table.weight[tokens[-1]][None]])
        return tokens

    return answer


@pytest.mark.parametrize("chunk", [1000, 16, 1])
@pytest.mark.parametrize("placement", [None, BY_KERNELS], ids=["gather", "kernels"])
def test_the_answer_is_that_of_transformers(chunk, placement, expected, checkpoint, driver):
    """In one step, in chunks, and by one token a step, which is a decode."""
    options = {} if placement is None else {"placement": placement}
    if placement is not None:
        options["runtime"] = RecordingRuntime()
    drive, embeds = driver(checkpoint(), **options), embeds_of(37)
    drive.add("a", [0] * 37, embeds)
    while len(drive.lives["a"].output) < COUNT:
        drive.step(chunk)
    assert drive.finish("a") == expected(embeds)


def test_a_crowd_with_and_without(expected, checkpoint, driver, prompt_of, reference, rng):
    """Rows move, steps mix both kinds, requests are preempted, forgotten and come back."""
    drive = driver(checkpoint(), block_size=4, num_blocks=800, max_num_seqs=8)
    embeds = {f"e{i}": embeds_of(length, i) for i, length in enumerate((1, 5, 33, 64, 90))}
    prompts = {f"t{i}": prompt_of(length, i) for i, length in enumerate((3, 40, 70))}
    waiting, answers = [*embeds, *prompts], {}
    rng.shuffle(waiting)
    preempted = 0
    while waiting or drive.lives:
        if waiting and len(drive.lives) < 6 and rng.random() < 0.6:
            name = waiting.pop()
            if name in embeds:
                drive.add(name, [3] * len(embeds[name]), embeds[name])
            else:
                drive.add(name, prompts[name])
        known = [name for name, life in drive.lives.items() if life.known]
        if known and rng.random() < 0.15:
            drive.preempt(rng.choice(known), forget=rng.random() < 0.5)
            preempted += 1
        drive.step(chunk=rng.choice([1, 7, 30]))
        for name in [n for n, life in drive.lives.items() if len(life.output) >= COUNT]:
            answers[name] = drive.finish(name)[:COUNT]
    assert preempted
    for name, values in embeds.items():
        assert answers[name] == expected(values), name
    for name, prompt in prompts.items():
        assert answers[name] == reference(checkpoint(), prompt, COUNT).tokens, name
    drive.add("last", [4])
    drive.step()
    assert not drive.runner._prompt_embeds


def test_rows_of_the_embedding_itself_answer_as_their_tokens(checkpoint, driver, prompt_of):
    drive, prompt = driver(checkpoint()), prompt_of(50)
    table = drive.runner.model._embedding.numpy()
    drive.add("a", [0] * 50, table[prompt])
    drive.add("b", prompt)
    for _ in range(COUNT + 3):
        drive.step(16)
    assert drive.finish("a") == drive.finish("b")


def test_a_narrower_type_is_widened(checkpoint, driver, expected):
    embeds = embeds_of(20).astype(np.float32)
    drive = driver(checkpoint())
    drive.add("a", [0] * 20, embeds)
    while len(drive.lives["a"].output) < COUNT:
        drive.step()
    assert drive.finish("a") == expected(embeds.astype(np.float64))


def test_no_request_keeps_another_ones(checkpoint, driver, prompt_of):
    """A name that is used again, without embeddings this time."""
    drive = driver(checkpoint())
    drive.add("a", prompt_of(20), embeds_of(20, random.randrange(99)))
    drive.step()
    drive.finish("a")
    again = drive.generate("a", prompt_of(20), 6)
    assert again == driver(checkpoint()).generate("a", prompt_of(20), 6)


@pytest.mark.parametrize("shape", [(19, HIDDEN), (21, HIDDEN), (20, HIDDEN + 1), (HIDDEN,)])
def test_a_shape_that_is_not_the_prompts_is_refused(shape, checkpoint, driver, expected):
    """The step fails, and the next one goes on."""
    drive = driver(checkpoint())
    drive.add("a", [0] * 20, np.zeros(shape))
    with pytest.raises(ValueError, match=rf"request a has .* not \(20, {HIDDEN}\)"):
        drive.step()
    drive.finish("a")
    drive.add("b", [0] * 9, embeds_of(9))
    while len(drive.lives["b"].output) < COUNT:
        drive.step()
    assert drive.finish("b") == expected(embeds_of(9))


@pytest.mark.parametrize("dtype", [None, np.float32, np.float64])
def test_they_travel_to_a_worker_process(dtype):
    embeds = None if dtype is None else embeds_of(3).astype(dtype)
    new = NewRequestData("a", np.arange(3, dtype=np.int32), SamplingParams(), ([1],), 0, [], embeds)
    step = SchedulerOutput([new], CachedRequestData(), {"a": 3}, 3, set(), set())
    received = decode_to_worker(encode(Begin(step)))
    assert isinstance(received, Begin)
    there = received.step.new_requests[0].prompt_embeds
    if embeds is None or there is None:
        assert there is embeds
    else:
        assert there.dtype == dtype and (there == embeds).all()
