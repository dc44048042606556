# SPDX-License-Identifier: Apache-2.0
"""The work of a prefill, so that deep blocks, which attend to more, count for more.

In units of one block's products with the weights, of a model like Llama-3-8B: only the ratio of
attention to weights matters, and it is much the same for models of this kind.
"""

from __future__ import annotations

from .trace import BLOCK_TOKENS

_WEIGHT_FLOPS = 2 * 8.0e9  # for each token
_ATTENTION_FLOPS = 4 * 32 * 4096  # for each token and each one before it: layers, hidden size
_ATTENTION_PER_BLOCK = _ATTENTION_FLOPS * BLOCK_TOKENS / _WEIGHT_FLOPS


def prefill_work(blocks: int) -> float:
    """Of the first `blocks` blocks of a prompt; that of others is the difference."""
    return blocks + _ATTENTION_PER_BLOCK * blocks * blocks / 2
