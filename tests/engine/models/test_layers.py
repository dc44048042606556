# SPDX-License-Identifier: Apache-2.0
"""Compiled or not, the elementwise parts give the same numbers, for any number of rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from stratakv.engine.models.checkpoint.weights import random_weights
from stratakv.engine.models.families import FAMILIES, Activation
from stratakv.engine.models.layer import Layer
from stratakv.engine.models.layers import LIBRARY_ACTIVATIONS, Elementwise

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


def test_each_activation_of_a_gate_has_its_functions():
    gates = {activation for activation in Activation if activation.has_gate}
    assert LIBRARY_ACTIVATIONS.keys() == gates
    functions = {Elementwise().gated_by(activation) for activation in gates}
    assert len(functions) == len(set(LIBRARY_ACTIVATIONS.values())) == len(gates)
    with pytest.raises(KeyError):
        Elementwise().gated_by(Activation.RELU_SQUARED)


def test_squares_between_two_norms_are_computed_layer_by_layer(spec_with, monkeypatch):
    """The library has no MLP with squares, and must not leave it out."""
    spec = spec_with()
    pool = torch.zeros(4, 2, 16, spec.num_kv_heads, spec.head_dim)
    angles = torch.zeros(32, spec.head_dim // 2)
    family = spec.family
    for activation, is_there in ((Activation.SILU, True), (Activation.RELU_SQUARED, False)):
        changed = replace(family, activation=activation)
        monkeypatch.setitem(FAMILIES, spec.architecture, changed)
        weights = random_weights(spec, torch.float32)
        layer = Layer(spec, 0, weights.layers[0], Elementwise())
        assert (layer.in_library(angles, angles, pool, 0) is not None) == is_there
