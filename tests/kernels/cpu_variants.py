# SPDX-License-Identifier: Apache-2.0
"""The compiled library of the CPU in each of its variants, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stratakv.kernels.cpu import library, matrix, network, paged_attention
from stratakv.kernels.cpu.library import VARIANTS, Missing, open_library
from stratakv.kernels.cpu.thresholds import Worth

PATH = Path(library.__file__).with_name(library.FILE_NAME)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Of results that are a few units large; those of 16 bits are compared with what these make of them.
NEAR = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One variant of the library, as the variable would choose it, and from when on several threads
    are used where nothing was measured."""
    found = open_library(PATH, request.param)
    if isinstance(found, Missing):
        pytest.skip(found.reason)
    for module in (matrix, network, paged_attention):
        monkeypatch.setattr(module, "cpu_library", lambda: found)
        monkeypatch.setattr(module, "worth_a_thread", Worth)
    name: str = request.param
    return name


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0, spread: float = 1.0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (made * spread).to(dtype)
