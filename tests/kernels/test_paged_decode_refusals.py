# SPDX-License-Identifier: Apache-2.0
"""Paged decode: what both implementations refuse, and what only Triton's does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stratakv.kernels.attention.attention_checks import FP8
from stratakv.kernels.cpu.library import CpuLibrary, cpu_library
from stratakv.kernels.kernel_choice import AUTO, NATIVE, PLAIN, TRITON, KernelRefused

from .decode_batches import Case, assert_right, make_case


def refuse(case: Case, message: str, **changes: Any) -> None:
    case = replace(case, options=dict(case.options))
    for name, value in changes.items():
        if hasattr(case, name):
            setattr(case, name, value)
        else:
            case.options[name] = value
    for kernel in (PLAIN, TRITON):
        with pytest.raises(KernelRefused, match=message):
            case.run(kernel)


def test_what_does_not_fit_is_refused(device):
    case = make_case(device, [20, 3])
    q, kv, tables, lens = case.q, case.kv, case.block_tables, case.seq_lens
    refuse(case, r"expected q of \[requests", q=q[0])
    refuse(case, r"expected kv of \[num_blocks, 2, block_size, kv heads, 64\]", kv=kv[:, 0])
    refuse(case, r"expected kv of \[num_blocks, 2, block_size", kv=kv[..., :32])
    refuse(case, r"expected kv of \[num_blocks, 2, block_size", kv=kv[:, :1])
    refuse(case, "multiple of the 2 kv heads, got 5", q=q[:, :5])
    refuse(case, "not empty", kv=kv[:0])
    refuse(
        case, r"expected block_tables of \[2, max_blocks\], got \[1, 2\]", block_tables=tables[:1]
    )
    refuse(case, r"expected seq_lens of \[2\], got \[1\]", seq_lens=lens[:1])
    refuse(case, "block_tables of torch.int32, got torch.int64", block_tables=tables.long())
    refuse(case, "seq_lens of torch.int32, got torch.int64", seq_lens=lens.long())
    refuse(case, "got torch.float16 and torch.float32", q=q.half())
    refuse(case, "got torch.int32 and torch.int32", q=q.int(), kv=kv.int())
    refuse(case, "expected kv contiguous in its last axis", kv=kv.mT.contiguous().mT)
    refuse(case, "expected q contiguous in its last axis", q=q.mT.contiguous().mT)
    refuse(case, "block_tables contiguous in its last axis", block_tables=tables.T.contiguous().T)
    refuse(case, "seq_lens contiguous in its last axis", seq_lens=lens.repeat(2)[::2])
    refuse(case, "out contiguous in its last axis", out=q.mT.contiguous().mT)
    refuse(case, "expected out as q", out=torch.empty_like(q)[:1])
    refuse(case, "expected out as q", out=torch.empty_like(q).half())
    refuse(case, "expected one device", seq_lens=lens.to("meta"))
    refuse(case, "a window of 1 token or more, got 0", window=0)
    refuse(case, "a softcap above 0, got 0.0", softcap=0.0)
    refuse(case, "num_splits from 1 to 65535, got 0", num_splits=0)
    refuse(case, "no kv_scales beside a pool of torch.float32", kv_scales=torch.ones(2, 2))
    refuse(case, "kv_scales beside a pool of torch.float8_e4m3fn, got none", kv=kv.to(FP8))
    refuse(case, r"got torch.float32 of \[2\]", kv=kv.to(FP8), kv_scales=torch.ones(2))
    refuse(case, "got torch.float64", kv=kv.to(FP8), kv_scales=torch.ones(2, 2).double())
    refuse(
        case,
        "expected q of 16, 32 or 64 bits",
        q=q.to(FP8),
        kv=kv.to(FP8),
        kv_scales=torch.ones(2, 2),
    )


def test_what_only_triton_refuses_the_plain_twin_runs(device):
    for case, message in (
        (make_case(device, [3], head_dim=320), "at most 256 elements, and these 320"),
        (make_case(device, [3], group=17, head_dim=16), "at most 16 heads share"),
    ):
        assert_right(case, case.run(PLAIN))
        with pytest.raises(KernelRefused, match=message):
            case.run(TRITON)


def test_a_cpu_takes_the_compiled_kernel_or_the_plain_twin_unless_triton_is_named():
    case = make_case(torch.device("cpu"), [20, 3])
    own = NATIVE if isinstance(cpu_library(), CpuLibrary) else PLAIN
    assert torch.equal(case.run(AUTO), case.run(own))
    torch.testing.assert_close(case.run(AUTO), case.run(PLAIN))
