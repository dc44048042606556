# SPDX-License-Identifier: Apache-2.0
"""Paged prefill: what both implementations refuse, and what only Triton's does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stratakv.kernels.attention.attention_checks import FP8
from stratakv.kernels.attention.paged_prefill import paged_prefill
from stratakv.kernels.kernel_choice import KernelRefused

from .prefill_batches import NAN, Batch, Case, make_batch

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
        ({"kernel": "cutlass"}, "one of auto, triton, native, plain, not 'cutlass'"),
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
