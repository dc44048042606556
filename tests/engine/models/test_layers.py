# SPDX-License-Identifier: Apache-2.0
"""Compiled or not, the elementwise parts give the same numbers, for any number of rows."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from stratakv.engine.models.layers import Elementwise

# bfloat16 is rounded in other places.
TOLERANCE = {torch.float64: 1e-12, torch.bfloat16: 2**-6}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_compiled_parts_are_the_plain_ones(dtype):
    # Without a C++ compiler torch can still trace and lower; what it then runs are torch's own.
    trace = partial(torch.compile, dynamic=True, backend="aot_eager")
    close = partial(torch.testing.assert_close, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    compiled, plain = Elementwise.compiled(trace), Elementwise()
    for rows in (2, 17):
        x = torch.randn(rows, 4, 16, dtype=torch.float64).to(dtype)
        weight = torch.randn(16, dtype=torch.float64).to(dtype)
        heads = torch.randn(4, 16, dtype=torch.float64).to(dtype)
        cos, sin = (torch.randn(rows, 1, 8, dtype=torch.float64).to(dtype) for _ in range(2))
        for of in (weight, heads):
            close(compiled.norm(x, of, 1e-5), plain.norm(x, of, 1e-5))
        close(compiled.rotate(x, cos, sin), plain.rotate(x, cos, sin))
        close(compiled.gated(x.clone(), 2 * x), plain.gated(x.clone(), 2 * x))
