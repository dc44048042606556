# SPDX-License-Identifier: Apache-2.0
"""Paged decode against a float64 loop over requests and heads, for both implementations.

Batches and the loop are those of `decode_batches.py`; memory that a call takes begins as NaN.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import InterpreterError

from stratakv.kernels.attention.attention_checks import FP8
from stratakv.kernels.attention.paged_decode import MAX_GROUP, paged_decode
from stratakv.kernels.attention.paged_decode_launch import (
    HEAD_SIZES,
    MAX_SPLITS,
    MIN_SPLIT_TOKENS,
    NEWEST,
    choose_launch,
    choose_splits,
)
from stratakv.kernels.kernel_choice import FP8_CAPABILITY, PLAIN, TRITON, KernelRefused
from stratakv.kernels.shipped import shipped_configurations

from .decode_batches import assert_right, by_definition, make_case

pytestmark = pytest.mark.slow

INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="in the interpreter: TRITON_INTERPRET=1"
)
BOTH = pytest.mark.parametrize("kernel", [PLAIN, TRITON])


@pytest.fixture(autouse=True)
def _nan_in_new_memory() -> Iterator[None]:
    """Workspaces and results begin as NaN, so that reading what nobody wrote is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert bool(torch.ones(1).new_empty(3).isnan().all())
    yield
    torch.use_deterministic_algorithms(False)


def ragged(block_size: int) -> list[int]:
    return [2 * block_size + 3, block_size + 1, 0, 1, block_size - 1, block_size]


@BOTH
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_ragged_lengths(device, kernel, block_size):
    case = make_case(device, ragged(block_size), block_size=block_size)
    assert_right(case, case.run(kernel))


@BOTH
@pytest.mark.parametrize("group", [1, 4, 7, 8, 17])
def test_groups(device, kernel, group):
    case = make_case(device, [67, 5], group=group, dtype=torch.float16)
    assert_right(case, case.run(kernel))


@BOTH
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 4])
def test_head_sizes(device, kernel, head_dim, group):
    case = make_case(device, [35, 1], head_dim=head_dim, group=group, kv_heads=1)
    assert_right(case, case.run(kernel))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 4])
def test_types(device, kernel, dtype, group):
    case = make_case(device, [70, 16], group=group, dtype=dtype, num_splits=2)
    assert_right(case, case.run(kernel))


@BOTH
@pytest.mark.parametrize("num_splits", [1, 2, 3, 20])
def test_splits(device, kernel, num_splits):
    # Of tiles of 64: three, one and a bit, one, none; more splits than tiles leave some empty.
    lengths = [191, 65, 64, 0]
    case = make_case(device, lengths, kv_heads=1, block_size=32, num_splits=num_splits)
    assert_right(case, case.run(kernel))


def test_more_splits_than_the_combine_kernel_holds_at_a_time(device):
    # Tiles of 16 tokens: 19 of them, combined in two rounds.
    case = make_case(device, [300], group=1, kv_heads=1, head_dim=256, num_splits=19)
    assert choose_launch(None, 1, 256, torch.float32).tile == 16
    assert_right(case, case.run(TRITON))


@BOTH
@pytest.mark.parametrize("window", [1, 16, 17, 70, 500])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_windows(device, kernel, window, num_splits):
    lengths = [200, 64, 1, 0]
    case = make_case(device, lengths, kv_heads=1, window=window, num_splits=num_splits)
    assert_right(case, case.run(kernel))


def test_tiles_before_the_window_are_not_visited(device):
    """Their blocks may be anyone's by now: the ids there are out of the pool."""
    case = make_case(device, [200], kv_heads=1, window=50)
    case.block_tables[0, :9] = 2**31 - 1
    expected = by_definition(case)
    for kernel in (PLAIN, TRITON):
        torch.testing.assert_close(case.run(kernel).cpu().double(), expected, rtol=1e-5, atol=1e-5)


@BOTH
@pytest.mark.parametrize("group", [1, 4])
def test_soft_cap(device, kernel, group):
    # Scores far beyond the cap, on both sides.
    case = make_case(device, [66, 9], group=group, kv_heads=1, scale=5.0, softcap=3.0)
    assert_right(case, case.run(kernel))


@BOTH
def test_scores_that_overflow_exp(device, kernel):
    case = make_case(device, [130, 9], kv_heads=1, scale=40.0, num_splits=2)
    # Neighbours of such scores in float32 are 1e-4 apart, which is what near ties differ by.
    found, expected = case.run(kernel).cpu().double(), by_definition(case)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@BOTH
@pytest.mark.parametrize("scales", ["head", "token"])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float8(device, kernel, scales, group, dtype):
    case = make_case(
        device, [70, 17, 0], group=group, dtype=dtype, pool_dtype=FP8, scales=scales, num_splits=2
    )
    assert_right(case, case.run(kernel))


def test_float8_with_tiny_scales_keeps_its_precision(device):
    """A probability times such a scale is below what float16 can tell from zero."""
    case = make_case(device, [64], kv_heads=1, pool_dtype=FP8, scales="token", window=None)
    case.options["kv_scales"] *= 1e-6
    assert_right(case, case.run(TRITON))


def test_float64_is_for_the_plain_twin(device):
    case = make_case(device, [40, 7, 0], dtype=torch.float64, softcap=4.0, window=30)
    assert_right(case, case.run(PLAIN))
    with pytest.raises(KernelRefused, match="these are float64"):
        case.run(TRITON)


@BOTH
def test_out_may_be_given_and_strided(device, kernel):
    case = make_case(device, [20, 0], num_splits=2)
    requests, heads, head_dim = case.q.shape
    wide = torch.full((requests, 2, heads, head_dim), math.nan, device=device)
    returned = case.run(kernel, lambda *a, **o: paged_decode(*a, out=wide[:, 1], **o))
    assert returned.data_ptr() == wide[:, 1].data_ptr()
    assert_right(case, wide[:, 1])
    assert bool(wide[:, 0].isnan().all())


@BOTH
def test_no_requests(device, kernel):
    case = make_case(device, [3])
    empty = replace(
        case, q=case.q[:0], block_tables=case.block_tables[:0], seq_lens=case.seq_lens[:0]
    )
    assert empty.run(kernel).shape == (0, 8, 64)


@BOTH
def test_a_pool_past_32_bit_offsets(device, kernel, tmp_path):
    """More than 2^31 elements lie between the first block and the last, of which three are real."""
    num_blocks, block_size, head_dim = 2**21 + 5, 16, 64
    shape = (num_blocks, 2, block_size, 1, head_dim)
    if device.type == "cuda":
        kv = torch.empty(shape, dtype=torch.float16, device=device)
    else:
        # A sparse file: pages become real when they are written.
        size = math.prod(shape)
        kv = torch.from_file(str(tmp_path / "pool"), shared=True, size=size, dtype=torch.float16)
        kv = kv.view(shape)
    blocks = [0, num_blocks - 1, 2**20 + 1]
    small = make_case(device, [40], kv_heads=1, dtype=torch.float16)
    kv[blocks] = small.kv[small.block_tables[0].long()]
    big = replace(small, kv=kv, block_tables=torch.tensor([blocks], dtype=torch.int32).to(device))
    assert kv.stride(0) * (num_blocks - 1) > 2**31
    torch.testing.assert_close(
        big.run(kernel).cpu().double(), by_definition(small), rtol=2e-3, atol=2e-3
    )


@pytest.fixture
def mutate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Replaces one piece of the Triton kernel's source for the rest of the test."""
    name = "stratakv.kernels.attention.paged_decode_triton"
    source = Path(importlib.util.find_spec(name).origin).read_text()

    def replace_source(old: str, new: str) -> None:
        assert source.count(old) == 1, f"the source has {source.count(old)} of {old!r}"
        path = tmp_path / "mutated.py"  # Triton reads the source of its kernels from their file
        path.write_text(source.replace(old, new))
        spec = importlib.util.spec_from_file_location("stratakv.kernels.attention.mutated", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setitem(sys.modules, name, module)

    return replace_source


FAULTS = {
    "no mask beyond the length": ("(tokens < length) & (tokens >=", "(tokens >="),
    "no mask before the window": (" & (tokens >= length - window)", ""),
    "values are not masked": (
        "v = tl.load(values + places, mask=there, other=0.0)",
        "v = tl.load(values + places)",
    ),
    "scores are not masked": ('scores = tl.where(seen[None, :], scores, float("-inf"))', ""),
    "the sum does not fade": ("total = total * fade + tl.sum(p", "total = total + tl.sum(p"),
    "the output does not fade": ("acc *= fade[:, None]", ""),
    "partials are not weighed": ("weights = tl.exp2(maxima - new_top)", "weights = sums * 0 + 1"),
    "partial sums are not used": ("weights * sums, axis", "weights, axis"),
    "unused partials are read": ("there = splits < used", "there = splits >= 0"),
    "32-bit offsets": ("other=0).to(tl.int64)", "other=0)"),
    "the next kv head": ("keys = kv + kv_head *", "keys = kv + (kv_head ^ 1) *"),
}


def check_closely(device: torch.device, tmp_path: Path) -> None:
    """Several tiles a split, an unused split, a window, and blocks that only one request sees."""
    case = make_case(device, [200, 10, 33, 70], window=150, num_splits=2)
    assert_right(case, case.run(TRITON))
    test_a_pool_past_32_bit_offsets(device, TRITON, tmp_path)


@INTERPRETED
def test_the_unmutated_source_passes(device, mutate, tmp_path):
    mutate("LOG2_E = math.log2(math.e)", "LOG2_E = math.log2(math.e)  # the same")
    check_closely(device, tmp_path)


@INTERPRETED
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(device, mutate, fault, tmp_path):
    """Not on a device, where some of these would read wild addresses."""
    mutate(*FAULTS[fault])
    with pytest.raises((AssertionError, InterpreterError)):
        check_closely(device, tmp_path)


def test_the_device_decides_how_many_splits(device):
    """Chosen by the table's width; a short request beside a long one uses fewer of them."""
    assert choose_splits(1, 608, 1, 64) == 4
    case = make_case(device, [600, 100], kv_heads=1)
    assert_right(case, case.run(TRITON))


def test_splits_fill_the_device_and_are_worth_their_combination():
    assert choose_splits(8, 131072, 132, 64) == 64
    assert choose_splits(8 * 64, 1024, 132, 64) == 1
    assert choose_splits(8 * 256, 131072, 132, 64) > 1
    assert choose_splits(8, 1024, 132, 64) == 8
    assert choose_splits(1, 127, 132, 64) == 1
    assert choose_splits(1, 2**20, 132, 64) == MAX_SPLITS


@pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, 0.9), (FP8, 0.88)])
def test_no_wave_is_wasted_where_there_is_work_for_every_program(dtype, least):
    """By the model of waves alone: the tiles that there are, over those that a full device would
    have done meanwhile, for one of the largest devices and requests of a model of 8 kv heads."""
    launch = choose_launch(NEWEST, 4, 128, dtype)
    slots = 132 * launch.programs
    for requests in range(1, 257):
        for max_tokens in (8192, 16384, 32768, 65536, 131072):
            pairs, tiles = 8 * requests, max_tokens // launch.tile
            splits = choose_splits(pairs, max_tokens, 132, launch.tile, launch.programs)
            share = -(-tiles // splits)
            programs = pairs * -(-tiles // share)
            if pairs * max_tokens < slots * 2 * MIN_SPLIT_TOKENS:
                continue
            used = pairs * tiles / (slots * -(-programs // slots) * share)
            assert used >= least, (requests, max_tokens, splits)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), None])
def test_every_pool_that_runs_has_a_row(capability):
    fp8 = [FP8] if (capability or NEWEST) >= FP8_CAPABILITY else []
    for dtype in (torch.float16, torch.bfloat16, torch.float32, *fp8):
        for group in (1, 2, 17, MAX_GROUP):
            for head_dim in (1, 63, *HEAD_SIZES):
                for token_scales in (False, True) if dtype == FP8 else (False,):
                    launch = choose_launch(capability, group, head_dim, dtype, token_scales)
                    assert launch.group_pad >= group and launch.head_pad >= head_dim
                    assert (launch.group_pad == 1) == (group == 1)


def test_configurations_have_names_of_their_own():
    shipped = shipped_configurations()
    assert len({one.name for one in shipped}) == len(shipped)
