# SPDX-License-Identifier: Apache-2.0
"""The reordered product equals the plain one, for any number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from stratakv.engine.models import layers
from stratakv.engine.models.layers import Linear, _can_pack

ROWS = (0, 1, 2, 15, 16, 17, 64, 300)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("out", "size"), [(1, 1), (3, 5), (48, 32), (97, 130), (512, 256)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_equals_the_plain_product(
    dtype: torch.dtype, out: int, size: int, has_bias: bool
) -> None:
    draw = torch.Generator().manual_seed(out * size)
    weight = torch.randn(out, size, generator=draw, dtype=torch.float64).to(dtype) / size**0.5
    bias = torch.randn(out, generator=draw, dtype=torch.float64).to(dtype) if has_bias else None
    linear = Linear(weight, bias)
    with torch.inference_mode():
        for rows in ROWS:
            x = torch.randn(rows, size, generator=draw, dtype=torch.float64).to(dtype)
            expected = F.linear(x, weight, bias)
            found = linear(x)
            assert found.shape == (rows, out) and found.dtype == dtype
            torch.testing.assert_close(found, expected)


def test_rows_may_be_a_view_of_something_wider() -> None:
    weight, wide = torch.randn(24, 16), torch.randn(9, 40)
    torch.testing.assert_close(Linear(weight)(wide[:, 8:24]), F.linear(wide[:, 8:24], weight))


def test_a_view_of_a_larger_matrix_can_be_its_weight() -> None:
    weight, x = torch.randn(24, 40)[:, 3:19], torch.randn(9, 16)
    torch.testing.assert_close(Linear(weight)(x), F.linear(x, weight))


def test_what_is_reordered() -> None:
    """On every processor that this project is tested on; elsewhere torch multiplies."""
    assert _can_pack(torch.zeros(2, 2)) == torch.backends.mkldnn.is_available()
    assert not _can_pack(torch.zeros(2, 2, dtype=torch.float64))
    assert not _can_pack(torch.zeros(2, 2, dtype=torch.bfloat16))
    assert not _can_pack(torch.zeros(2, 2, device="meta"))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_product_is_added_in_place(
    dtype: torch.dtype, is_packed: bool, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_packed:  # as on a GPU
        monkeypatch.setattr(layers, "reason_against_matrices", lambda *_: "asked for")
        monkeypatch.setattr(layers, "_can_pack", lambda *_: False)
    weight = torch.randn(24, 16).to(dtype)
    bias = torch.randn(24).to(dtype) if has_bias else None
    wide, out = torch.randn(9, 40).to(dtype), torch.randn(9, 24).to(dtype)
    x = wide[:, 8:24]
    expected = out + F.linear(x, weight, bias)
    address = out.data_ptr()
    with torch.inference_mode():
        Linear(weight, bias).add_to(out, x)
    # In 16 bits the plain way rounds the product before it adds.
    near = {"rtol": 2**-6, "atol": 0.1} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(out, expected, **near)
    assert out.data_ptr() == address
