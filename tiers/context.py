# SPDX-License-Identifier: Apache-2.0
"""What a tier may know of the request for which it is asked, beside keys; and how a store hears of
it that wants to."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import StoreTier
    from .tag import Proof


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """Who asks, and how much it matters. Everything is optional, and nothing changes an answer:
    keys say what a block is."""

    tenant: str | None = None
    session: str | None = None  # requests of one conversation or job
    priority: int = 0  # the lower, the earlier
    pin: bool = False  # its blocks will be wanted again
    adapter: str | None = None
    transfer: Mapping[str, object] | None = None  # parameters of a transfer between engines


NO_CONTEXT = RequestContext()


def load_for(
    store: StoreTier,
    keys: Sequence[bytes],
    buffers: Sequence[memoryview],
    context: RequestContext,
) -> Future[list[Proof | None]]:
    """`StoreTier.load`; a store that does not know contexts never gets one."""
    more = {"context": context} if _takes_context(store.load) else {}
    return store.load(keys, buffers, **more)


def prefetch_lookup_for(
    store: StoreTier, keys: Sequence[bytes], context: RequestContext
) -> Future[None] | None:
    """`StoreTier.prefetch_lookup`; a store that does not know contexts never gets one."""
    more = {"context": context} if _takes_context(store.prefetch_lookup) else {}
    return store.prefetch_lookup(keys, **more)


def _takes_context(method: Callable[..., object]) -> bool:
    return _names_context(getattr(method, "__func__", method))


@lru_cache(maxsize=256)
def _names_context(function: Callable[..., object]) -> bool:
    try:
        return "context" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # nothing is known of it
        return False
