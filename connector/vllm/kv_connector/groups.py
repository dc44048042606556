# SPDX-License-Identifier: Apache-2.0
"""What of vLLM's cache groups a connector has to know: the tokens of a block, and which blocks of a
group the next token still attends to.

vLLM has no use for blocks of a windowed group that nothing attends to any more: their places in a
request's table hold its null block, 0. A load brings the others and no fewer, so a kind of group
whose rule is not known here is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....tiers.settings.values import ConfigError
from ...parts import FirstSeen, Parts

NULL_BLOCK = 0

_FULL = ("FullAttentionSpec", "MLAAttentionSpec")
_WINDOW = ("SlidingWindowSpec", "SlidingWindowMLASpec")
_CHUNK = ("ChunkedLocalAttentionSpec",)
INSTEAD = "use StrataSpec (stratakv config vllm, without --connector) for it"


def block_tokens_of(kv_cache_config: Any) -> int:
    """The tokens of a block. Raises ConfigError where groups differ in it."""
    sizes = {group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups}
    if len(sizes) != 1:
        raise ConfigError(
            f"vLLM's cache groups have blocks of {', '.join(map(str, sorted(sizes)))} tokens for "
            f"this model, and StrataConnector needs one size; {INSTEAD}"
        )
    tokens: int = sizes.pop()
    return tokens


def parts_of_groups(kv_cache_config: Any, num_ranks: int) -> Parts:
    """The parts of a position, on all ranks. Raises ConfigError for a kind of group that is not
    known."""
    groups = kv_cache_config.kv_cache_groups
    seen = [_first_seen(group, number) for number, group in enumerate(groups)]
    return Parts(
        block_tokens_of(kv_cache_config),
        seen,
        ranks=range(num_ranks),
        num_ranks=num_ranks,
        # vLLM can tell which blocks of a load did not come only where there is one group.
        whole_only=len(groups) > 1,
    )


def _first_seen(group: Any, number: int) -> FirstSeen | None:
    spec = group.kv_cache_spec
    inner: Mapping[str, Any] = getattr(spec, "kv_cache_specs", {})
    if inner:  # layers that differ in size only
        spec = next(iter(inner.values()))
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
    raise ConfigError(
        f"StrataConnector knows full, sliding-window and chunked attention, and vLLM's cache group "
        f"{number} ({', '.join(group.layer_names[:2])}, …) is a {kind}; {INSTEAD}, or start vLLM "
        "with --disable-hybrid-kv-cache-manager where that is possible"
    )
