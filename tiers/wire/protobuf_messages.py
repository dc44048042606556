# SPDX-License-Identifier: Apache-2.0
"""Conversion of layouts and block headers between protobuf messages and the types of the tiers. An
invalid message raises WireError. `read_layout` returns any valid layout, which its caller compares
with the expected layout."""

from __future__ import annotations

from ...proto.v1.block_pb2 import BlockHeader as HeaderMessage
from ...proto.v1.block_pb2 import BlockKey as KeyMessage
from ...proto.v1.block_pb2 import BlockLayout as LayoutMessage
from ..block import DIGEST_BYTES, LAYOUT_VERSION, BlockLayout, pack_key, unpack_key
from ..errors import InvalidBlock
from ..tag import TAG_BYTES
from .frames import WireError

_LAYOUT_ID_BYTES = 16
_LARGEST_UINT16 = 65535


def layout_message(layout: BlockLayout) -> LayoutMessage:
    return LayoutMessage(
        layout_version=LAYOUT_VERSION,
        num_layers=layout.num_layers,
        block_size_tokens=layout.block_size,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        kv_dtype=layout.kv_dtype,
    )


def read_layout(message: LayoutMessage) -> BlockLayout:
    """Return the layout in a message. Raises WireError for an invalid layout or another version."""
    if message.layout_version != LAYOUT_VERSION:
        raise WireError(
            f"the layout has version {message.layout_version} and this side knows version "
            f"{LAYOUT_VERSION}; use the same release on both sides"
        )
    try:
        return BlockLayout(
            num_layers=message.num_layers,
            block_size=message.block_size_tokens,
            num_kv_heads=message.num_kv_heads,
            head_dim=message.head_dim,
            kv_dtype=message.kv_dtype,
        )
    except InvalidBlock as error:
        raise WireError(str(error)) from error


def header_message(
    key: bytes, layout_id: bytes, payload_bytes: int, tag: bytes, payload_digest: bytes
) -> HeaderMessage:
    digest, group, shard_rank, shard_count = unpack_key(key)
    return HeaderMessage(
        key=KeyMessage(digest=digest, group=group, shard_rank=shard_rank, shard_count=shard_count),
        layout_id=layout_id,
        payload_bytes=payload_bytes,
        tag=tag,
        payload_digest=payload_digest,
    )


def read_header(
    message: HeaderMessage, layout_id: bytes, payload_bytes: int
) -> tuple[bytes, bytes, bytes]:
    """Return key, tag and payload digest from a block's header. Raises WireError for an invalid
    header, and for a header with another layout id or number of bytes than expected."""
    key = message.key
    if len(key.digest) != DIGEST_BYTES or not key.shard_rank < key.shard_count <= _LARGEST_UINT16:
        raise WireError("the header's key is none: see BlockKey in block.proto")
    if key.group > _LARGEST_UINT16:
        raise WireError(f"a cache group is a number up to {_LARGEST_UINT16}, not {key.group}")
    if len(message.layout_id) != _LAYOUT_ID_BYTES or message.layout_id != layout_id:
        raise WireError(
            f"the block has layout {message.layout_id[:_LAYOUT_ID_BYTES].hex() or 'none'}; "
            f"expected {layout_id.hex()}"
        )
    if message.payload_bytes != payload_bytes:
        raise WireError(
            f"the block has {message.payload_bytes} bytes; expected {payload_bytes} by its layout"
        )
    tag, digest = message.tag, message.payload_digest
    if len(tag) != TAG_BYTES or len(digest) != TAG_BYTES:
        raise WireError(
            f"tag and payload digest have {TAG_BYTES} bytes each, not {len(tag)} and "
            f"{len(digest)}; use the same release on both sides"
        )
    return pack_key(key.digest, key.group, key.shard_rank, key.shard_count), tag, digest
