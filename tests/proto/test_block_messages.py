# SPDX-License-Identifier: Apache-2.0
"""The block messages keep their field numbers and can say all that `stratakv.tiers.block` can.

A golden encoding is committed here: a change of a field's number or type is a change of the wire.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError, Message

from stratakv.proto.v1 import block_pb2
from stratakv.tiers import block

PROTO = Path(block_pb2.__file__).with_name("block.proto")

KEY = block_pb2.BlockKey(digest=bytes(range(32)), group=1, shard_rank=2, shard_count=4)
LAYOUT = block_pb2.BlockLayout(
    layout_version=1,
    num_layers=6,
    block_size_tokens=16,
    num_kv_heads=4,
    head_dim=64,
    kv_dtype="bfloat16",
)
HEADER = block_pb2.BlockHeader(
    key=KEY,
    layout_id=b"L" * 16,
    generation=7,
    payload_bytes=98304,
    tag=b"T" * 16,
    payload_digest=b"D" * 16,
)

GOLDEN_KEY = "0a20" + bytes(range(32)).hex() + "100118022004"
GOLDEN_LAYOUT = "080110061810200428403208" + b"bfloat16".hex()
GOLDEN_HEADER = "".join(
    [
        "0a28",
        GOLDEN_KEY,
        "1210",
        "4c" * 16,
        "1807",
        "20808006",
        "3210",
        "54" * 16,
        "3a10",
        "44" * 16,
    ]
)


@pytest.mark.parametrize(
    ("message", "golden"),
    [(KEY, GOLDEN_KEY), (LAYOUT, GOLDEN_LAYOUT), (HEADER, GOLDEN_HEADER)],
    ids=["key", "layout", "header"],
)
def test_golden_encoding(message: Message, golden: str) -> None:
    assert message.SerializeToString(deterministic=True).hex() == golden
    assert type(message).FromString(bytes.fromhex(golden)) == message


def test_a_key_carries_the_fields_of_a_packed_key() -> None:
    packed = block.pack_key(KEY.digest, KEY.group, KEY.shard_rank, KEY.shard_count)
    parts = block.unpack_key(packed)
    assert block_pb2.BlockKey(**parts._asdict()) == KEY
    assert set(parts._fields) == set(block_pb2.BlockKey.DESCRIPTOR.fields_by_name)


def test_a_layout_carries_the_fields_of_a_block_layout() -> None:
    ours = {field.name for field in dataclasses.fields(block.BlockLayout)}
    theirs = set(block_pb2.BlockLayout.DESCRIPTOR.fields_by_name)
    assert theirs == (ours - {"block_size"}) | {"block_size_tokens", "layout_version"}


def test_every_dtype_is_named_in_the_proto_file() -> None:
    text = PROTO.read_text()
    for name in block.DTYPE_BYTES:
        assert f'"{name}"' in text


def test_damaged_bytes_raise_the_declared_error() -> None:
    encoded = HEADER.SerializeToString()
    with pytest.raises(DecodeError):
        block_pb2.BlockHeader.FromString(encoded[:-1])


def test_an_absent_key_reads_as_absent() -> None:
    header = block_pb2.BlockHeader.FromString(b"")
    assert not header.HasField("key")
    assert (header.layout_id, header.generation, header.payload_bytes) == (b"", 0, 0)
