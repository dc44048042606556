# SPDX-License-Identifier: Apache-2.0
"""Random weights: the shapes of a model, the same numbers in every start, a name of their own."""

from __future__ import annotations

import shutil

import pytest
import torch

from stratakv.engine.config.engine_options import EMBEDDED_MODEL
from stratakv.engine.models.checkpoint.fingerprint import fingerprint
from stratakv.engine.models.checkpoint.weights import load_weights, random_weights
from stratakv.engine.models.spec.spec_parser import load_model_spec


def test_they_have_the_shapes_of_a_checkpoint_and_are_the_same_every_time():
    spec = load_model_spec(EMBEDDED_MODEL)
    real = load_weights(EMBEDDED_MODEL, spec, torch.float32)
    first, second = (random_weights(spec, torch.float32) for _ in range(2))
    assert first.embedding.shape == real.embedding.shape
    assert (first.head is first.embedding) == (real.head is real.embedding)
    assert len(first.layers) == len(real.layers)
    layers = zip(first.layers, second.layers, real.layers, strict=True)
    parts = [(one, other, real) for layer in layers for one, other, real in (
        layer, [each.mixer for each in layer], [each.mlp for each in layer])]  # fmt: skip
    for mine, again, theirs in parts:
        for name in type(mine).__slots__:
            one, other = getattr(mine, name), getattr(theirs, name)
            assert (one is None) == (other is None)
            if isinstance(one, torch.Tensor):
                assert one.shape == other.shape and torch.equal(one, getattr(again, name))
    assert first.layers[0].mlp.down.std().item() == pytest.approx(0.02, rel=0.1)
    assert (first.norm == 1).all()
    assert not torch.equal(first.layers[0].mlp.down, first.layers[1].mlp.down)


def test_a_config_is_enough_for_a_name(tmp_path):
    shutil.copy(EMBEDDED_MODEL / "config.json", tmp_path)
    names = {fingerprint(tmp_path, random_for=device) for device in ("cpu", "cuda")}
    names.add(fingerprint(EMBEDDED_MODEL))
    assert len(names) == 3
    assert fingerprint(EMBEDDED_MODEL, random_for="cpu") in names, "no file of weights is read"
