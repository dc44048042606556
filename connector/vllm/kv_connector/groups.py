# SPDX-License-Identifier: Apache-2.0
"""vLLM's cache groups: which of their blocks make up a position, and which blocks a hit needs.

The number of tokens of a position is the least common multiple of the groups' block sizes. A group
with smaller blocks has several blocks in a position. Each place of such a block in the position is
a column, and the tiers treat a column like a cache group:

    position              0       1       2       3
    full attention        x       x       x       x
    windows, half the size    x x     x x     x x     x x     two columns
    states                0       0       0       x

In a windowed group vLLM drops blocks that no later token attends to, and puts its null block (id 0)
into a request's block table instead. A block of a state group contains the state after the block's
last token, so a hit needs only the last block. A load brings exactly the blocks that a hit needs,
so unknown kinds of groups are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ....tiers.settings.values import ConfigError
from ...parts import FirstSeen, Parts

NULL_BLOCK = 0

# Kinds with full attention. vLLM's blocks of attention sinks are in no request's table.
_FULL = ("FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec")
_WINDOW = ("SlidingWindowSpec", "SlidingWindowMLASpec")
_CHUNK = ("ChunkedLocalAttentionSpec",)
_STATE = ("MambaSpec",)
INSTEAD = "use StrataSpec (stratakv config vllm, without --connector) for it"


class Column(NamedTuple):
    """The blocks of a cache group that have the same place in every position."""

    group: int
    block_tokens: int
    place: int
    blocks_per_position: int
    first_seen: FirstSeen | None

    def blocks_of(self, table: Sequence[int], first: int, num_positions: int) -> list[int]:
        """Return the column's blocks at these positions, from a request's table of the group."""
        start, step = first * self.blocks_per_position + self.place, self.blocks_per_position
        return list(table[start : start + num_positions * step : step])


class Columns:
    """The columns of vLLM's KV cache. Raises ConfigError for an unknown kind of group."""

    def __init__(self, kv_cache_config: Any) -> None:
        groups = kv_cache_config.kv_cache_groups
        seen = [_first_seen(group, number) for number, group in enumerate(groups)]
        self.block_tokens: list[int] = [group.kv_cache_spec.block_size for group in groups]
        self.position_tokens = math.lcm(*self.block_tokens)
        self.num_groups = len(groups)
        self.all = tuple(
            Column(number, size, place, self.position_tokens // size, seen[number])
            for number, size in enumerate(self.block_tokens)
            for place in range(self.position_tokens // size)
        )
        self._first_of = [
            next(i for i, each in enumerate(self.all) if each.group == number)
            for number in range(self.num_groups)
        ]

    def blocks_per_position(self, group: int) -> int:
        return self.position_tokens // self.block_tokens[group]

    def number_of(self, group: int, index: int) -> int:
        return self._first_of[group] + index % self.blocks_per_position(group)

    def parts(self, num_ranks: int) -> Parts:
        """Return the parts of a position, on all ranks."""
        return Parts(
            self.position_tokens,
            [_seen_in_column(column) for column in self.all],
            ranks=range(num_ranks),
            num_ranks=num_ranks,
            # With several groups vLLM cannot use the ids of blocks that did not come.
            whole_only=self.num_groups > 1,
        )


def state_names(kv_cache_config: Any) -> tuple[tuple[Any, ...], ...]:
    """Return what determines the bytes of states, in addition to layers and block sizes: for each
    layer of each state group the kind, and the shapes and dtypes of the layer's tensors."""
    return tuple(
        (
            number,
            layer,
            str(getattr(spec.mamba_type, "name", spec.mamba_type)),
            [list(shape) for shape in spec.shapes],
            [str(dtype) for dtype in spec.dtypes],
        )
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
        for layer in group.layer_names
        for spec in [spec_of_layer(group.kv_cache_spec, layer)]
        if type(spec).__name__ in _STATE
    )


def spec_of_layer(spec: Any, layer: str) -> Any:
    """Return the spec of one layer. If layers of a group differ in size, each has its own spec."""
    inner: Mapping[str, Any] = getattr(spec, "kv_cache_specs", {})
    return inner.get(layer, spec)


def _first_seen(group: Any, number: int) -> FirstSeen | None:
    spec = spec_of_layer(group.kv_cache_spec, group.layer_names[0])
    kind = type(spec).__name__
    is_kept = getattr(spec, "prefix_cacheable", True) and getattr(group, "enable_kv_transfer", True)
    if is_kept and kind in _FULL:
        return None
    if is_kept and kind in _WINDOW:
        reach = spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0)
        return lambda position: max(0, position - reach)
    if is_kept and kind in _CHUNK:
        size = spec.attention_chunk_size
        return lambda position: position - position % size
    if is_kept and kind in _STATE:
        _check_states(spec, _shown(group, number))
        return lambda position: max(0, position - 1)
    raise ConfigError(
        "StrataConnector knows full, sliding-window and chunked attention and state-space layers, "
        f"and vLLM's {_shown(group, number)} is a {kind}; {INSTEAD}, or start vLLM with "
        "--disable-hybrid-kv-cache-manager where that is possible"
    )


def _seen_in_column(column: Column) -> FirstSeen | None:
    """Return the column's FirstSeen, which returns the first token of the first needed position."""
    seen, step = column.first_seen, column.blocks_per_position
    if seen is None or step == 1:
        return seen
    tokens = column.block_tokens

    def first_token(position: int) -> int:
        first_block = seen(position) // tokens
        return -(-max(0, first_block - column.place) // step) * step * tokens

    return first_token


def _check_states(spec: Any, shown: str) -> None:
    if spec.mamba_cache_mode != "align":
        raise ConfigError(
            f"vLLM keeps the states of its {shown} in mode {spec.mamba_cache_mode}, in which no "
            "block holds the state where it ends; start vLLM with --enable-prefix-caching "
            "--mamba-cache-mode align"
        )
    if spec.num_speculative_blocks:
        raise ConfigError(
            f"vLLM's {shown} has {spec.num_speculative_blocks} blocks for proposed tokens, and a "
            "state that has seen a refused one is wrong (vllm#47194); start vLLM without "
            "--speculative-config"
        )


def _shown(group: Any, number: int) -> str:
    return f"cache group {number} ({', '.join(group.layer_names[:2])}, …)"
