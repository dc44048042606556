# SPDX-License-Identifier: Apache-2.0
"""Paged prefill: the Triton kernel and its plain twin against a loop over rows in float64.

Batches and the loop are those of `prefill_batches.py`. Faults planted in the kernel's source show
that these tests can fail.
"""

from __future__ import annotations

import importlib.util
import mmap
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.errors import InterpreterError

from stratakv import kernels
from stratakv.kernels.attention.attention_checks import FP8
from stratakv.kernels.attention.paged_prefill import paged_prefill
from stratakv.kernels.attention.paged_prefill_launch import (
    MAX_GROUP,
    NARROW,
    WIDE,
    WIDE_FP8,
    choose_launch,
    padded_head_dim,
)
from stratakv.kernels.kernel_choice import KernelRefused
from stratakv.kernels.shipped import shipped_configurations

from .prefill_batches import TOLERANCE, Batch, Case, make_batch

pytestmark = pytest.mark.slow

TRITON_MODULE = "stratakv.kernels.attention.paged_prefill_triton"
RAGGED = ((1, 0), (1, 1), (2, 15), (15, 0), (16, 1), (17, 16), (33, 17), (5, 40))


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_ragged_chunks(block_size: int, device: torch.device) -> None:
    make_batch(Case(RAGGED, block_size=block_size), device).check()


@pytest.mark.parametrize("group", [1, 4, 7, 8])
def test_groups(group: int, device: torch.device) -> None:
    case = Case(((40, 30), (1, 90), (3, 0)), heads=2 * group, kv_heads=2, head_dim=128)
    make_batch(case, device).check()


@pytest.mark.parametrize(
    "case",
    [
        Case(((300, 0),), heads=4),
        Case(((130, 200), (1, 255), (1, 256), (1, 257)), heads=1),
        Case(((64, 0), (64, 64), (63, 65), (65, 63)), heads=8, head_dim=128, block_size=64),
    ],
)
def test_long_chunks(case: Case, device: torch.device) -> None:
    make_batch(case, device).check()


@pytest.mark.parametrize("window", [1, 2, 64, 65, 150, 1000])
def test_windows(window: int, device: torch.device) -> None:
    chunks = ((140, 80), (1, 200), (20, 0), (7, 63))
    make_batch(Case(chunks, window=window), device).check()


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_soft_cap(softcap: float, window: int | None, device: torch.device) -> None:
    make_batch(Case(((70, 30), (2, 5)), softcap=softcap, window=window), device).check()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
def test_a_score_far_beyond_the_soft_cap(device: torch.device) -> None:
    case = Case(((70, 30),), softcap=0.01, head_dim=16)
    make_batch(case, device).check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits(dtype: torch.dtype, device: torch.device) -> None:
    make_batch(Case(((70, 30), (1, 77)), heads=4, dtype=dtype), device).check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scales_dim", [2, 4])
def test_fp8_pools(scales_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    case = Case(
        ((70, 30), (1, 77), (12, 0)),
        heads=4,
        kv_heads=2,
        dtype=dtype,
        pool_dtype=FP8,
        scales_dim=scales_dim,
    )
    make_batch(case, device).check()
    make_batch(replace(case, window=33, softcap=5.0), device).check()


@pytest.mark.parametrize("head_dim", [16, 24, 80, 96, 256])
def test_head_sizes(head_dim: int, device: torch.device) -> None:
    case = Case(((33, 10), (1, 20)), head_dim=head_dim)
    make_batch(case, device).check()
    fp8 = replace(case, dtype=torch.bfloat16, pool_dtype=FP8, scales_dim=4)
    make_batch(fp8, device).check()


def test_shared_prefix(device: torch.device) -> None:
    batch = make_batch(Case(((20, 64), (9, 64), (33, 80)), heads=4, shared_blocks=4), device)
    tables = batch.tensors[2]
    assert (tables[1:, :4] == tables[0, :4]).all()
    batch.check()


def test_only_decode_rows(device: torch.device) -> None:
    chunks = tuple((1, length - 1) for length in (1, 2, 15, 16, 17, 63, 64, 65, 130))
    make_batch(Case(chunks, heads=4), device).check()


def test_requests_without_rows_and_rows_without_tokens(device: torch.device) -> None:
    # (1, -1) is a padding row: its request has length 0. (3, -2) has rows at -2, -1 and 0.
    chunks = ((0, 20), (5, 3), (1, -1), (0, 0), (0, 7), (3, -2), (70, 2), (0, 0))
    make_batch(Case(chunks), device).check()
    make_batch(Case(chunks, window=4), device).check()


@pytest.mark.regression
def test_y14_a_batch_of_padding_rows_alone_writes_nothing(device: torch.device) -> None:
    batch = make_batch(Case(((0, 20), (0, 3))), device)
    batch.check()
    assert batch.run("triton").isnan().all()


def test_any_max_query_len_gives_the_same_truth(device: torch.device) -> None:
    batch = make_batch(Case(((90, 10), (4, 33)), heads=4), device)
    for claimed in (0, 1, 16, 100_000):
        batch.options["max_query_len"] = claimed
        batch.check("triton")


def test_float64_runs_plain_and_exactly(device: torch.device) -> None:
    batch = make_batch(Case(RAGGED, dtype=torch.float64, window=20, softcap=3.0), device)
    batch.check("plain")
    with pytest.raises(KernelRefused, match="these are float64"):
        batch.run("triton")


def test_plain_cuts_a_long_chunk_into_pieces(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(Case(((90, 10), (4, 33)), window=20), device)
    monkeypatch.setattr("stratakv.kernels.attention.paged_prefill_plain.MAX_SCORES", 2 * 100 * 7)
    batch.check("plain")


def test_without_out_a_new_tensor_comes(device: torch.device) -> None:
    batch = make_batch(Case(((9, 3),)), device)
    rows = 9  # the others are padding
    for kernel in ("plain", "triton"):
        found = paged_prefill(*batch.tensors, **batch.options, kernel=kernel)
        assert found.is_contiguous() and found.dtype == batch.tensors[0].dtype
        assert torch.equal(found[:rows], batch.run(kernel)[:rows])


def test_out_may_be_a_view(device: torch.device) -> None:
    batch = make_batch(Case(((9, 3),), heads=4), device)
    q = batch.tensors[0]
    around = torch.full((len(q), 6, 96), 7.0, dtype=q.dtype, device=device)
    inner = around[:, 1:5, 16:80]
    paged_prefill(*batch.tensors, **batch.options, out=inner, kernel="triton")
    assert torch.equal(inner[:9], batch.run("triton")[:9])
    inner.fill_(7.0)
    assert (around == 7.0).all()


@pytest.mark.parametrize("requests", [0, 2])
def test_nothing_to_do(requests: int, device: torch.device) -> None:
    kv = torch.zeros(2, 2, 16, 1, 64, device=device)
    integers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (requests, requests + 1)]
    tables = torch.zeros(requests, 1, dtype=torch.int32, device=device)
    q = torch.zeros(0, 2, 64, device=device)
    found = paged_prefill(q, kv, tables, *integers, max_query_len=0, scale=1.0)
    assert found.shape == q.shape


def test_a_pool_past_2_31_elements(device: torch.device) -> None:
    _large_batch(device).check()


def _large_batch(device: torch.device) -> Batch:
    """The pool of a small batch with its blocks laid so far apart that the last is past 2^31."""
    batch = make_batch(Case(((20, 10),), dtype=torch.float16), device)
    q, kv, *others = batch.tensors
    stride = (2**31 // (len(kv) - 1) + 64) // 64 * 64
    assert (len(kv) - 1) * stride >= 2**31
    elements = len(kv) * stride
    if device.type == "cuda":
        storage = torch.empty(elements, dtype=kv.dtype, device=device)
    else:
        no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python has the name since 3.13
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
        memory = mmap.mmap(-1, elements * kv.element_size(), flags=flags)
        storage = torch.frombuffer(memory, dtype=kv.dtype)
    far = storage.as_strided(kv.shape, (stride, *kv.stride()[1:]))
    far.copy_(kv)
    batch.tensors = (q, far, *others)
    return batch


MANY = Case(
    ((70, 130), (1, 21)),
    heads=4,
    kv_heads=2,
    dtype=torch.float16,
    pool_dtype=FP8,
    scales_dim=4,
    window=100,
    softcap=3.0,
)
FAULTS = {
    "no causal mask": ("keys[None, :] <= positions[:, None]", "keys[None, :] < key_end"),
    "the diagonal unmasked": (
        "diagonal = tl.maximum(first_position + 1, 0) // BLOCK_N * BLOCK_N",
        "diagonal = key_end // BLOCK_N * BLOCK_N",
    ),
    "a window one too wide": ("> positions[:, None] - window", ">= positions[:, None] - window"),
    "the window's edge unmasked": (
        "inside = (tl.maximum(last_position - window + 1, 0)",
        "inside = (tl.maximum(first_position - window + 1, 0)",
    ),
    "sums not rescaled": ("acc = acc * kept[:, None]", "acc = acc * 1.0"),
    "total not rescaled": ("total = total * kept +", "total = total +"),
    "one unused slot loaded": ("keys < key_end", "keys < key_end + 1"),
    "no soft cap": ("1.0 - 2.0 / (tl.exp2(scores * score_factor) + 1.0)", "scores * 1.0"),
    "scales of K on V": ("weights * (v_scales * SCALE_GAIN)", "weights * (k_scales * SCALE_GAIN)"),
    "the first KV head for all": ("kv_head.to(tl.int64) * kv_head_stride", "kv_head_stride * 0"),
    "the first request's table": (
        "table_ptr += request.to(tl.int64) * table_stride",
        "table_ptr += request.to(tl.int64) * 0",
    ),
}


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a copy of the kernel with one line changed in the kernel's place."""

    def change(old: str, new: str) -> None:
        source = Path(kernels.__path__[0], "attention", "paged_prefill_triton.py").read_text()
        assert old in source, "the fault no longer fits the kernel"
        path = tmp_path / "paged_prefill_triton.py"
        path.write_text(source.replace(old, new))
        spec = importlib.util.spec_from_file_location(TRITON_MODULE, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, TRITON_MODULE, module)
        spec.loader.exec_module(module)

    return change


def test_without_a_planted_fault_there_is_none_to_catch(device: torch.device) -> None:
    make_batch(MANY, device).check()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, plant: Any, device: torch.device) -> None:
    batch = make_batch(MANY, device)
    plant(*FAULTS[fault])
    assert batch.difference("triton") > 10 * TOLERANCE[MANY.dtype]


def test_a_slot_loaded_before_the_window_is_caught(plant: Any, device: torch.device) -> None:
    batch = make_batch(Case(((70, 130), (1, 21)), window=100), device)
    batch.check("triton")
    plant("keys >= key_begin", "keys >= key_begin - 1")
    assert batch.difference("triton") > 10 * TOLERANCE[torch.float16]


def test_a_planted_32_bit_offset_is_caught(plant: Any, device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip(
            "a wild address would end the process; the interpreter's guard is what is shown"
        )
    batch = _large_batch(device)
    plant("blocks.to(tl.int64) * kv_block_stride", "blocks * kv_block_stride")
    with pytest.raises(InterpreterError, match="should be 64-bit"):
        batch.run("triton")


def test_tiles_hold_the_rows_of_a_token_and_the_table_has_a_row_for_every_head() -> None:
    for table in (WIDE, WIDE_FP8, NARROW):
        assert all(launch.block_rows >= MAX_GROUP for pair in table.values() for launch in pair)
        assert max(table) == padded_head_dim(129) == 256
    for capability in (None, (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        for head_dim in (16, 64, 65, 128, 256):
            for is_fp8 in (False, True):
                short = choose_launch(capability, head_dim, 4, 16, is_fp8=is_fp8)
                assert short.block_rows == 64 >= 4 * 16
                long = choose_launch(capability, head_dim, 4, 17, is_fp8=is_fp8)
                assert long.block_rows == (64 if head_dim == 256 else 128)


def test_shipped_configurations_cover_every_row_of_the_table() -> None:
    shipped = {
        (c.constexprs["BLOCK_M"], c.constexprs["BLOCK_N"], c.num_warps, c.num_stages)
        for c in shipped_configurations()
        if c.name.startswith("paged_prefill.")
    }
    for table in (WIDE, WIDE_FP8, NARROW):
        for pair in table.values():
            for row in pair:
                assert (row.block_rows, row.block_keys, row.num_warps, row.num_stages) in shipped
