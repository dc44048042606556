# SPDX-License-Identifier: Apache-2.0
"""Checks that refuse impossible settings, impossible requests, and too many requests."""

from __future__ import annotations

from ...tiers.settings.sizes import show_size
from ...tiers.settings.values import ConfigError
from ..cache.kv_cache_manager import KVCacheManager
from ..config.engine_config import SchedulerConfig
from ..request.request import Request

# The most bytes of the prompt embeddings and pictures of all unfinished requests together.
MAX_EMBED_BYTES = 1 << 30


class QueueFull(ValueError):
    """The waiting queue is full; the caller may try again later."""


def check_config(config: SchedulerConfig, max_model_len: int) -> None:
    """Raise ConfigError if the longest prompt may not fit into a step without chunked prefill."""
    if config.enable_chunked_prefill:
        return
    if config.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} cannot hold a whole prompt "
            f"of up to {max_model_len} tokens, as --no-enable-chunked-prefill requires; raise it "
            "or allow chunks"
        )
    if config.long_prefill_token_threshold:
        raise ConfigError(
            "--long-prefill-token-threshold cuts prompts into chunks, which "
            "--no-enable-chunked-prefill forbids; drop one of them"
        )


def check_request(request: Request, manager: KVCacheManager) -> None:
    """Raise ValueError for a request that can never run, because it does not fit into the context
    or, even alone, into the pool. The error says what was expected, what came and what to do."""
    num_prompt, max_model_len = request.num_prompt_tokens, manager.max_model_len
    if num_prompt >= max_model_len:
        raise ValueError(
            f"the prompt has {num_prompt} tokens, but a context of {max_model_len} must hold it "
            "and at least one new token; shorten the prompt"
        )
    # The last token is sampled but never computed, so it needs no slot.
    longest = min(num_prompt + request.max_tokens, max_model_len) - 1
    needed = manager.num_blocks_for(longest)
    usable = manager.pool.num_usable
    if needed > usable:
        raise ValueError(
            f"a prompt of {num_prompt} tokens with max_tokens {request.max_tokens} needs {needed} "
            f"blocks, but the KV pool has {usable}; ask for less, or start with a larger pool"
        )


def check_embeds(request: Request, held: int) -> None:
    """Raise QueueFull if the embeddings and pictures of unfinished requests (`held` bytes) and of
    this request exceed MAX_EMBED_BYTES together. If `held` is 0, any size fits."""
    more = request.embed_bytes
    if held and held + more > MAX_EMBED_BYTES:
        raise QueueFull(
            f"prompt embeddings and pictures of unfinished requests take {show_size(held)}, and "
            f"with {show_size(more)} more it would be over {show_size(MAX_EMBED_BYTES)}; try later"
        )
