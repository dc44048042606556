# SPDX-License-Identifier: Apache-2.0
"""A mask bans the same tokens whichever way it is applied: by the compiled kernel, by numpy and by
torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from stratakv.engine.sampling import token_mask
from stratakv.engine.sampling.token_mask import TokenMask, banned_on
from stratakv.kernels.cpu.library import CpuLibrary, Missing, cpu_library

VOCABULARIES = (1, 31, 32, 33, 64, 100, 4099)


def words_of(num_rows: int, num_tokens: int, seed: int) -> np.ndarray:
    """Rows with words of all kinds: nothing, everything, and a mixture."""
    random = np.random.default_rng(seed)
    count = -(-num_tokens // 32)
    words = random.integers(0, 2**32, (num_rows, count), np.uint32)
    kind = random.integers(0, 3, (num_rows, count))
    words[kind == 0] = 0
    words[kind == 1] = 2**32 - 1
    return words


def ban(logits: torch.Tensor, words: np.ndarray, indices: Sequence[int]) -> torch.Tensor:
    result = logits.clone()
    TokenMask([f"r{i}" for i in indices], words).apply(result, indices)
    return result


@pytest.mark.parametrize("num_tokens", VOCABULARIES)
@pytest.mark.parametrize("indices", [(0, 1, 2), (2, 0), (1,)], ids=str)
@pytest.mark.parametrize("missing_words", [0, 1])
def test_kernel_numpy_and_torch_ban_the_same(
    num_tokens: int, indices: tuple[int, ...], missing_words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(cpu_library(), Missing):
        pytest.skip("the compiled kernels are not there")
    words = words_of(len(indices), num_tokens, seed=num_tokens)
    words = words[:, : words.shape[1] - missing_words].copy()
    logits = torch.randn(3, num_tokens, generator=torch.Generator().manual_seed(1))
    calls: list[int] = []
    library = cpu_library()
    assert isinstance(library, CpuLibrary)

    def counted(*given: int | None) -> int:
        calls.append(1)
        return library.ban(*given)  # type: ignore[arg-type] # as they came

    watched = dataclasses.replace(library, ban=counted)
    monkeypatch.setattr(token_mask, "cpu_library", lambda: watched)
    by_kernel = ban(logits, words, indices)
    assert calls == [1]
    monkeypatch.setattr(token_mask, "cpu_library", lambda: Missing("a test"))
    by_numpy = ban(logits, words, indices)
    by_torch = logits.clone()
    if words.shape[1]:
        banned = banned_on(words.view(np.uint8), num_tokens, logits.device)
    else:
        banned = torch.ones(len(indices), num_tokens, dtype=torch.bool)
    by_torch[list(indices)] = by_torch[list(indices)].masked_fill(banned, -torch.inf)
    assert torch.equal(by_kernel, by_numpy)
    assert torch.equal(by_kernel, by_torch)


@pytest.mark.parametrize("indices", [[2], [-1], [0, 1], []], ids=str)
def test_rows_that_are_not_there_are_refused(indices: list[int]) -> None:
    """The kernel would write past the logits."""
    logits = torch.zeros(2, 40)
    with pytest.raises(ValueError, match="rows of the 2 that there are"):
        TokenMask(["r"], np.zeros((1, 2), np.uint32)).apply(logits, indices)
    assert not torch.isinf(logits).any()


def test_double_precision_and_strides_go_without_the_kernel() -> None:
    words = words_of(2, 64, seed=3)
    plain = torch.randn(2, 64)
    expected = ban(plain, words, [0, 1])
    assert torch.equal(ban(plain.double(), words, [0, 1]), expected.double())
    wide = torch.randn(64, 2)
    strided = wide.T
    TokenMask(["a", "b"], words).apply(strided, [0, 1])
    assert torch.isinf(strided).equal(torch.isinf(expected))
