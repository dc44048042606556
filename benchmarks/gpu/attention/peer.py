# SPDX-License-Identifier: Apache-2.0
"""What a peer of the attention kernels is to `peers.py`, and how foreign functions are called.

Versions of a peer differ in the names of their arguments, so a call passes those that a function
has.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .cases import Batch

PeerLaunch = Callable[[int], Tensor]  # the attention over that layer of the batch


class PeerRefused(Exception):
    """This peer is not here, or cannot do this case; says why."""


class Peer(Protocol):
    """One other implementation. Making one imports it, and raises what the import raises."""

    name: str
    remark: str  # what a reader of its figures must know

    def __init__(self) -> None: ...

    def prepare(self, batch: Batch) -> PeerLaunch:
        """Everything that is done once for a batch; what is returned is timed. Raises PeerRefused
        for a batch that this peer has no kernel for, and whatever the peer raises."""
        ...


def import_first(modules: Sequence[str], name: str) -> Any:
    """`name` from the first module that has it, for modules move between versions. Raises
    PeerRefused with what happened to each, or whatever else an import raises."""
    reasons = []
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            reasons.append(f"{module}: {error}")
    raise PeerRefused("; ".join(reasons))


def known_arguments(function: Callable[..., Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Those of `wanted` that `function` has; all, if it takes any name."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return wanted
    return {name: value for name, value in wanted.items() if name in parameters}


def planes(batch: Batch, layer: int) -> tuple[Tensor, Tensor]:
    """K and V of a layer as `[num_blocks, block_size, kv heads, head_dim]`: views, no copies."""
    key, value = batch.layers[layer].unbind(1)
    return key, value


def refuse_float8(batch: Batch) -> None:
    """Peers take one scale for a whole tensor where our pools have one for each head or token."""
    if batch.case.scales:
        raise PeerRefused("a float8 pool with other scales than this peer's")


def only_tensor(answer: Any) -> Tensor:
    """The result of a function that may give the softmax sums with it."""
    first = answer[0] if isinstance(answer, tuple) else answer
    if not isinstance(first, torch.Tensor):
        raise PeerRefused(f"expected a tensor, got {type(first).__name__}")
    return first
