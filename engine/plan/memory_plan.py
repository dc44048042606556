# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of `stratakv plan`: the memory that a model needs, the capacity of each tier, and
the prefix lengths from which loading is faster than computing.

This module computes bytes, blocks and seconds from shapes, sizes and rates. The module does not
measure, read files or print. The prefill of n tokens takes this number of operations:

    2 * n * (elements of the layers' matrices)  +  2 * n^2 * layers * heads * head_dim
             (of experts: only a token's experts)

The term with n^2 is for causal attention: the scores and the weighted sums of values. Loads are
counted in whole blocks, each contiguous. The time of a block from a lower tier is the time of a
read into the CPU tier plus the time of a copy to the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...tiers.block import DTYPE_BYTES, BlockLayout
from ...tiers.settings.sizes import rough_size
from ...tiers.settings.values import MIB, ConfigError
from ..cache.group_spec import CacheGroups, StateBytes, num_state_slots
from ..config.engine_config import SchedulerConfig
from ..models.checkpoint.tensor_shapes import EXPERTS_DOWN, EXPERTS_GATE_UP
from ..models.model_spec import ModelSpec
from ..models.vision.vision_shapes import encoder_bytes

Shapes = Mapping[str, tuple[int, ...]]

PREFIX_TOKENS = (1024, 8192, 32768)
# The KV pool has one null block, which never has tokens, and needs at least one more block.
NULL_BLOCKS = 1
MIN_POOL_BLOCKS = 2
_LAYER_PREFIX = "model.layers."
STATES = "states"  # `Group.attention` of the layers with recurrent states


@dataclass(frozen=True, slots=True)
class Prefill:
    """The seconds for the prefill of n tokens: `per_token * n + per_square * n**2`."""

    per_token: float
    per_square: float = 0.0

    def estimate_seconds(self, num_tokens: int) -> float:
        return self.per_token * num_tokens + self.per_square * num_tokens**2


@dataclass(frozen=True, slots=True)
class Memory:
    """The size of one device's memory and of its parts, in bytes."""

    total_bytes: int
    weight_bytes: int
    reserve_bytes: int
    state_bytes: int = 0  # recurrent states of the running requests

    @property
    def kv_bytes(self) -> int:
        return self.total_bytes - self.weight_bytes - self.reserve_bytes - self.state_bytes


@dataclass(frozen=True, slots=True)
class Capacity:
    """The size of one tier, and the numbers of blocks, tokens and requests that fit into it."""

    size_bytes: int
    blocks: int
    tokens: int
    requests_of_max_model_len: int
    requests_of_typical_length: int


@dataclass(frozen=True, slots=True)
class Group:
    """A cache group, and the number of the group's blocks that a request of `max_model_len` has."""

    attention: str
    layers: tuple[int, ...]
    page_bytes: int  # the size of K and V of one block of tokens in the group's layers
    pages: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Waste:
    """The average unused space in a request's last block, if all lengths are equally likely."""

    tokens_per_request: float
    bytes_per_request: float
    share_of_typical: float


@dataclass(frozen=True, slots=True)
class Load:
    """The time to compute a prefix, and the time to load the prefix from each tier."""

    tokens: int
    blocks: int
    size_bytes: int
    prefill_seconds: float
    load_seconds: dict[str, float]


def num_elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def weight_bytes(shapes: Shapes, dtype: str, num_devices: int = 1) -> int:
    """Return the bytes of weights on each device with tensor parallelism, which splits matrices
    between the devices; every device has all vectors."""
    matrices = sum(math.prod(shape) for shape in shapes.values() if len(shape) > 1)
    vectors = num_elements(shapes) - matrices
    return (-(-matrices // num_devices) + vectors) * DTYPE_BYTES[dtype]


def activation_bytes(spec: ModelSpec, dtype: str) -> int:
    """Return an estimate of the bytes that a step of the default size needs for activations, that
    is, without weights, KV pool and states. Each token of the step needs two hidden states, two
    rows of the MLP, and the inputs and output of attention (or of a layer with recurrent states, if
    larger). Each request of the step needs two float32 rows over the vocabulary. A step may also
    encode the largest picture."""
    step = SchedulerConfig()
    mixer = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    if (state := spec.state) is not None:
        # A layer with states needs rows before and after its convolution, and two output rows.
        mixer = max(mixer, state.in_size + state.conv_channels + 2 * state.inner_size)
    row = 2 * spec.hidden_size + mixer + 2 * spec.widest_mlp
    logits = 2 * step.max_num_seqs * spec.vocab_size * DTYPE_BYTES["float32"]
    size = DTYPE_BYTES[dtype]
    pictures = 0 if spec.vision is None else encoder_bytes(spec.vision, size)
    return step.max_num_batched_tokens * row * size + logits + pictures


def running_state_bytes(
    states: StateBytes, num_requests: int, num_devices: int = 1, num_drafts: int = 0
) -> int:
    """Return the bytes of recurrent states on each device for `num_requests` running requests, each
    with `num_drafts` draft tokens."""
    return num_state_slots(num_requests, num_drafts) * -(-states.num_bytes // num_devices)


def device_layout(
    spec: ModelSpec, block_size: int, kv_dtype: str, num_devices: int = 1
) -> BlockLayout:
    """Return the layout of a block on each device with tensor parallelism. Raise ConfigError if
    `num_devices` does not divide the numbers of heads."""
    for what, count in (("attention", spec.num_heads), ("key-value", spec.num_kv_heads)):
        if count % num_devices:
            raise ConfigError(
                f"--tensor-parallel-size {num_devices} does not divide the model's {count} {what} "
                "heads; take a divisor"
            )
    whole = spec.layout(block_size, kv_dtype)
    return replace(whole, num_kv_heads=whole.num_kv_heads // num_devices)


def check_memory(memory: Memory, layout: BlockLayout) -> None:
    """Raise ConfigError unless the weights, the reserve for activations, the states and the
    smallest KV pool fit into the memory."""
    needed = memory.total_bytes - memory.kv_bytes + MIN_POOL_BLOCKS * layout.page_bytes
    if memory.total_bytes < needed:
        states = ""
        if memory.state_bytes:
            states = (
                f", the states of running requests ({rough_size(memory.state_bytes)}; lower "
                "--max-num-seqs)"
            )
        raise ConfigError(
            f"{rough_size(memory.total_bytes)} of memory cannot hold the weights "
            f"({rough_size(memory.weight_bytes)}), the reserve "
            f"({rough_size(memory.reserve_bytes)}){states} and {MIN_POOL_BLOCKS} blocks of "
            f"{rough_size(layout.page_bytes)}; give --memory {-(-needed // MIB)}MiB or more, a "
            "--dtype of fewer bytes, or a larger --tensor-parallel-size"
        )


def capacity(
    size_bytes: int,
    blocks: int,
    block_size: int,
    *,
    max_model_len: int,
    typical_tokens: int,
    null_blocks: int = 0,
) -> Capacity:
    """Return the capacity of a tier of `blocks` blocks, of which `null_blocks` never have tokens.
    Each request takes whole blocks."""
    usable = blocks - null_blocks
    return Capacity(
        size_bytes=size_bytes,
        blocks=blocks,
        tokens=usable * block_size,
        requests_of_max_model_len=usable // -(-max_model_len // block_size),
        requests_of_typical_length=usable // -(-typical_tokens // block_size),
    )


def pool_capacity(
    groups: CacheGroups, size_bytes: int, *, max_model_len: int, typical_tokens: int
) -> Capacity:
    """Return the capacity of a KV pool of `size_bytes` bytes, in blocks over all layers. In layers
    with sliding-window attention, a request has the blocks of the window and of a step of the
    default size. The number of tokens is counted as if every layer kept all tokens."""
    blocks = size_bytes // (groups.layout.place_bytes * groups.num_places)
    usable = groups.num_pages(blocks) - NULL_BLOCKS

    def requests(num_tokens: int) -> int:
        return max(0, usable) // groups.most_pages(num_tokens, SchedulerConfig().most_step_tokens)

    return Capacity(
        size_bytes=size_bytes,
        blocks=blocks,
        tokens=(blocks - NULL_BLOCKS) * groups.layout.block_size,
        requests_of_max_model_len=requests(max_model_len),
        requests_of_typical_length=requests(typical_tokens),
    )


def group_table(
    groups: CacheGroups, max_model_len: int, state_layers: tuple[int, ...] = ()
) -> list[Group]:
    """Return, for each cache group, the largest number of blocks that a request of `max_model_len`
    tokens has, in steps of the default size. The recurrent states of `state_layers` are one more
    group, with the size of one saved state."""
    size, step = groups.layout.block_size, SchedulerConfig().most_step_tokens
    rows = []
    for group in groups.groups:
        pages = group.attention.most_blocks(max_model_len, size, step)
        page_bytes = groups.layout.page_bytes
        row = Group(str(group.attention), group.layers, page_bytes, pages, pages * page_bytes)
        rows.append(row)
    if groups.state is not None:
        pages = groups.state.num_pages
        page_bytes = groups.layout.page_bytes
        rows.append(Group(STATES, state_layers, page_bytes, pages, pages * page_bytes))
    return rows


def waste(layout: BlockLayout, typical_tokens: int) -> Waste:
    """Return the average unused space in a request's last block."""
    tokens = (layout.block_size - 1) / 2
    return Waste(tokens, tokens * layout.token_bytes, tokens / (typical_tokens + tokens))


def prefill_of(shapes: Shapes, spec: ModelSpec, operations_per_second: float) -> Prefill:
    """Return the prefill time at `operations_per_second`, the total over all devices."""
    matrices = 0.0
    for name, shape in shapes.items():
        if not name.startswith(_LAYER_PREFIX) or len(shape) < 2:
            continue
        share = 1.0
        if name.endswith((EXPERTS_GATE_UP, EXPERTS_DOWN)) and spec.experts is not None:
            share = spec.experts.num_per_token / spec.experts.num_experts
        matrices += share * math.prod(shape)
    attention = 2.0 * spec.num_kv_layers * spec.num_heads * spec.head_dim
    return Prefill(2.0 * matrices / operations_per_second, attention / operations_per_second)


def block_seconds(
    layout: BlockLayout, rates: Mapping[str, float], num_devices: int = 1
) -> dict[str, float]:
    """Return the seconds to load one block from each tier to the devices; `rates` are in bytes per
    second.

    Each device has its own link to the CPU tier; all devices share the disk and the network."""
    to_device = layout.page_bytes / rates["cpu"]
    seconds = {"cpu": to_device}
    if "ssd" in rates:
        seconds["ssd"] = num_devices * layout.slot_bytes / rates["ssd"] + to_device
    if "network" in rates:
        seconds["network"] = num_devices * layout.page_bytes / rates["network"] + to_device
    return seconds


def prefix_lengths(max_model_len: int) -> list[int]:
    """Return the prefix lengths, in tokens, whose times are compared: the values of PREFIX_TOKENS
    below `max_model_len`, and `max_model_len`."""
    return [tokens for tokens in PREFIX_TOKENS if tokens < max_model_len] + [max_model_len]


def loads(
    lengths: Sequence[int],
    layout: BlockLayout,
    seconds: Mapping[str, float],
    prefill: Prefill,
    num_devices: int = 1,
    num_state_blocks: int = 0,
) -> list[Load]:
    """Return a `Load` for the full blocks of each prefix, without prefixes shorter than a block.
    `num_state_blocks`: the blocks of recurrent states that are loaded with each prefix."""
    rows = []
    for length in lengths:
        blocks = length // layout.block_size
        tokens = blocks * layout.block_size
        if blocks:
            blocks += num_state_blocks
            rows.append(
                Load(
                    tokens=tokens,
                    blocks=blocks,
                    size_bytes=blocks * layout.page_bytes * num_devices,
                    prefill_seconds=prefill.estimate_seconds(tokens),
                    load_seconds={tier: blocks * each for tier, each in seconds.items()},
                )
            )
    return rows


def break_even_tokens(
    seconds_per_block: float, block_size: int, prefill: Prefill, num_state_blocks: int = 0
) -> int | None:
    """Return the length, in tokens of whole blocks, from which a prefix is loaded faster than
    computed; None if loading is never faster.

    The time of an empty prefix is 0, except that every load includes the blocks of recurrent
    states. If the first token is computed faster than loaded, only the quadratic term of prefill
    can make loading faster."""
    dearer, states = seconds_per_block / block_size - prefill.per_token, 0.0
    states = num_state_blocks * seconds_per_block
    if dearer < 0 and not states:
        return block_size
    if prefill.per_square == 0:
        if dearer >= 0:
            return None
        tokens = states / -dearer
    else:
        root = math.sqrt(dearer * dearer + 4 * prefill.per_square * states)
        tokens = (dearer + root) / (2 * prefill.per_square)
    return (math.floor(tokens / block_size) + 1) * block_size
