# SPDX-License-Identifier: Apache-2.0
"""Prefill by a library over gathered K and V: equal to paged prefill, refused where it cannot."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from stratakv.kernels.attention import gathered_prefill
from stratakv.kernels.attention.gathered_prefill import (
    FA3,
    LIBRARIES,
    SDPA,
    GatheredPrefill,
    reason_against_library,
)
from stratakv.kernels.kernel_choice import Hardware

from .other_hardware import other_hardware
from .prefill_batches import NAN, TOLERANCE, Batch, Case, make_batch

# New tokens and those before them: fresh, one row, whole blocks, and neither begin nor end of one.
CHUNKS = ((9, 0), (1, 40), (16, 16), (13, 5), (30, 51))


def run_gathered(batch: Batch, gathered: GatheredPrefill) -> Tensor:
    """All requests of a batch, one after the other."""
    q, kv, tables, lengths, starts = batch.tensors
    out = torch.full_like(q, NAN, memory_format=torch.contiguous_format)
    begins = starts.tolist()
    for request, length in enumerate(lengths.tolist()):
        rows = slice(begins[request], begins[request + 1])
        gathered.run(q[rows], kv, tables[request], length, batch.options["scale"], out[rows])
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (6, 1)])
@pytest.mark.parametrize("block_size", [1, 16])
def test_sdpa_over_gathered_blocks_is_paged_prefill(
    dtype: torch.dtype, heads: int, kv_heads: int, block_size: int, device: torch.device
) -> None:
    case = Case(CHUNKS, heads, kv_heads, 16, block_size, dtype)
    batch = make_batch(case, device)
    q, kv = batch.tensors[:2]
    found = run_gathered(batch, GatheredPrefill(SDPA, kv, 81, min_rows=1))
    assert torch.equal(found.isnan().cpu(), batch.expected.isnan()), "rows of no request"
    plain = batch.run("plain")
    off = (found - plain).abs().nan_to_num(0).max().item()
    assert off < TOLERANCE[q.dtype]


def test_chunks_are_taken_from_their_least_rows_up_to_what_the_buffers_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kv = torch.zeros(4, 2, 16, 2, 8)
    gathered = GatheredPrefill(SDPA, kv, 100, min_rows=20)
    assert gathered.max_tokens == 112, "whole blocks"
    assert gathered.takes(20, 112) and gathered.takes(100, 100)
    assert not gathered.takes(19, 112) and not gathered.takes(20, 113)
    monkeypatch.setattr(gathered_prefill, "MAX_BYTES", 3 * kv[0].numel() * 4 + 5)
    assert GatheredPrefill(SDPA, kv, 100).max_tokens == 48
    assert not GatheredPrefill(SDPA, kv, 10**6).takes(48, 48), "short by default"


# flash_attn_func of the wheel fa3-fwd 0.0.3, by its parameters.
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    qv: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: Any = None, deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    """The result that it promises: `[1, rows, heads, head_dim]`, masked to the lower right."""
    assert causal and window_size == (-1, -1) and softmax_scale and not return_attn_probs
    assert all(tensor.stride(-1) == 1 and len(tensor) == 1 for tensor in (q, k, v))
    out: Tensor = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.transpose(1, 2) for tensor in (q, k, v)), scale=softmax_scale, enable_gqa=True,
        attn_mask=torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril(
            k.shape[1] - q.shape[1]
        ),
    )  # fmt: skip
    return out.transpose(1, 2)


@pytest.fixture
def fa3(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of fa3-fwd, as far as it is called."""
    module = ModuleType("fa3_fwd_interface")
    module.__dict__["flash_attn_func"] = flash_attn_func
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", module)
    return module


@pytest.mark.usefixtures("fa3")
def test_flash_attention_3_is_called_as_it_promises(device: torch.device) -> None:
    batch = make_batch(Case(CHUNKS, 4, 2, 64, 16, torch.bfloat16), device)
    found = run_gathered(batch, GatheredPrefill(FA3, batch.tensors[1], 81, min_rows=1))
    off = (found.double().cpu() - batch.expected).abs().nan_to_num(0).max().item()
    assert off < TOLERANCE[torch.bfloat16]


@pytest.fixture
def hopper() -> Iterator[None]:
    with other_hardware(lambda: Hardware("H100", (9, 0), has_triton=True)):
        yield


def reason(name: str, **changes: Any) -> str | None:
    case = Case(((3, 4),), heads=4, kv_heads=2, **({"dtype": torch.bfloat16} | changes))
    q, kv = make_batch(case, torch.device("cpu")).tensors[:2]
    return reason_against_library(name, q, kv)


@pytest.mark.usefixtures("fa3", "hopper")
def test_libraries_take_heads_of_16_bits() -> None:
    for name in LIBRARIES:
        assert reason(name) is None
        assert reason(name, head_dim=256) is None
        for head_dim in (20, 264):
            said = reason(name, head_dim=head_dim)
            assert said is not None and "up to 256" in said and f"have {head_dim}" in said
        said = reason(name, dtype=torch.float32)
        assert said is not None and "takes torch.bfloat16" in said and "torch.float32" in said
        said = reason(name, pool_dtype=torch.float8_e4m3fn, scales_dim=2)
        assert said is not None and "float8" in said
    assert reason(SDPA, dtype=torch.float16) is None
    said = reason(FA3, dtype=torch.float16)
    assert said == "it takes torch.bfloat16, and these are torch.float16"


@pytest.mark.usefixtures("fa3")
@pytest.mark.parametrize(
    ("capability", "of_fa3", "of_sdpa"),
    [
        (None, "runs on a CUDA device", "runs on a CUDA device"),
        ((7, 5), "capability (9, 0), and this is (7, 5)", "capability (8, 0), and this is (7, 5)"),
        ((8, 0), "capability (9, 0), and this is (8, 0)", None),
        ((10, 0), "capability (9, 0), and this is (10, 0)", None),
    ],
)
def test_libraries_are_for_some_devices(
    capability: tuple[int, int] | None, of_fa3: str, of_sdpa: str | None
) -> None:
    with other_hardware(lambda: Hardware("another", capability, has_triton=True)):
        for name, expected in ((FA3, of_fa3), (SDPA, of_sdpa)):
            said = reason(name)
            assert (said is None) == (expected is None)
            assert expected is None or (said is not None and expected in said)


@pytest.mark.usefixtures("hopper")
def test_a_package_that_is_missing_or_broken_is_said(
    monkeypatch: pytest.MonkeyPatch, fa3: ModuleType
) -> None:
    del fa3.flash_attn_func
    said = reason(FA3)
    assert said is not None and "fa3-fwd cannot be imported" in said and "flash_attn_func" in said
    monkeypatch.delitem(sys.modules, "fa3_fwd_interface")
    said = reason(FA3)
    assert said == "fa3-fwd is not installed (pip install '.[fa3]' in a clone)"
