# SPDX-License-Identifier: Apache-2.0
"""The places of a block's bytes in vLLM's KV cache, from vLLM's description of its layout.

vLLM allocates one buffer, and describes each set of equal layers by three numbers: the page of
layer `l` of block `b` begins at `offset + l * layer_stride + b * block_stride`. A block in the
tiers consists of the pages of all layers, in vLLM's order, one after the other:

    layers outermost     a part [blocks, layers, page bytes], with vLLM's strides
    blocks outermost     a part [blocks, layers * page bytes]; without other parts vLLM's KV cache
                         is like StrataKV's own pool, and a GPU copies a block at once

Cache groups overlay each other: a block belongs to one group at a time, and the layers of all
groups use the same bytes. So a block has the size of the largest group's pages. The unused bytes of
a block of a smaller group are copied too.

The engine does not start if a registered tensor begins at another place than described."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ....tiers.settings.values import ConfigError
from .groups import spec_of_layer

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, slots=True)
class PagePart:
    """The pages of some layers in every block: for each layer a page of `page_bytes`."""

    layers: tuple[str, ...]
    page_bytes: int
    offset: int
    layer_stride: int
    block_stride: int

    @property
    def block_bytes(self) -> int:
        return len(self.layers) * self.page_bytes

    @property
    def end(self) -> int:
        """The offset of the first byte after the part's pages of block 0."""
        return self.offset + (len(self.layers) - 1) * self.layer_stride + self.page_bytes

    def places(self) -> list[tuple[int, int, int]]:
        """Return the start of each layer's page in block 0, its bytes, and the stride of blocks."""
        starts = [self.offset + i * self.layer_stride for i in range(len(self.layers))]
        return [(start, self.page_bytes, self.block_stride) for start in starts]


@dataclass(frozen=True, slots=True)
class PagePlan:
    """The layout of blocks in a buffer: the parts of each cache group, and the parts to copy."""

    num_blocks: int
    parts: tuple[PagePart, ...]
    groups: tuple[tuple[PagePart, ...], ...]

    @property
    def block_bytes(self) -> int:
        """The bytes of a block, without the gaps that vLLM leaves between pages."""
        return sum(part.block_bytes for part in self.parts)

    @property
    def is_dense(self) -> bool:
        """Whether the buffer consists only of whole blocks, one after the other."""
        if len(self.parts) != 1:
            return False
        [part] = self.parts
        return (
            (len(part.layers) == 1 or part.layer_stride == part.page_bytes)
            and part.block_stride == part.block_bytes
            and part.offset == 0
        )


def plan_pages(kv_cache_config: Any) -> PagePlan:
    """Return the plan for vLLM's KV cache. Raises ConfigError for an unsupported layout."""
    group_of = {
        layer: number
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
        for layer in group.layer_names
    }
    groups: list[list[PagePart]] = [[] for _ in kv_cache_config.kv_cache_groups]
    for tensor in kv_cache_config.kv_cache_tensors:
        if getattr(tensor, "host_resident", False):
            raise ConfigError("StrataConnector cannot store a KV cache that lies in host memory")
        number = group_of[tensor.layers[0]]
        spec = kv_cache_config.kv_cache_groups[number].kv_cache_spec
        sizes = {spec_of_layer(spec, layer).page_size_bytes for layer in tensor.layers}
        if len(sizes) != 1 or {group_of[layer] for layer in tensor.layers} != {number}:
            raise ConfigError(f"vLLM calls layers equal whose pages are not: {sorted(sizes)} bytes")
        part = PagePart(
            tuple(tensor.layers),
            sizes.pop(),
            tensor.offset,
            tensor.layer_stride,
            tensor.block_stride,
        )
        if part.layer_stride < part.page_bytes or part.block_stride < part.page_bytes:
            raise ConfigError(
                f"in vLLM's KV cache layout a page of {part.page_bytes} bytes is not in one piece "
                f"(strides {part.layer_stride} and {part.block_stride}); start vLLM with "
                "VLLM_KV_CACHE_LAYOUT=LBHNC or BLHNC"
            )
        groups[number].append(part)
    if not all(groups) or not groups:
        raise ConfigError("vLLM has a cache group without a KV cache, or none to store at all")
    made = tuple(tuple(parts) for parts in groups)
    return PagePlan(kv_cache_config.num_blocks, _overlaid(made), made)


def _overlaid(groups: Sequence[tuple[PagePart, ...]]) -> tuple[PagePart, ...]:
    """Return the parts that cover the pages of every group. Raises ConfigError if none do."""
    if len(groups) == 1:
        return groups[0]
    everything = [part for parts in groups for part in parts]
    [stride, *others] = {part.block_stride for part in everything}
    if not others and max(part.end for part in everything) <= stride:
        # With blocks outermost, a single part covers the whole block.
        return (PagePart(("whole blocks",), stride, 0, stride, stride),)
    largest = max(groups, key=lambda parts: sum(part.block_bytes for part in parts))
    known = {place for part in largest for place in part.places()}
    for part in everything:
        for place in part.places():
            if place not in known:
                raise ConfigError(
                    f"vLLM's cache groups share no layout: a page of {part.layers[0]} begins at "
                    f"byte {place[0]}, has {place[1]} bytes and comes every {place[2]}, as none "
                    "of the largest group does; use StrataSpec (stratakv config vllm, without "
                    "--connector) for this model"
                )
    return largest


def buffer_of(plan: PagePlan, kv_caches: Mapping[str, Any]) -> torch.Tensor:
    """Return the buffer's bytes `[size]`. Raises ConfigError if a tensor is not at its place."""
    import torch

    first = _tensors_of(kv_caches[plan.groups[0][0].layers[0]])[0]
    storage = first.untyped_storage()
    for part in (part for parts in plan.groups for part in parts):
        for layer, (place, page_bytes, block_stride) in zip(
            part.layers, part.places(), strict=True
        ):
            tensors = _tensors_of(kv_caches[layer])
            where = min(tensor.data_ptr() for tensor in tensors) - storage.data_ptr()
            end = place + (plan.num_blocks - 1) * block_stride + page_bytes
            if where != place or end > storage.nbytes():
                raise ConfigError(
                    f"vLLM's KV cache of {layer} begins at byte {where} of its buffer, where "
                    f"{place} was announced, and ends by {storage.nbytes()}; this vLLM lays its "
                    "KV cache out in a way that StrataKV does not know"
                )
    whole = torch.empty(0, dtype=torch.uint8, device=first.device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))


def _tensors_of(registered: Any) -> Sequence[torch.Tensor]:
    """Return a layer's tensors: one for attention; one or several for a state, in one page."""
    return registered if isinstance(registered, list | tuple) else [registered]


def parts_of(plan: PagePlan, buffer: torch.Tensor) -> Sequence[np.ndarray[Any, Any]]:
    """Return views of the parts of all blocks as bytes: `[blocks, layers, bytes]`, or `[blocks,
    bytes]` if the layers' pages of a block are contiguous."""
    import numpy as np

    memory = buffer.numpy()
    made = []
    for part in plan.parts:
        rows = memory[part.offset :]
        if part.layer_stride == part.page_bytes:
            shape, strides = (plan.num_blocks, part.block_bytes), (part.block_stride, 1)
        else:
            shape = (plan.num_blocks, len(part.layers), part.page_bytes)  # type: ignore[assignment] # one axis more
            strides = (part.block_stride, part.layer_stride, 1)  # type: ignore[assignment] # as above
        made.append(np.lib.stride_tricks.as_strided(rows, shape, strides))
    return made


def pool_of(plan: PagePlan, buffer: torch.Tensor) -> torch.Tensor:
    """Return the buffer as a contiguous pool `[blocks, bytes]`. Raises ConfigError for gaps."""
    if not plan.is_dense:
        raise ConfigError(
            "on a GPU StrataConnector copies whole blocks, and in vLLM's KV cache layout the "
            "layers of a block are not neighbours; start vLLM with VLLM_KV_CACHE_LAYOUT=BLHNC"
        )
    return buffer[: plan.num_blocks * plan.block_bytes].view(plan.num_blocks, plan.block_bytes)
