# SPDX-License-Identifier: Apache-2.0
"""LayerAttention: to which tokens a layer attends. The kind of attention decides which part of a
sequence the KV cache must keep."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class AttentionKind(Enum):
    """The kind of a layer's attention, which decides the earlier tokens whose K and V a token
    reads. A layer that only carries a state, or that is only an MLP, has no K and V."""

    FULL = "full attention"
    WINDOW = "sliding window"
    CHUNK = "chunked local attention"
    STATE = "state space"
    NONE = "no attention"


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention of one layer, made by `full`, `window`, `chunk`, `state` and `no_attention`.
    Values are hashable; layers with K and V and equal attention can share a cache group."""

    kind: AttentionKind
    num_tokens: int = 0  # size of the window or chunk

    def __str__(self) -> str:
        return f"{self.kind.value} of {self.num_tokens}" if self.num_tokens else self.kind.value

    @property
    def window(self) -> int | None:
        """The number of tokens in a sliding window, including the token itself; None for other
        kinds of attention."""
        return self.num_tokens if self.kind is AttentionKind.WINDOW else None

    @property
    def is_full(self) -> bool:
        return self.kind is AttentionKind.FULL

    @property
    def is_state(self) -> bool:
        return self.kind is AttentionKind.STATE

    @property
    def has_kv(self) -> bool:
        return self.kind not in (AttentionKind.STATE, AttentionKind.NONE)

    def first_seen(self, position: int) -> int:
        """Return the first position that the token at `position`, or a later token, attends to."""
        if self.kind is AttentionKind.WINDOW:
            return max(0, position - self.num_tokens + 1)
        if self.kind is AttentionKind.CHUNK:
            return position - position % self.num_tokens
        return 0

    def most_blocks(self, num_tokens: int, block_size: int, most_step_tokens: int) -> int:
        """Return the largest number of blocks that a sequence of `num_tokens` keeps at one time. A
        sequence keeps the blocks to which the first token of a step attends, and the blocks of the
        step's tokens, at most `most_step_tokens`."""
        blocks = -(-num_tokens // block_size)
        if self.is_full:
            return blocks
        reach = self.num_tokens + most_step_tokens - 1
        return min(blocks, (reach - 2) // block_size + 2 if reach > 1 else 1)


def full() -> LayerAttention:
    """Return the attention in which a token attends to itself and all earlier tokens."""
    return _FULL


def window(num_tokens: int) -> LayerAttention:
    """Return the attention in which a token attends to itself and the `num_tokens` - 1 tokens
    before."""
    return _of(AttentionKind.WINDOW, num_tokens)


def chunk(num_tokens: int) -> LayerAttention:
    """Return the attention by chunks of `num_tokens` tokens; the first chunk begins at position 0.
    A token attends to itself and the earlier tokens of its chunk."""
    return _of(AttentionKind.CHUNK, num_tokens)


def state() -> LayerAttention:
    """Return the attention of a layer without K and V, which depends on earlier tokens through a
    state only."""
    return _STATE


def no_attention() -> LayerAttention:
    """Return the attention of a layer that is only an MLP, in which tokens are independent."""
    return _NONE


def _of(kind: AttentionKind, num_tokens: int) -> LayerAttention:
    if num_tokens < 1:
        raise ValueError(f"{kind.value} takes at least 1 token, not {num_tokens}")
    return LayerAttention(kind, num_tokens)


_FULL = LayerAttention(AttentionKind.FULL)
_STATE = LayerAttention(AttentionKind.STATE)
_NONE = LayerAttention(AttentionKind.NONE)
