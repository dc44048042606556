# SPDX-License-Identifier: Apache-2.0
"""Settings of a remote store: credentials, deadlines and queue limits."""

from __future__ import annotations

from dataclasses import dataclass, field

from .credentials import Credentials

# How long a request waits for its look-up, which takes 1 to 5 ms on a quiet network.
LOOKUP_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """The credentials, the deadlines of single calls in seconds, and the limits of the queues."""

    credentials: Credentials = field(default_factory=Credentials)
    attach_seconds: float = 2.0
    lookup_seconds: float = LOOKUP_SECONDS
    # Less than the 5 s after which the hierarchy gives up a read and uses no later block.
    load_seconds: float = 3.0
    store_seconds: float = 5.0
    queue_bytes: int = 256 * 1024**2  # limit of queued loads, and of queued stores
    stores: bool = True  # False: blocks are only loaded
    shares_memory: bool = True  # whether to map a local server's memory
    # All engines that share blocks use one key. A block tagged without the key is a miss.
    tag_key: bytes | None = field(default=None, repr=False)
    # For keys that do not identify the model: a block of another namespace is a miss.
    namespace: bytes = b""
