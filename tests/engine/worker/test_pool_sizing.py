# SPDX-License-Identifier: Apache-2.0
"""How many blocks a GPU has room for, and what is said where it has not."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from stratakv.engine.cache.group_spec import plan_groups
from stratakv.engine.models.checkpoint.tensor_shapes import expected_tensors
from stratakv.engine.models.decoder import Decoder
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.models.vision.vision_loading import load_vision_encoder
from stratakv.engine.models.vision.vision_shapes import encoder_bytes, weight_shapes
from stratakv.engine.plan.memory_plan import activation_bytes, weight_bytes
from stratakv.engine.worker.pool_demand import PoolDemand
from stratakv.engine.worker.runtime.placement import KERNELS, Placement
from stratakv.engine.worker.runtime.pool_sizing import (
    RESERVE_BYTES,
    MemoryUse,
    check_free,
    check_weights,
    pool_blocks,
)
from stratakv.engine.worker.runtime.runtimes import PoolSizer, check_kernels
from stratakv.kernels.kernel_choice import TRITON, Hardware
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.settings.values import GIB, MAX_BLOCKS, MIB, ConfigError

from ...kernels.other_hardware import other_hardware
from ..picture_model import make_picture_model
from .pool_shares import pools_of_two_shares

BY_TRITON = {"attention_backend": TRITON, "strict_kernels": False}
# Llama-3.1-8B in bfloat16: 2 MiB a block.
LAYOUT = BlockLayout(32, 16, 8, 128, "bfloat16")
POOL = PoolDemand(plan_groups(LAYOUT), 2048)
USE = MemoryUse(
    total_bytes=80 * GIB,
    free_before_bytes=79 * GIB,
    free_after_bytes=61 * GIB,
    held_after_bytes=17 * GIB,
    weight_bytes=15 * GIB,
    peak_bytes=17 * GIB,
)


def test_the_pool_is_what_weights_steps_libraries_and_reserve_leave_of_the_share():
    assert LAYOUT.page_bytes == 2 * MIB
    assert USE.outside_bytes == 1 * GIB
    blocks = pool_blocks(USE, POOL, 8192, 0.9)
    assert blocks == (72 * GIB - 18 * GIB - RESERVE_BYTES) // LAYOUT.page_bytes
    half = pool_blocks(
        USE, PoolDemand(plan_groups(replace(LAYOUT, kv_dtype="fp8_e4m3")), 2048), 8192, 0.9
    )
    assert 2 * blocks <= half <= 2 * blocks + 1
    # What others free meanwhile is nobody's loss.
    assert replace(USE, free_after_bytes=70 * GIB).outside_bytes == 0


def test_no_pool_has_more_blocks_than_tables_can_name():
    tiny = PoolDemand(plan_groups(BlockLayout(1, 1, 1, 8, "fp8_e4m3")), 2048)
    assert pool_blocks(USE, tiny, 8192, 0.9) == MAX_BLOCKS


def test_what_does_not_fit_is_said_with_what_helps():
    small = replace(USE, total_bytes=24 * GIB, free_before_bytes=24 * GIB, free_after_bytes=6 * GIB)
    with pytest.raises(ConfigError) as refusal:
        pool_blocks(small, POOL, 65536, 0.9)
    text = str(refusal.value)
    assert "21.60 GiB of GPU memory (--gpu-memory-utilization 0.9 of 24.00 GiB)" in text
    assert "weights of 15.00 GiB, steps of 2.00 GiB" in text
    assert "request of 65536 tokens, 8.00 GiB" in text
    assert "lower --max-model-len to " in text and "--kv-cache-dtype fp8_e4m3" in text
    assert "raise --gpu-memory-utilization" not in text, "no share would be enough"
    fits = int(text.split("lower --max-model-len to ")[1].split(",")[0])
    assert pool_blocks(small, POOL, fits, 0.9) * 16 >= fits
    with pytest.raises(ConfigError):
        pool_blocks(small, POOL, fits + 16, 0.9)


def test_a_share_that_would_do_is_named():
    with pytest.raises(ConfigError) as refusal:
        pool_blocks(USE, POOL, 65536, 0.3)
    share = float(str(refusal.value).split("raise --gpu-memory-utilization to ")[1].split(",")[0])
    assert 0.3 < share < 0.4
    assert pool_blocks(USE, POOL, 65536, share) > 4096


def test_a_model_that_leaves_nothing_asks_for_a_smaller_one():
    full = replace(USE, peak_bytes=79 * GIB, weight_bytes=78 * GIB)
    with pytest.raises(ConfigError, match="take a smaller model"):
        pool_blocks(full, POOL, 8192, 0.9)


def test_memory_that_others_hold_is_named_before_anything_is_loaded():
    check_free(80 * GIB, 72 * GIB, 0.9)
    with pytest.raises(ConfigError) as refusal:
        check_free(80 * GIB, 50 * GIB, 0.9)
    text = str(refusal.value)
    assert "asks for 72.00 GiB of the GPU's 80.00 GiB, and 50.00 GiB are free" in text
    assert "lower --gpu-memory-utilization to 0.62 or" in text
    check_free(80 * GIB, 50 * GIB, 0.62)
    with pytest.raises(ConfigError, match="are free; stop what holds"):
        check_free(80 * GIB, 0, 0.9)
    check_weights(15 * GIB, 15 * GIB)
    with pytest.raises(ConfigError, match=r"weights take 15.00 GiB and 10.00 GiB of the GPU"):
        check_weights(15 * GIB, 10 * GIB)


class Meter:
    """Counts the largest tensor of a step, as an allocator would its memory."""

    def __init__(self, total_bytes: int = 10 * GIB) -> None:
        self.resets = 0
        self._total_bytes = total_bytes

    def total_bytes(self) -> int:
        return self._total_bytes

    def free_bytes(self) -> int:
        return self._total_bytes - self.held_bytes()

    def held_bytes(self) -> int:
        return 1 * GIB if self.resets else 0

    def peak_bytes(self) -> int:
        assert self.resets
        return 2 * GIB

    def reset_peak(self) -> None:
        self.resets += 1


def test_two_shares_of_one_memory_differ_by_the_blocks_between_them(checkpoint, driver):
    """What `test_on_gpu.py` asks of a GPU, of a meter that stands for one."""
    drive = driver(checkpoint())
    small, large = pools_of_two_shares(drive.runner, Placement(), Meter(80 * GIB))
    expected = 0.2 * 80 * GIB / PoolDemand(drive.runner.groups, 4096).block_bytes
    assert large - small == pytest.approx(expected, rel=0.05)


def test_the_largest_step_is_run_between_the_measurements(checkpoint, monkeypatch):
    spec = load_model_spec(path := checkpoint())
    model = Decoder.load(path, spec, 64, torch.float64)
    seen = []
    compute = Decoder.logits

    def recorded(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        return compute(self, hidden)

    monkeypatch.setattr(Decoder, "logits", recorded)
    sizer = PoolSizer(Placement(memory_share=0.5), meter := Meter())
    layout = spec.layout(16, "float64")
    demand = PoolDemand(plan_groups(layout), 33)
    blocks = sizer.blocks(model, demand, max_model_len=64, max_tokens=33, max_requests=7)
    assert meter.resets == 1
    assert seen == [7, 7], "one step waits while the next is computed"
    assert blocks == (3 * GIB - RESERVE_BYTES) // layout.page_bytes


def test_the_largest_picture_is_encoded_before_the_pool_is_sized(tmp_path: Path) -> None:
    """The host estimates the memory of encoding, and the encoder's weights count."""
    path = make_picture_model(tmp_path, "qwen3_vl")
    spec = load_model_spec(path)
    model = Decoder.load(path, spec, 64, torch.float64)
    encoder = load_vision_encoder(path, spec.vision, spec.hidden_size, torch.float64)
    seen: list[tuple[int, ...]] = []

    class Recorded:
        def encode_pictures(self, pictures: list[np.ndarray], /) -> list[torch.Tensor]:
            seen.extend(each.shape for each in pictures)
            return encoder.encode_pictures(pictures)

    demand = PoolDemand(plan_groups(spec.layout(16, "float64")), 33)
    sizes = {"max_model_len": 64, "max_tokens": 33, "max_requests": 7}
    sizer = PoolSizer(Placement(memory_share=0.5), Meter())
    sizer.blocks(model, demand, **sizes, encoder=Recorded())
    assert seen == [(64, 64, 3)], "the processor takes 4,096 pixels, and a token has 16 a side"
    of_text = sum(math.prod(shape) for shape in expected_tensors(spec).values())
    stored = load_file(path / "model.safetensors").values()
    assert weight_bytes(weight_shapes(spec), "float64") == 8 * sum(t.numel() for t in stored)
    assert of_text < sum(math.prod(shape) for shape in weight_shapes(spec).values())
    without = replace(spec, vision=None)
    more = activation_bytes(spec, "float64") - activation_bytes(without, "float64")
    assert more == encoder_bytes(spec.vision, 8) > 64 * 64 * 3 * 4


def test_a_step_that_triton_cannot_compile_is_told_as_such(checkpoint, monkeypatch):
    """It is the first to launch a kernel, where the pool is sized by what is left."""
    errors = pytest.importorskip("triton.runtime.errors")
    spec = load_model_spec(path := checkpoint())
    model = Decoder.load(path, spec, 64, torch.float64)

    def refuse(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        raise errors.PTXASError("ptxas is of another version")

    monkeypatch.setattr(Decoder, "logits", refuse)
    sizer = PoolSizer(Placement(memory_share=0.5), Meter())
    demand = PoolDemand(plan_groups(spec.layout(16, "float64")), 33)
    with pytest.raises(ConfigError, match=r"PTXASError.*another version; it needs a C compiler"):
        sizer.blocks(model, demand, max_model_len=64, max_tokens=33, max_requests=7)


@pytest.mark.parametrize(
    ("changes", "dtype", "placement", "reason"),
    [
        ({}, torch.bfloat16, {}, None),
        ({}, torch.bfloat16, {"kv_cache_dtype": "fp8_e4m3"}, None),
        ({}, torch.float64, {}, "float64"),
        ({"num_heads": 128, "num_kv_heads": 1}, torch.bfloat16, {}, "32 heads share a kv head"),
        ({"num_heads": 128, "num_kv_heads": 1}, torch.bfloat16, {"strict_kernels": False}, None),
        ({"head_dim": 320}, torch.bfloat16, {}, "at most 256 elements"),
        ({"head_dim": 320}, torch.bfloat16, BY_TRITON, "at most 256 elements"),
        ({}, torch.bfloat16, BY_TRITON, None),
        ({"hidden_size": 65_536}, torch.bfloat16, {}, "rows of up to 32768"),
    ],
)
def test_heads_that_no_kernel_takes_are_refused_before_the_weights_are_read(
    checkpoint, changes, dtype, placement, reason
):
    spec = replace(load_model_spec(checkpoint()), **{"head_dim": 16} | changes)
    strict = Placement(**{"attention_backend": KERNELS, "strict_kernels": True} | placement)
    flag = "strict-kernels" if strict.attention_backend == KERNELS else "attention-backend triton"
    with other_hardware(lambda: Hardware("H100", (9, 0), has_triton=True)):
        if reason is None:
            check_kernels(spec, strict, dtype)
        else:
            with pytest.raises(ConfigError, match=f"--{flag} refuses .*{reason}.*without the"):
                check_kernels(spec, strict, dtype)
