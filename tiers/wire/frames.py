# SPDX-License-Identifier: Apache-2.0
"""The messages of the data connection, which moves blocks without gRPC.

A client opens the connection with a ticket from the gRPC call `OpenData`, over TCP (with TLS if the
service has it) or over a Unix socket. On a Unix socket the server shares the tenant's memory, and
the messages have slot numbers instead of blocks.

    client  greeting                          server  welcome (on a Unix socket: and the memory)
    client  request: keys                     server  one reply or more

    LOAD     n keys                           replies until n states came: states, then for each
                                              HIT, in order, its payload and its tag
    STORE    n keys                           reply: WANTED, KEPT or NO_ROOM for each
             payload and proof of each WANTED reply: KEPT, NO_ROOM or CORRUPT for each
    PIN      n keys, milliseconds             reply: lease, states, a slot and a tag for each HIT
    UNPIN    lease                            no reply
    RESERVE  n keys, milliseconds             reply: lease, states, a slot for each WANTED
    COMMIT   lease, n proofs                  reply: a state for each; ends the lease. n is the
                                              number of WANTED; a proof of zeros frees its slot

A proof has a tag, which the storing engine made, and the payload's digest (`tiers/tag.py`). The
server checks digests and keeps tags unchanged; a client checks the tag of each loaded block.

All integers are little-endian. PIN, UNPIN, RESERVE and COMMIT work on Unix sockets only. A client
may send a request before the last reply has arrived; replies are sent in the order of requests. The
server closes the connection after any other message."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from ..block import KEY_BYTES, cut_keys
from ..tag import PROOF_BYTES

MAGIC = b"STRKVDAT"
VERSION = 2  # version 1 had no tags from the storing engine
TICKET_BYTES = 32
BOOT_ID_BYTES = 16
SLOT_BYTES = 4
MAX_KEYS = 4096  # the most keys of one look-up
MAX_BLOCKS = 256  # the most blocks of a request that moves, pins or reserves
MAX_LEASE_SECONDS = 60.0
NO_PROOF = bytes(PROOF_BYTES)

GREETING = struct.Struct("<8sHHI32s")  # magic, version, zero, zero, ticket
WELCOME = struct.Struct("<8sHHI16sQQQ")  # magic, version, status, zero, boot id, see Welcome
REQUEST = struct.Struct("<BBHIQQ")  # verb, zero, zero, count, number, argument
REPLY = struct.Struct("<BBHIQQ")  # verb, status, zero, blocks, number, argument


_PART_BYTES = 8 * 1024**2
_PART_SHARE = 8


class WireError(Exception):
    """The peer sent a message that the protocol does not allow."""


class Verb(IntEnum):
    """The operation of a request."""

    LOAD = 1
    STORE = 2
    PIN = 3
    UNPIN = 4
    RESERVE = 5
    COMMIT = 6


class State(IntEnum):
    """The state of one block in a reply, numbered as `BlockState` in cache_service.proto."""

    MISS = 0
    HIT = 1
    PENDING = 2
    WANTED = 3
    KEPT = 4
    NO_ROOM = 5
    CORRUPT = 6


class Status(IntEnum):
    """The outcome of a request or a greeting. Only a reply with OK has block states."""

    OK = 0
    BAD_TICKET = 1  # an unknown, used or expired ticket; the connection ends
    BAD_VERSION = 2  # the server has another protocol version; the connection ends
    BAD_REQUEST = 3  # no message of this protocol; the connection ends
    BUSY = 4  # too much work at once; the client may try again later
    DRAINING = 5  # the server is shutting down; the connection ends
    NO_LEASE = 6  # the lease has ended or never existed
    INTERNAL = 7


class Welcome(NamedTuple):
    """The server's first message. `num_slots` is zero if the server shares no memory."""

    status: Status
    boot_id: bytes
    page_bytes: int
    slot_bytes: int
    num_slots: int


class RequestFrame(NamedTuple):
    """The head of a request. `argument` is a lease number, or the milliseconds of a lease."""

    verb: Verb
    blocks: int
    number: int
    argument: int


class ReplyFrame(NamedTuple):
    """The head of a reply. `number` is the number of its request."""

    verb: Verb
    status: Status
    blocks: int
    number: int
    argument: int


def encode_greeting(ticket: bytes) -> bytes:
    return GREETING.pack(MAGIC, VERSION, 0, 0, ticket)


def decode_greeting(raw: bytes) -> tuple[int, bytes]:
    """Return the version and the ticket. Raises WireError if `raw` is not a greeting."""
    magic, version, _, _, ticket = GREETING.unpack(raw)
    if magic != MAGIC:
        raise WireError("expected a greeting of the data connection")
    return version, ticket


def encode_welcome(welcome: Welcome) -> bytes:
    status, boot_id, page_bytes, slot_bytes, num_slots = welcome
    return WELCOME.pack(MAGIC, VERSION, status, 0, boot_id, page_bytes, slot_bytes, num_slots)


def decode_welcome(raw: bytes) -> Welcome:
    """Decode a welcome. Raises WireError for a wrong version, an unknown status or other bytes."""
    magic, version, status, _, boot_id, page_bytes, slot_bytes, num_slots = WELCOME.unpack(raw)
    if magic != MAGIC:
        raise WireError("expected the welcome of a data connection")
    if version != VERSION:
        raise WireError(
            f"the server speaks version {version} of the data connection, not {VERSION}"
        )
    return Welcome(_status(status), boot_id, page_bytes, slot_bytes, num_slots)


def encode_request(request: RequestFrame) -> bytes:
    return REQUEST.pack(request.verb, 0, 0, request.blocks, request.number, request.argument)


def decode_request(raw: bytes) -> RequestFrame:
    """Decode the head of a request. Raises WireError for an unknown verb or too large a count."""
    verb, zero, none, blocks, number, argument = REQUEST.unpack(raw)
    if zero or none or blocks > MAX_BLOCKS or verb not in Verb.__members__.values():
        raise WireError(f"no request of the data connection: verb {verb}, {blocks} blocks")
    return RequestFrame(Verb(verb), blocks, number, argument)


def encode_reply(reply: ReplyFrame) -> bytes:
    verb, status, blocks, number, argument = reply
    return REPLY.pack(verb, status, 0, blocks, number, argument)


def decode_reply(raw: bytes) -> ReplyFrame:
    """Decode the head of a reply. Raises WireError for unknown values or too many blocks."""
    verb, status, zero, blocks, number, argument = REPLY.unpack(raw)
    if zero or blocks > MAX_BLOCKS or verb not in Verb.__members__.values():
        raise WireError(f"no reply of the data connection: verb {verb}, {blocks} blocks")
    return ReplyFrame(Verb(verb), _status(status), blocks, number, argument)


def pack_keys(keys: Sequence[bytes]) -> bytes:
    return b"".join(keys)


def unpack_keys(packed: bytes, most: int = MAX_KEYS) -> list[bytes]:
    """Split packed keys. Raises WireError for a partial key or for more than `most` keys."""
    if len(packed) % KEY_BYTES or len(packed) > most * KEY_BYTES:
        raise WireError(
            f"expected up to {most} keys of {KEY_BYTES} bytes each, got {len(packed)} bytes"
        )
    return cut_keys(packed)


def part_blocks(page_bytes: int, num_slots: int, most_bytes: int = _PART_BYTES) -> int:
    """Return the number of blocks to pin or reserve at a time: blocks of about `most_bytes`, so
    that a round trip or a seek overlaps with a transfer, and at most an eighth of the tenant
    store's slots, so that slots stay free for blocks from the disk."""
    return max(1, min(most_bytes // page_bytes, num_slots // _PART_SHARE))


def _status(status: int) -> Status:
    if status not in Status.__members__.values():
        raise WireError(f"unknown status {status}")
    return Status(status)
