# SPDX-License-Identifier: Apache-2.0
"""An output matrix that is the embedding too lies in memory once, and gives the same numbers."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from stratakv.engine.models.checkpoint.weights import DecoderWeights, random_weights
from stratakv.engine.models.decoder import Decoder
from stratakv.engine.models.layers import Linear
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.kernels.cpu import matrix
from stratakv.kernels.cpu.library import CpuLibrary, Missing, cpu_library
from stratakv.kernels.cpu.matrix import PackedMatrix

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
needs_library = pytest.mark.skipif(
    not isinstance(cpu_library(), CpuLibrary), reason="needs the compiled kernels"
)


def weights_of(directory, dtype: torch.dtype, *, tied: bool) -> tuple[object, DecoderWeights]:
    directory.write_config(tie_word_embeddings=tied)
    spec = load_model_spec(directory.path)
    return spec, random_weights(spec, dtype)


@needs_library
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (16, 8), (97, 130)])
@pytest.mark.parametrize("dtype", TYPES)
def test_rows_of_a_packed_matrix_are_those_it_was_made_of(dtype, shape) -> None:
    weight = torch.randn(shape).to(dtype)
    packed = PackedMatrix((weight,))
    ids = torch.cat([torch.randperm(shape[0]), torch.tensor([shape[0] - 1, 0])])
    assert torch.equal(packed.gather_rows(ids), weight[ids])
    assert packed.gather_rows(ids[:0]).shape == (0, shape[1])


@needs_library
@pytest.mark.parametrize("wrong", [-1, -(2**63), 5, 7, 2**63 - 1])
def test_an_id_that_names_no_row_is_refused(wrong) -> None:
    packed = PackedMatrix((torch.randn(5, 8),))  # behind its five rows the panel has others
    with pytest.raises(IndexError, match=f"rows from 0 to 4, got {wrong}$"):
        packed.gather_rows(torch.tensor([0, wrong, 4]))


@needs_library
def test_rows_of_a_pair_are_refused() -> None:
    pair = PackedMatrix((torch.randn(4, 8), torch.randn(4, 8)))
    with pytest.raises(ValueError, match="got a pair"):
        pair.gather_rows(torch.tensor([0]))


@needs_library
@pytest.mark.parametrize("dtype", TYPES)
def test_a_tied_matrix_is_kept_in_its_packed_form_alone(directory, dtype) -> None:
    spec, weights = weights_of(directory, dtype, tied=True)
    embedding = weights.embedding
    ids, hidden = torch.tensor([0, 39, 7, 7, 16]), torch.randn(3, 16).to(dtype)
    rows, logits = F.embedding(ids, embedding), Linear(embedding)(hidden)
    gone = weakref.ref(embedding)
    decoder = Decoder(spec, weights, 64, dtype)
    del weights, embedding
    gc.collect()
    assert gone() is None, "the decoder keeps the matrix beside its packed form"
    assert torch.equal(decoder.embed(ids), rows)
    found = decoder.logits(hidden)  # float32 for 16-bit types, and rounded
    assert torch.equal(found, logits.to(found.dtype))
    assert decoder.element_bytes == dtype.itemsize


@needs_library
def test_a_matrix_that_is_not_the_embedding_leaves_that_as_it_is(directory) -> None:
    spec, weights = weights_of(directory, torch.float64, tied=False)
    embedding, head = weights.embedding, weights.head
    decoder = Decoder(spec, weights, 64, torch.float64)
    ids, hidden = torch.tensor([3, 1]), torch.randn(2, 16, dtype=torch.float64)
    assert torch.equal(decoder.embed(ids), embedding[ids])
    torch.testing.assert_close(decoder.logits(hidden), hidden @ head.T)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_without_the_library_both_read_the_same_memory(directory, monkeypatch, dtype) -> None:
    monkeypatch.setattr(matrix, "cpu_library", lambda: Missing("a test"))
    spec, weights = weights_of(directory, dtype, tied=True)
    embedding = weights.embedding
    decoder = Decoder(spec, weights, 64, dtype)
    hidden = torch.randn(2, 16, dtype=dtype)
    embedding[5] = 0  # whoever has a copy does not see it
    assert not decoder.embed(torch.tensor([5])).any()
    assert not decoder.logits(hidden)[:, 5].any() and decoder.logits(hidden)[:, 4].all()
