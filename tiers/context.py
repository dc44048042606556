# SPDX-License-Identifier: Apache-2.0
"""What a tier may know of the request for which it is asked, beside keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
