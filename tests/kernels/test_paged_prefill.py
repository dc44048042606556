# SPDX-License-Identifier: Apache-2.0
"""Paged prefill: the Triton kernel and its plain twin against a loop over rows in float64.

The truth knows nothing of blocks: it is computed from the keys that a batch was made from. Every
slot that no request uses holds NaN, and so does `out` before a run.
"""

from __future__ import annotations

import importlib.util
import math
import mmap
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import InterpreterError

from stratakv import kernels
from stratakv.kernels.choice import KernelRefused
from stratakv.kernels.paged_prefill import FP8, paged_prefill
from stratakv.kernels.paged_prefill_launch import (
    MAX_GROUP,
    NARROW,
    WIDE,
    choose_launch,
    padded_head_dim,
    shipped_configurations,
)

NAN = float("nan")
FP8_NAN = 0x7F
TRITON_MODULE = "stratakv.kernels.paged_prefill_triton"
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 5e-6,
    torch.float16: 3e-3,
    torch.bfloat16: 2e-2,
}


@dataclass(frozen=True)
class Case:
    """A batch to lay down in a pool."""

    chunks: tuple[tuple[int, int], ...]  # new tokens of each request, and the tokens before them
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype | None = None
    scales_dim: int = 0
    window: int | None = None
    softcap: float | None = None
    shared_blocks: int = 0  # the first blocks of all requests are the same ones


@dataclass
class Batch:
    """The arguments of a call, and the rows that are expected."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    options: dict[str, Any]
    expected: Tensor

    def run(self, kernel: str) -> Tensor:
        q = self.tensors[0]
        out = torch.full_like(q, NAN, memory_format=torch.contiguous_format)
        result = paged_prefill(*self.tensors, **self.options, out=out, kernel=kernel)
        assert result is out
        return out

    def difference(self, kernel: str) -> float:
        """The largest, infinite if a row is NaN that should not be or the other way round."""
        found = self.run(kernel).double().cpu()
        if not torch.equal(found.isnan(), self.expected.isnan()):
            return math.inf
        return (found - self.expected).abs().nan_to_num(0).max().item()

    def check(self, *names: str) -> None:
        for kernel in names or ("plain", "triton"):
            assert self.difference(kernel) < TOLERANCE[self.tensors[0].dtype], kernel


def make_batch(case: Case, device: torch.device) -> Batch:
    if device.type == "cuda" and case.dtype == torch.float32:
        case = replace(case, dtype=torch.float16)  # the device's kernel takes no float32
    pool_dtype = case.pool_dtype or case.dtype
    lengths = [new + before for new, before in case.chunks]
    widths = [-(-length // case.block_size) for length in lengths]
    shared = case.shared_blocks
    num_blocks = 3 + sum(widths)
    # The pool's last block is a request's first or, where blocks are shared, everybody's.
    free = [num_blocks - 1, *(torch.randperm(num_blocks - 2) + 1).tolist()]
    tables = torch.zeros(len(lengths), max(widths) + 1, dtype=torch.int32)
    for request, width in enumerate(widths):
        own = [free.pop(0) for _ in range(width)]
        tables[request, :width] = torch.tensor(own)
        tables[request, : min(shared, width)] = tables[0, : min(shared, width)]

    pool = torch.full((num_blocks, 2, 2, case.block_size, case.kv_heads, case.head_dim), NAN)
    pool[0] = 0  # the null block
    scales = _make_scales(case, num_blocks)
    truth: list[Tensor] = []  # [2, length, kv heads, head_dim]: what each request has cached
    for request, length in enumerate(lengths):
        ids = tables[request, : widths[request]].long()
        fresh = torch.randn(len(ids), 2, case.block_size, case.kv_heads, case.head_dim)
        if request and shared:
            fresh[:shared] = pool[ids[:shared], 1]
        elif scales is not None:
            fresh = (fresh * 100).clamp(-448, 448)  # a scale of about 0.01 brings it back
        slots = fresh.transpose(1, 2).flatten(0, 1)
        slots[length:] = NAN
        fresh = slots.unflatten(0, (-1, case.block_size)).transpose(1, 2)
        pool[ids, 1] = fresh
        stored = fresh.to(pool_dtype).double()
        if scales is not None:
            of_blocks = scales.double() if case.scales_dim == 2 else scales[ids].double()
            stored = stored * (
                of_blocks[:, None, :, None] if case.scales_dim == 2 else of_blocks[..., None]
            )
        truth.append(stored.transpose(1, 2).flatten(0, 1)[:length].transpose(0, 1))

    num_tokens = sum(new for new, _ in case.chunks)
    # q is a slice of a wider tensor, as behind a fused projection, and three rows are padding.
    wide = torch.randn(num_tokens + 3, case.heads + 2 * case.kv_heads, case.head_dim)
    q = wide.to(case.dtype)[:, : case.heads]
    starts = [0]
    for new, _ in case.chunks:
        starts.append(starts[-1] + new)
    scale = case.head_dim**-0.5
    expected = torch.full(q.shape, NAN, dtype=torch.float64)
    for request, (new, before) in enumerate(case.chunks):
        for i in range(new):
            row = starts[request] + i
            expected[row] = _attend_one(q[row].double(), truth[request], before + i, case, scale)
    if scales is not None and case.scales_dim == 4:
        unused = pool[:, 1, 0, :, 0, 0].isnan()
        scales.transpose(1, 2)[unused] = NAN
    tensors = (
        q.to(device),
        pool.to(pool_dtype).to(device)[:, 1],
        tables.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
    )
    options = {
        "max_query_len": max(new for new, _ in case.chunks),
        "scale": scale,
        "window": case.window,
        "softcap": case.softcap,
        "kv_scales": None if scales is None else scales.to(device),
    }
    return Batch(tensors, options, expected)


def _make_scales(case: Case, num_blocks: int) -> Tensor | None:
    """About 0.01, another for each place. The ones of tokens are a layer of two, as their pool."""
    if case.scales_dim == 2:
        return torch.rand(2, case.kv_heads) * 0.01 + 0.005
    if case.scales_dim == 4:
        shape = (num_blocks, 2, 2, case.block_size, case.kv_heads)
        return (torch.rand(shape) * 0.01 + 0.005)[:, 1]
    return None


def _attend_one(q: Tensor, cached: Tensor, position: int, case: Case, scale: float) -> Tensor:
    """The definition, for one token: `[heads, head_dim]`."""
    if position < 0:
        return torch.zeros_like(q)
    first = 0 if case.window is None else max(0, position - case.window + 1)
    result = torch.empty_like(q)
    for head in range(case.heads):
        k, v = cached[:, first : position + 1, head * case.kv_heads // case.heads]
        scores = k @ q[head] * scale
        if case.softcap is not None:
            scores = case.softcap * (scores / case.softcap).tanh()
        result[head] = scores.softmax(0) @ v
    return result


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


def test_a_batch_of_padding_rows_alone_writes_nothing(device: torch.device) -> None:
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
    monkeypatch.setattr("stratakv.kernels.paged_prefill_plain.MAX_SCORES", 2 * 100 * 7)
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
        source = Path(kernels.__path__[0], "paged_prefill_triton.py").read_text()
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
    for table in (WIDE, NARROW):
        assert all(launch.block_rows >= MAX_GROUP for pair in table.values() for launch in pair)
        assert max(table) == padded_head_dim(129) == 256
    for capability in (None, (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        for head_dim in (16, 64, 65, 128, 256):
            short = choose_launch(capability, head_dim, 4, 16)
            assert short.block_rows == 64 >= 4 * 16
            long = choose_launch(capability, head_dim, 4, 17)
            assert long.block_rows == (64 if head_dim == 256 else 128)


def test_shipped_configurations_cover_every_row_of_the_table() -> None:
    shipped = {
        (c.constexprs["BLOCK_M"], c.constexprs["BLOCK_N"], c.num_warps, c.num_stages)
        for c in shipped_configurations()
    }
    for table in (WIDE, NARROW):
        for pair in table.values():
            for row in pair:
                assert (row.block_rows, row.block_keys, row.num_warps, row.num_stages) in shipped


VALID = Case(((9, 3), (1, 4)), heads=4, kv_heads=2)


def _refused(batch: Batch, match: str, **options: Any) -> None:
    for kernel in ("plain", "triton", "auto"):
        with pytest.raises(KernelRefused, match=match):
            paged_prefill(*batch.tensors, **{**batch.options, "kernel": kernel, **options})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_query_len": -1}, "max_query_len of 0 or more, got -1"),
        ({"scale": 0.0}, "a scale above 0, got 0.0"),
        ({"scale": NAN}, "a scale above 0, got nan"),
        ({"window": 0}, "a window of 1 token or more, got 0"),
        ({"softcap": 0.0}, "a softcap above 0, got 0.0"),
        ({"kv_scales": torch.ones(2, 2)}, "no kv_scales beside a pool of torch.float16"),
        (
            {"out": torch.zeros(13, 4, 64)},
            "expected out as q, torch.float16 of .*got torch.float32",
        ),
        ({"out": torch.zeros(1, 4, 64).half()}, r"got torch.float16 of \[1, 4, 64\]"),
        ({"kernel": "cutlass"}, "one of auto, triton, plain, not 'cutlass'"),
    ],
)
def test_refused_options(options: dict[str, Any], match: str, device: torch.device) -> None:
    _refused(make_batch(replace(VALID, dtype=torch.float16), device), match, **options)


@pytest.mark.parametrize(
    ("which", "change", "match"),
    [
        (0, lambda q: q[0], r"q of \[tokens, heads, head_dim\], got \[4, 64\]"),
        (0, lambda q: q[:, :3], "multiple of the 2 kv heads, got 3"),
        (0, lambda q: q.bfloat16(), "got torch.bfloat16 and torch.float16"),
        (0, lambda q: q.int(), "got torch.int32 and torch.float16"),
        (0, lambda q: q.mT.contiguous().mT, "expected q contiguous in its last axis"),
        (1, lambda kv: kv[:, :1], r"expected kv of \[num_blocks, 2, block_size, kv heads, 64\]"),
        (1, lambda kv: kv[..., :32], "expected kv of .*got"),
        (1, lambda kv: kv[:0], "not empty"),
        (2, lambda tables: tables.long(), "block_tables of torch.int32, got torch.int64"),
        (2, lambda tables: tables[0], r"block_tables of \[requests, max_blocks\]"),
        (3, lambda lengths: lengths[:1], r"seq_lens of \[2\] beside .* got \[1\]"),
        (3, lambda lengths: lengths.long(), "seq_lens of torch.int32"),
        (4, lambda starts: starts[:2], r"query_starts of \[3\] beside .* got \[2\]"),
        (4, lambda starts: starts.float(), "query_starts of torch.int32"),
        (4, lambda starts: starts.to("meta"), "expected one device, got .*meta"),
    ],
)
def test_refused_tensors(which: int, change: Any, match: str, device: torch.device) -> None:
    batch = make_batch(replace(VALID, dtype=torch.float16), device)
    tensors = list(batch.tensors)
    tensors[which] = change(tensors[which])
    batch.tensors = tuple(tensors)
    _refused(batch, match)


def test_refused_scales(device: torch.device) -> None:
    case = replace(VALID, dtype=torch.float16, pool_dtype=FP8, scales_dim=2)
    batch = make_batch(case, device)
    scales = batch.options["kv_scales"]
    _refused(batch, "kv_scales beside a pool of torch.float8_e4m3fn, got none", kv_scales=None)
    _refused(
        batch, r"float32 kv_scales of \[2, 2\] or .*got torch.float16", kv_scales=scales.half()
    )
    _refused(batch, r"got torch.float32 of \[1, 2\]", kv_scales=scales[:1])
    _refused(batch, "kv_scales contiguous in its last axis", kv_scales=scales.T.contiguous().T)


@pytest.mark.parametrize(
    ("case", "match"),
    [
        (replace(VALID, head_dim=8), "heads of 16 to 256 elements, and these 8"),
        (replace(VALID, head_dim=272), "heads of 16 to 256 elements, and these 272"),
        (replace(VALID, heads=65, kv_heads=1, head_dim=16), "at most 64 heads share a kv head"),
    ],
)
def test_what_triton_cannot_do_runs_plain(case: Case, match: str, device: torch.device) -> None:
    batch = make_batch(case, device)
    batch.check("plain", "auto")
    with pytest.raises(KernelRefused, match=match):
        batch.run("triton")
