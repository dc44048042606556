# SPDX-License-Identifier: Apache-2.0
"""Settings of a remote store: credentials, deadlines and queue limits."""

from __future__ import annotations

from dataclasses import dataclass, field

from .credentials import Credentials

# A request waits for its look-up. A whole prompt's look-up takes 1 to 5 ms on a quiet network.
LOOKUP_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """The credentials, the deadlines of single calls in seconds, and the limits of the queues."""

    credentials: Credentials = field(default_factory=Credentials)
    attach_seconds: float = 2.0
    lookup_seconds: float = LOOKUP_SECONDS
    # The tiers above give up a read after 5 s; a block that comes later is not used.
    load_seconds: float = 3.0
    store_seconds: float = 5.0
    queue_bytes: int = 256 * 1024**2  # of queued loads, and as many bytes of queued stores
    stores: bool = True  # False: only load other engines' blocks
    shares_memory: bool = True  # with a server on this host
    # All engines that share blocks use one key. A block tagged without the key is a miss.
    tag_key: bytes | None = field(default=None, repr=False)
    # For keys that do not name the model: a block of another namespace is a miss.
    namespace: bytes = b""
