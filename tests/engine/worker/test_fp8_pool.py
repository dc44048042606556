# SPDX-License-Identifier: Apache-2.0
"""A pool of e4m3: how far its numbers are off, and that nothing but the rounding is off.

Each number of K and V is off by at most a sixteenth of itself, or by 2**-10 where it is tiny, and
448 is the largest; see docs/commands.md.
"""

from __future__ import annotations

import pytest
import torch

from stratakv.engine.models.dtypes import FP8_KV, pool_dtype
from stratakv.engine.worker.forward.kernel_attention import Decodes, KernelAttention, KernelPlan
from stratakv.engine.worker.kv_pool import KvPool
from stratakv.engine.worker.runtime.placement import KERNELS, Placement
from stratakv.tiers.block import BlockLayout

LAYOUT = BlockLayout(2, 4, 2, 8, FP8_KV)
ONES = torch.ones((2, 2))


def attention_over(pool: torch.Tensor) -> KernelAttention:
    scales = ONES if pool.dtype == pool_dtype(FP8_KV) else None
    return KernelAttention(
        pool, LAYOUT, num_heads=4, dtype=torch.float32, scale=LAYOUT.head_dim**-0.5,
        kv_scales=scales,
    )  # fmt: skip


def one_step(tokens: int) -> KernelPlan:
    """Every token is a request of its own, with a block of its own."""
    slots = torch.arange(1, tokens + 1) * LAYOUT.block_size
    tables = torch.arange(1, tokens + 1, dtype=torch.int32)[:, None]
    return KernelPlan(slots, Decodes(tables, torch.ones(tokens, dtype=torch.int32)), None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_numbers_are_off_by_a_sixteenth_at_most(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    pool = KvPool(LAYOUT, 400)
    assert pool.tensor.dtype == torch.float8_e4m3fn
    assert pool.tensor.nbytes == 400 * LAYOUT.page_bytes
    exponents = torch.rand(2, 399, 2, 8, dtype=torch.float64) * 20 - 11
    k, v = torch.randn(2, 399, 2, 8, dtype=torch.float64) * 2**exponents
    k, v = k.to(dtype), v.to(dtype)
    q = torch.zeros(399, 4, 8, dtype=dtype)
    attention_over(pool.tensor)(q, k, v, 1, one_step(399))
    for side, given in enumerate((k, v)):
        kept = pool.tensor[1:, 1, side, 0].double()
        exact = given.double().clamp(-448, 448)
        assert (
            (kept - exact).abs() <= torch.maximum(exact.abs() / 16, torch.tensor(2.0**-10))
        ).all()
        assert (kept.abs() == 448).any(), "some are too large"
    assert not pool.tensor[:, 0].double().any(), "another layer"


def test_attention_is_that_over_the_rounded_numbers(checkpoint, driver, prompt_of):
    """The fp8 engine's pool, widened, answers the same through a pool of float64."""
    placement = Placement(kv_cache_dtype=FP8_KV)
    drive = driver(checkpoint(), block_size=4, num_blocks=300, placement=placement)
    drive.add("a", prompt_of(50))
    for _ in range(6):
        drive.step(chunk=20)
    wide = driver(checkpoint(), block_size=4, num_blocks=300, placement=Placement(
        attention_backend=KERNELS
    ))  # fmt: skip
    wide.runner.pool.tensor.copy_(drive.runner.pool.tensor.double())
    life = drive.lives["a"]
    wide.lives["a"] = type(life)(life.prompt, life.params, list(life.blocks), list(life.output))
    wide.lives["a"].computed = life.computed
    drive.logits.clear()
    assert drive.step().sampled_token_ids == wide.step().sampled_token_ids
    # The new token's own K and V are rounded in one pool only.
    torch.testing.assert_close(drive.logits[0], wide.logits[-1], rtol=0.05, atol=0.3)


def test_the_answer_is_near_the_exact_one(checkpoint, driver, prompt_of):
    exact = driver(checkpoint())
    exact.generate("a", prompt_of(60), 1)
    drive = driver(checkpoint(), placement=Placement(kv_cache_dtype=FP8_KV))
    drive.generate("a", prompt_of(60), 1)
    off = (drive.logits[0] - exact.logits[0]).abs()
    spread = exact.logits[0].std()
    assert 0 < off.mean() < 0.1 * spread
