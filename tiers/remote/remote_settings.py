# SPDX-License-Identifier: Apache-2.0
"""Settings of a remote store: servers, credentials and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass, field

from .credentials import Credentials

# A request waits for this one. A look-up of a whole prompt takes 1 to 5 ms on a quiet network.
LOOKUP_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """Deadlines in seconds, each of one call, and what may wait."""

    credentials: Credentials = field(default_factory=Credentials)
    attach_seconds: float = 2.0
    lookup_seconds: float = LOOKUP_SECONDS
    # Some tiers above give up a read after 5 s; a block that comes later is of no use.
    load_seconds: float = 3.0
    store_seconds: float = 5.0
    queue_bytes: int = 256 * 1024**2  # of blocks that wait to be loaded, and again to be stored
    stores: bool = True  # blocks, rather than load those of others alone
    shares_memory: bool = True  # where the server is on this host
    # The same for all engines that share blocks; a block without a tag made with it is a miss.
    tag_key: bytes | None = field(default=None, repr=False)
    # Where keys do not say of which model a block is: blocks stored with another one are misses.
    namespace: bytes = b""
