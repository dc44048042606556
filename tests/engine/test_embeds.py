# SPDX-License-Identifier: Apache-2.0
"""Prompt embeddings out of bytes: every number as it was sent, everything else refused by name."""

from __future__ import annotations

import ast
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from stratakv.engine.request.prompt_embeds import MAX_HEADER_BYTES, EmbedsError, read_embeds

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, MOST = 6, 9


def of(tensor: torch.Tensor, **others: torch.Tensor) -> bytes:
    return save({"embeds": tensor, **others})


def file_of(header: object, content: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content


def entry(dtype: object = "F32", shape: object = (1, HIDDEN), offsets: object = (0, 24)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [1, MOST])
def test_what_was_saved_is_read(dtype, tokens):
    sent = torch.randn(tokens, HIDDEN, dtype=torch.float64).to(dtype)
    sent[0, 0], sent[0, 1] = torch.finfo(dtype).max, torch.finfo(dtype).tiny / 2  # a subnormal
    read = read_embeds(of(sent), HIDDEN, MOST)
    assert read.dtype == (np.float64 if dtype is torch.float64 else np.float32)
    assert read.flags.c_contiguous and read.flags.writeable
    assert torch.equal(torch.from_numpy(read).to(dtype), sent)
    assert (read == sent.double().numpy()).all()


def test_notes_and_any_name_are_allowed():
    sent = torch.ones(2, HIDDEN)
    data = save({"any name": sent}, metadata={"made by": "a test"})
    assert (read_embeds(data, HIDDEN, MOST) == 1.0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_named(dtype, value):
    sent = torch.zeros(3, HIDDEN, dtype=dtype)
    sent[2, 4] = value
    with pytest.raises(EmbedsError, match=rf"element 4 of token 2 is {value}"):
        read_embeds(of(sent), HIDDEN, MOST)


REFUSED = {
    "dtype F16, BF16, F32 or F64, not 'I64'": of(torch.zeros(1, HIDDEN, dtype=torch.int64)),
    "not 'F8_E4M3'": of(torch.zeros(1, HIDDEN).to(torch.float8_e4m3fn)),
    "shape [tokens, 6], not [1, 7]": of(torch.zeros(1, 7)),
    "not [6]": of(torch.zeros(6)),
    "not [1, 1, 6]": of(torch.zeros(1, 1, 6)),
    "not []": of(torch.tensor(1.0)),
    "not [1, 1, 1, 1, ...]": of(torch.zeros(1, 1, 1, 1, 1, 6)),
    "of 1 to 9 tokens, and these of 0": of(torch.zeros(0, 6)),
    "of 1 to 9 tokens, and these of 10": of(torch.zeros(10, 6)),
    "one tensor, and the file has 2": of(torch.zeros(1, 6), more=torch.zeros(1, 6)),
    "one tensor, and the file has 0": save({}),
    "these 0 bytes end inside its header": b"",
    "these 5 bytes end inside": b"short",
    "these 8 bytes end inside": b"\xff" * 8,
    "header of prompt embeddings has at most": file_of(b" " * (MAX_HEADER_BYTES + 1)),
    "header cannot be read": file_of(b"no json"),
    "cannot be read: ": file_of([1, 2]),
    "its header cannot be read: Expected `object`": file_of({"a": 3}),
    "Expected `int`, got `str`": file_of({"a": entry(shape=["1", 6])}, bytes(24)),
    "missing required field `data_offsets`": file_of({"a": {"dtype": "F32", "shape": [1, 6]}}),
    "unknown field `more`": file_of({"a": entry() | {"more": 1}}, bytes(24)),
    "take 24 bytes, and the file has 23": file_of({"a": entry()}, bytes(23)),
    "take 24 bytes, and the file has 25": file_of({"a": entry()}, bytes(25)),
    "the file has 24 (data_offsets [4, 28])": file_of({"a": entry(offsets=[4, 28])}, bytes(24)),
    "(data_offsets [0, 20])": file_of({"a": entry(offsets=[0, 20])}, bytes(24)),
    "and these of -1": file_of({"a": entry(shape=[-1, 6])}, bytes(24)),
    "shape [tokens, 6], not [6, 1]": file_of({"a": entry(shape=[6, 1])}, bytes(24)),
    "and these of 4611686018427387904": file_of({"a": entry(shape=[2**62, 6])}, bytes(24)),
}


@pytest.mark.parametrize("words", REFUSED)
def test_anything_else_is_refused_by_name(words):
    with pytest.raises(EmbedsError) as caught:
        read_embeds(REFUSED[words], HIDDEN, MOST)
    assert words in str(caught.value)


def test_damage_is_refused_or_changes_numbers_only(rng, scale):
    whole, said = of(torch.randn(3, HIDDEN)), set[str]()
    for _ in range(2000 if scale == "ci" else 100_000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        try:
            read = read_embeds(bytes(data), HIDDEN, MOST)
        except EmbedsError as error:
            said.add(str(error))
            continue
        assert read.shape == (3, HIDDEN) and np.isfinite(read).all()
    assert max(map(len, said)) < 400


def test_the_module_needs_no_torch():
    """So that the front, which has none, can import it."""
    tree = ast.parse((ROOT / "engine" / "request" / "prompt_embeds.py").read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import)
             for alias in node.names}  # fmt: skip
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names == {"__future__", "math", "typing", "msgspec", "numpy", "numpy.typing"}
