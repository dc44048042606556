# SPDX-License-Identifier: Apache-2.0
"""The runner on a CUDA device: the CPU's numbers within rounding, recorded steps, one wait a step.

The GPU computes in float16, with 10 bits behind the point, which is what the tolerance allows: the
kernels refuse float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from stratakv.engine.config.engine_options import engine_config
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.core.setup.resolve_placement import placement_of
from stratakv.engine.request.core_messages import AddRequest
from stratakv.engine.request.request import pack_token_ids
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.worker.pool_demand import PoolDemand
from stratakv.engine.worker.runtime.cuda_probe import choose_gpu, probe_cuda
from stratakv.engine.worker.runtime.placement import Placement

from .pool_shares import pools_of_two_shares

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
NEAR = {"rtol": 2e-2, "atol": 5e-2}


@pytest.fixture
def _no_other_wait() -> Iterator[None]:
    """torch raises wherever it would wait by itself."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def run(drive, prompt_of, steps=12):
    for number in range(5):
        drive.add(f"r{number}", prompt_of(3 + 21 * number, number))
    for _ in range(steps):
        drive.step(chunk=30)
    return [drive.finish(f"r{number}") for number in range(5)]


def test_the_machine_can_be_computed_on():
    state = probe_cuda()
    assert choose_gpu(Placement(device=GPU, strict_kernels=True), state).name


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_gpu_by_either_of_its_names(name):
    from stratakv.engine.worker.runtime.cuda_runtime import CudaRuntime

    assert placement_of(engine_config(None, {"device": name})).device == GPU
    assert CudaRuntime(torch.device(name)).device == GPU


@pytest.mark.parametrize("is_recorded", [False, True])
def test_logits_are_those_of_the_cpu(is_recorded, checkpoint, driver, prompt_of):
    there = Placement(device=GPU, record_decodes=is_recorded, strict_kernels=True)
    path, prompt = checkpoint(head_dim=16), prompt_of(70)
    mine, theirs = driver(path, dtype="float16", placement=there), driver(path, dtype="float32")
    for drive in (mine, theirs):
        drive.add("a", prompt)
        for _ in range(3):
            drive.step(chunk=30)
    torch.testing.assert_close(mine.logits[0].cpu(), theirs.logits[0], **NEAR)
    assert not mine.runner.pool.tensor[0].any()


def logits_token_by_token(drive, prompt_of):
    """Behind prompts that are computed one token a step, by which no answer decides what comes
    next: a recorded batch is filled up, so its matrices may be multiplied by another kernel."""
    for number in range(5):
        drive.add(f"r{number}", prompt_of(3 + 9 * number, number))
    found = []
    while drive.lives:
        drive.logits.clear()
        drive.step(chunk=1)
        found += [logits.cpu() for logits in drive.logits]
        for name in [name for name, life in drive.lives.items() if life.output]:
            drive.finish(name)
    return torch.cat(found)


@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3"])
def test_recorded_steps_compute_what_launched_ones_do(kv, checkpoint, driver, prompt_of):
    recorded, launched = (
        logits_token_by_token(
            driver(
                checkpoint(head_dim=16),
                dtype="bfloat16",
                placement=Placement(device=GPU, kv_cache_dtype=kv, record_decodes=is_recorded),
            ),
            prompt_of,
        )
        for is_recorded in (True, False)
    )
    assert len(recorded) == 5
    torch.testing.assert_close(recorded, launched, **NEAR)


@pytest.mark.usefixtures("_no_other_wait")
def test_a_step_waits_for_its_answer_alone(checkpoint, driver, prompt_of):
    torch.cuda.set_sync_debug_mode("default")
    drive = driver(checkpoint(head_dim=16), dtype="bfloat16", placement=Placement(device=GPU))
    drive.runner.model.logits = type(drive.runner.model).logits.__get__(drive.runner.model)
    run(drive, prompt_of)  # compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    drive.add("b", prompt_of(40), temperature=0.8, top_p=0.9, top_k=20)
    drive.add("c", prompt_of(50), temperature=0.8, min_p=0.1, repetition_penalty=1.2)
    for _ in range(6):
        drive.step(chunk=30)


def test_steps_that_overlap_answer_as_one_at_a_time(checkpoint, prompt_of):
    """All come at once and have the same length, so that each step holds the same rows."""
    answers = []
    for depth in (1, 2):
        options = {"device": "cuda", "dtype": "bfloat16", "num_blocks": 200}
        core = EngineCore(
            engine_config(checkpoint(head_dim=16), options), max_steps_in_flight=depth
        )
        for number in range(6):
            wishes = {"repetition_penalty": 1.2} if number % 2 else {}
            params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, **wishes)
            prompt = pack_token_ids(prompt_of(3 + 9 * number, number))
            core.add(AddRequest(f"r{number}", prompt, params))
        said: dict[str, list[int]] = {}
        while core.has_work():
            for output in core.step():
                said.setdefault(output.request_id, []).extend(output.new_token_ids)
        core.shutdown(5.0)
        answers.append(said)
    assert answers[0] == answers[1]


def test_the_pool_is_sized_by_what_is_left(checkpoint, driver):
    from stratakv.engine.worker.runtime.cuda_runtime import CudaMeter

    placement, meter = Placement(device=GPU), CudaMeter(GPU)
    drive = driver(checkpoint(head_dim=16), dtype="bfloat16", placement=placement)
    small, large = pools_of_two_shares(drive.runner, placement, meter)
    expected = 0.2 * meter.total_bytes() / PoolDemand(drive.runner.groups, 4096).block_bytes
    assert large - small == pytest.approx(expected, rel=0.05) or large == 2**24
