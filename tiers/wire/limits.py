# SPDX-License-Identifier: Apache-2.0
"""The cache server's limits on the work and memory that clients can cause. The limits of a single
message (keys, blocks, the longest lease) are in `frames.py`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..errors import TierConfigError

MIB = 1024**2
PIECE_BYTES = MIB  # the most payload of one BlockPiece


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one cache server. Raises TierConfigError for a value that is not above zero."""

    # gRPC
    max_message_bytes: int = 4 * MIB
    max_connections: int = 1024  # strangers (no valid credentials yet) included
    max_strangers: int = 256
    max_strangers_per_address: int = 64
    stranger_seconds: float = 10.0  # time for a stranger to send a valid call
    max_calls: int = 512  # running at once on all connections, watchers included
    max_streams_per_connection: int = 128
    max_bytes_in_flight: int = 256 * MIB  # blocks being sent or received by gRPC
    stall_seconds: float = 5.0  # a stream without a piece for so long is ended
    max_watchers: int = 64
    max_queued_keys: int = 65536  # keys queued for one watcher and not yet sent
    max_watched_keys: int = (
        131072  # per tenant store: blocks reported as stored, and looked up again at intervals
    )
    max_leases: int = 1024  # of one tenant's gRPC calls
    max_tickets: int = 256  # unused tickets of one tenant
    ticket_seconds: float = 10.0
    call_seconds: float = 30.0  # longest call, even if its client set a later deadline
    keepalive_seconds: float = 30.0  # silence before the server pings a client
    keepalive_timeout_seconds: float = 10.0
    min_ping_seconds: float = 5.0  # clients that ping more often are cut off
    # The data connection and the Unix socket
    max_data_connections: int = 256
    handshake_seconds: float = 5.0
    idle_seconds: float = 600.0
    request_seconds: float = 30.0
    # Tenant stores
    max_slots: int = (
        4 * 1024**2
    )  # per tenant store; a slot takes some hundred bytes besides its block

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < float("inf"):
                raise TierConfigError(f"{field.name} must be a number above 0, not {value}")
        if self.max_bytes_in_flight < 2 * PIECE_BYTES or self.max_message_bytes < 2 * PIECE_BYTES:
            raise TierConfigError(
                f"max_bytes_in_flight and max_message_bytes must hold two pieces of {PIECE_BYTES} "
                f"bytes, not {self.max_bytes_in_flight} and {self.max_message_bytes}"
            )
