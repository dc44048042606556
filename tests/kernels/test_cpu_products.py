# SPDX-License-Identifier: Apache-2.0
"""Products of matrices in the compiled library against torch in float64, in every variant that runs
here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from stratakv.kernels.cpu.matrix import GELU_TANH, SILU, PackedMatrix
from stratakv.kernels.cpu.workspace import ResultMemory
from stratakv.kernels.kernel_choice import KernelRefused

from .cpu_variants import DTYPES, NEAR, draw, threads, variant

__all__ = ["threads", "variant"]  # fixtures

pytestmark = pytest.mark.usefixtures("variant")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outs", "ins"), [(1, 1), (40, 7), (97, 130)])
def test_products_are_right_for_any_number_of_rows(dtype: torch.dtype, outs: int, ins: int) -> None:
    weight, bias = (draw(*shape, dtype=dtype, spread=0.2) for shape in ((outs, ins), (outs,)))
    product = PackedMatrix((weight,), (bias,))
    for rows in (0, 1, 2, 3, 4, 5, 6, 7, 13, 20, 61, 110):
        x = draw(rows, ins + 3, dtype=dtype, seed=rows)[:, 1 : ins + 1]
        expected = F.linear(x.double(), weight.double(), bias.double())
        found = product(x)
        assert found.dtype == dtype and found.shape == (rows, outs)
        torch.testing.assert_close(
            found.double(), expected, rtol=NEAR[dtype] / 4, atol=NEAR[dtype] / 4
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [SILU, GELU_TANH])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_pair_is_one_product_with_an_activation(
    dtype: torch.dtype, activation: int, has_bias: bool
) -> None:
    gate, up = (draw(70, 24, dtype=dtype, seed=seed, spread=0.5) for seed in (1, 2))
    bias = draw(70, dtype=dtype, seed=3) if has_bias else None
    pair = PackedMatrix((gate, up), (bias, None), activation)
    wide = None if bias is None else bias.double()
    for rows in (1, 2, 4, 9):
        x = draw(rows, 24, dtype=dtype, seed=rows) * 8  # far into both tails
        gated = F.linear(x.double(), gate.double(), wide)
        act = F.silu(gated) if activation == SILU else F.gelu(gated, approximate="tanh")
        expected = act * F.linear(x.double(), up.double())
        torch.testing.assert_close(pair(x).double(), expected, rtol=NEAR[dtype], atol=NEAR[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_that_nobody_wants_are_left_out_and_others_keep_their_bits(
    dtype: torch.dtype, threads: None
) -> None:
    outs = 1000  # the last panel is not whole
    product = PackedMatrix((draw(outs, 40, dtype=dtype),), (draw(outs, dtype=dtype, seed=1),))
    chosen = np.random.default_rng(2)
    for rows in (1, 2, 5, 30):
        x = draw(rows, 40, dtype=dtype, seed=rows)
        whole = product(x)
        for count in (0, 1, 20, outs):
            bits = np.zeros(1024, np.bool_)
            bits[chosen.choice(outs, count, replace=False)] = True
            words = np.packbits(bits, bitorder="little").view(np.uint32)
            found, wanted = product(x, words), torch.from_numpy(bits[:outs])
            assert torch.equal(found[:, wanted], whole[:, wanted])
            left_out = (found == 0).all(dim=0)
            assert torch.equal(found[:, ~left_out], whole[:, ~left_out])
            assert left_out.sum() >= outs - 32 * count
            cut = product(x, words[:20])  # outputs behind the words are not wanted
            assert torch.equal(cut[:, :640], found[:, :640]) and not cut[:, 640:].any()
    assert torch.equal(product(x), whole)  # the words before are forgotten
    with pytest.raises(ValueError, match=r"expected uint32 words \[words\].*int64 \(2,\)"):
        product(x, np.zeros(2, np.int64))  # type: ignore[arg-type]
    pair = PackedMatrix((draw(8, 4, dtype=dtype), draw(8, 4, dtype=dtype)))
    with pytest.raises(ValueError, match="for a pair"):
        pair(draw(1, 4, dtype=dtype), np.zeros(1, np.uint32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_results_are_the_same_numbers(dtype: torch.dtype) -> None:
    product = PackedMatrix((draw(97, 30, dtype=dtype),), (draw(97, dtype=dtype, seed=1),))
    words = np.array([1, 0, 1 << 31], np.uint32)
    for rows in (1, 5, 40):
        x = draw(rows, 30, dtype=dtype, seed=rows)
        for wanted in (None, words):
            found = product(x, wanted, is_wide=True)
            assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert torch.equal(found, product(x, wanted).to(found.dtype))


def test_memory_of_large_results_is_taken_again_only_when_nothing_lies_in_it() -> None:
    results = ResultMemory()
    first = results.lend(100)
    place = first.data_ptr()
    part = first.view(torch.float32)[3:]
    del first
    assert results.lend(100).data_ptr() != place
    array = part.numpy()
    del part
    assert results.lend(100).data_ptr() != place
    del array
    again = results.lend(50)
    assert (again.data_ptr(), len(again)) == (place, 50)
    del again
    assert len(results.lend(1000)) == 1000


def test_large_results_stay_what_they_are() -> None:
    matrix = PackedMatrix((draw(40_000, 8, dtype=torch.float32),))
    one, other = draw(64, 8, dtype=torch.float32), draw(64, 8, dtype=torch.float32, seed=1)
    first = matrix(one)
    row, expected = first[5], first[5].clone()
    second = matrix(other)
    del first
    third = matrix(other)
    assert torch.equal(row, expected)
    assert torch.equal(second, third)
    del row, second, third
    assert torch.equal(matrix(one)[5], expected)


def test_rows_that_lie_in_one_set_of_the_cache_give_the_same_numbers() -> None:
    product, x = PackedMatrix((draw(70, 30, dtype=torch.float32),)), torch.zeros(20, 1024)
    x[:, :30] = draw(20, 30, dtype=torch.float32)
    assert torch.equal(product(x[:, :30]), product(x[:, :30].contiguous()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_bits_depend_neither_on_threads_nor_on_other_rows(dtype: torch.dtype) -> None:
    weight, x = draw(700, 300, dtype=dtype), draw(120, 300, dtype=dtype)
    product, before = PackedMatrix((weight,)), torch.get_num_threads()
    alone = torch.cat([product(row[None]) for row in x])
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(product(x), alone)
            assert torch.equal(product(x[:17]), alone[:17])
    finally:
        torch.set_num_threads(before)


def test_matrices_that_cannot_be_multiplied_are_refused() -> None:
    with pytest.raises(KernelRefused, match="not empty"):
        PackedMatrix((torch.zeros(0, 4),))
    with pytest.raises(KernelRefused, match="of one shape and type"):
        PackedMatrix((torch.zeros(4, 3), torch.zeros(4, 2)))
    with pytest.raises(KernelRefused, match=r"16-bit types on the CPU, not torch.int8"):
        PackedMatrix((torch.zeros(4, 3, dtype=torch.int8),))
    with pytest.raises(ValueError, match=r"expected torch.float32 \[rows, 3\]"):
        PackedMatrix((torch.zeros(4, 3),))(torch.zeros(2, 4))
