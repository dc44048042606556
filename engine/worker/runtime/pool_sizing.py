# SPDX-License-Identifier: Apache-2.0
"""Computes how many KV pool blocks fit into a machine's memory together with the model. This module
only computes; `PoolSizer` measures.

On a GPU:

total * share                                       the engine's budget
    - libraries of this process                     outside torch's allocator
    - the most that torch held in the largest step  weights among it
    - the reserve                                   records of decode steps, kernels' scratch
= the KV pool

On the CPU, other processes use the same memory, and the pool is set to zero at the start. So the
pool takes at most half of the memory that weights, steps and the cpu tier leave, and no more than
is useful: `DEFAULT_POOL_BYTES` for small models; for large models `WEIGHTS_IN_POOL` times the size
of the weights, if enough requests may run; and always enough for one request of the whole context.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ....tiers.settings.sizes import rough_size
from ....tiers.settings.values import MAX_BLOCKS, MIB, ConfigError
from ...config.engine_config import DEFAULT_POOL_BYTES
from ..pool_demand import SHARE_FLAG, PoolDemand

# For partial sums of kernels that split a context, code that libraries load at their first call,
# and outputs of recorded batch sizes: together some hundreds of MiB for a model of 8 billion.
RESERVE_BYTES = 768 * MIB
HOST_SHARE = 0.5  # share of the remaining memory; other processes use it too
# Share of the remaining memory, for one request of a length that the user has set.
HOST_SHARE_AT_MOST = 0.9
WEIGHTS_IN_POOL = 4
MIN_CONTEXT = 2  # one token of a prompt and one of an answer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The free memory of a host, and the memory that the engine needs in addition to the pool, in
    bytes."""

    available_bytes: int
    weight_bytes: int
    step_bytes: int
    tier_bytes: int  # of the cpu tier
    state_bytes: int = 0  # of all requests that may run, for layers that carry states

    @property
    def left_bytes(self) -> int:
        taken = self.weight_bytes + self.step_bytes + self.tier_bytes + self.state_bytes
        return self.available_bytes - taken


def host_pool_blocks(
    memory: HostMemory, demand: PoolDemand, context: int, max_requests: int, *, is_asked: bool
) -> int:
    """Return the number of blocks of a pool on the host, including the null block. `context` is the
    length of the longest request in tokens. If the user has set this length (`is_asked`), the pool
    takes enough memory for one such request, up to HOST_SHARE_AT_MOST of the remaining memory.
    Raises ConfigError if the memory is too small for any pool."""
    request = demand.blocks(context) * demand.block_bytes
    useful = min(WEIGHTS_IN_POOL * memory.weight_bytes, max_requests * request)
    size = min(max(DEFAULT_POOL_BYTES, request, useful), int(HOST_SHARE * memory.left_bytes))
    if is_asked and size < request:
        size = min(request, int(HOST_SHARE_AT_MOST * memory.left_bytes))
    blocks = min(max(0, size) // demand.block_bytes, MAX_BLOCKS)
    if demand.longest(blocks, MIN_CONTEXT) < MIN_CONTEXT:
        raise ConfigError(
            f"{rough_size(memory.available_bytes)} of memory are free, and the weights take "
            f"{rough_size(memory.weight_bytes)}, steps {rough_size(memory.step_bytes)}"
            + (f", the cpu tier {rough_size(memory.tier_bytes)}" if memory.tier_bytes else "")
            + (
                f", the states of requests {rough_size(memory.state_bytes)} (lower --max-num-seqs)"
                if memory.state_bytes
                else ""
            )
            + ", which leaves no room for a KV pool; free memory, take a smaller model, a --dtype "
            "of fewer bytes, or give --kv-cache-memory-bytes"
        )
    return blocks


def longest_context(demand: PoolDemand, num_blocks: int, context: int) -> int:
    """Return the length in tokens of the longest request, up to `context`, that a pool of
    `num_blocks` blocks can hold. If the pool cannot hold any request, return `context`;
    `check_pool_size` then raises the error."""
    fits = demand.longest(num_blocks, context)
    return context if fits < MIN_CONTEXT else fits


def context_that_fits(demand: PoolDemand, num_blocks: int, context: int) -> int:
    """Return the longest request, in tokens, if the user has set no length: `context`, or what the
    pool can hold if that is less. A warning is logged if the result is less than `context`."""
    fits = longest_context(demand, num_blocks, context)
    if fits == context:
        return context
    logger.warning(
        "the context is %d tokens instead of the model's %d, since the KV pool holds no more in "
        "%s; %s would hold all (--kv-cache-memory-bytes), and --max-model-len asks for a length",
        fits,
        context,
        rough_size(num_blocks * demand.block_bytes),
        rough_size(demand.blocks(context) * demand.block_bytes),
    )
    return fits


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """The memory of one device in bytes, measured before and after a run of the largest step."""

    total_bytes: int
    free_before_bytes: int  # before this process took any memory
    free_after_bytes: int  # after the run; torch then held `held_after_bytes`
    held_after_bytes: int  # bytes in torch's allocator after the run
    weight_bytes: int
    peak_bytes: int  # the most that torch's allocator held during the run

    @property
    def outside_bytes(self) -> int:
        """Bytes that this process holds outside torch's allocator."""
        return max(0, self.free_before_bytes - self.free_after_bytes - self.held_after_bytes)


def check_free(total_bytes: int, free_bytes: int, share: float) -> None:
    """Raise ConfigError if less than `share` of the device's memory is free, because other
    processes use it. This check must come before the weights are read."""
    budget = int(total_bytes * share)
    if budget > free_bytes:
        fits = int(100 * free_bytes / total_bytes) / 100
        lower = f"lower {SHARE_FLAG} to {fits:g} or " if fits > 0 else ""
        raise ConfigError(
            f"{SHARE_FLAG} {share:g} asks for {_gib(budget)} of the GPU's {_gib(total_bytes)}, and "
            f"{_gib(free_bytes)} are free; {lower}stop what holds the rest (nvidia-smi names it)"
        )


def check_weights(weight_bytes: int, free_bytes: int) -> None:
    """Raise ConfigError if the model's weights do not fit into the free memory."""
    if weight_bytes > free_bytes:
        raise ConfigError(
            f"the weights take {_gib(weight_bytes)} and {_gib(free_bytes)} of the GPU's memory are "
            "free; take a smaller model, --dtype bfloat16, or stop what holds the rest (nvidia-smi "
            "names it)"
        )


def pool_blocks(use: MemoryUse, demand: PoolDemand, max_model_len: int, share: float) -> int:
    """Return the number of blocks of a GPU's pool, including the null block. Raise ConfigError if
    one request of `max_model_len` tokens does not fit; the text has the needed memory and flags
    that help."""
    budget = int(use.total_bytes * share)
    taken = use.outside_bytes + use.peak_bytes + RESERVE_BYTES
    blocks = min(max(0, budget - taken) // demand.block_bytes, MAX_BLOCKS)
    needed = demand.blocks(max_model_len)
    if blocks >= needed:
        return blocks
    wanted = taken + needed * demand.block_bytes
    share_needed = -(-100 * wanted // use.total_bytes) / 100
    cures = [f"raise {SHARE_FLAG} to {share_needed:g}"] if share_needed <= 1 else []
    fits = demand.longest(blocks, max_model_len)
    cures += [f"lower --max-model-len to {fits}"] if fits >= 2 else ["take a smaller model"]
    steps = use.peak_bytes - use.weight_bytes
    raise ConfigError(
        f"{_gib(budget)} of GPU memory ({SHARE_FLAG} {share:g} of {_gib(use.total_bytes)}) cannot "
        f"hold weights of {_gib(use.weight_bytes)}, steps of {_gib(steps)}, "
        f"{_gib(use.outside_bytes + RESERVE_BYTES)} of libraries and reserve, and K and V of one "
        f"request of {max_model_len} tokens, {_gib(needed * demand.block_bytes)}: together "
        f"{_gib(wanted)}; {', '.join(cures)}, lower --max-num-batched-tokens, or give "
        "--kv-cache-dtype fp8_e4m3"
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
