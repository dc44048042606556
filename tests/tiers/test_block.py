# SPDX-License-Identifier: Apache-2.0
"""Golden vectors and rules of the ABI: block keys, layouts and record headers.

If a vector here changes, every block kept anywhere becomes a miss: raise ROOT_VERSION,
LAYOUT_VERSION or RECORD_VERSION and say so in the change log, never just update the vector.
"""

from __future__ import annotations

import hashlib
import random
import struct
import subprocess
import sys
from array import array
from dataclasses import replace

import pytest

from stratakv.tiers.block import (
    ALIGNMENT,
    BlockLayout,
    Identity,
    chain_digests,
    chain_digests_sha256_cbor,
    encode_extras,
    key_suffix,
    pack_key,
    tenant_salt,
    unpack_key,
)
from stratakv.tiers.errors import InvalidBlock
from stratakv.tiers.record import (
    HEADER_BYTES,
    Defect,
    RecordHeader,
    check_record,
    decode_header,
    encode_header,
)

IDENTITY = Identity(model="m", revision="", dtype="bfloat16", kv_dtype="float32", block_size=16)
LAYOUT = BlockLayout(num_layers=6, block_size=16, num_kv_heads=2, head_dim=64, kv_dtype="float32")
ROOT = "f410d5b9a0196cde1a85cfc30e5373e034893f6247b7cecb84f6c44080b2781d"
CHAIN = [
    "a278b78f72a79a9b3df29f0c78e33753ff8276a6d2b0126f7c197075687f125a",
    "c8635eb1976799c974012ad60cbddf6f5b2b7eea7742653cee12264737569e27",
]
SALTED = "a1bc22b1f8b99be25cabb180e9bf89adb3e2efdafb1b7724639e3352b60bcb4b"
VLLM_CBOR = "6b95a5f50035774aa6616ac2a298711d95bae58bef1b408e455c274f6a8d80e6"
SALT = "a86d7ae709dab2c1ced92caecdb4178ca1a7d9c65b381ca41862ac1b01cf3e03"
LAYOUT_ID = "87b61d002d36b0fc5fec687f1bd1c032"
HEADER = (
    "5354524b56424c4b020080000000000004000000000000000700000000000000"
    "0202020202020202020202020202020201010101010101010101010101010101"
    "0101010101010101010101010101010100000000010000000000000000000000"
    "03030303030303030303030303030303"
    "c0cb386455551d33c494e90bfc688442"
)


def ids(*tokens: int) -> memoryview:
    return memoryview(array("i", tokens).tobytes())


def test_root_vector() -> None:
    assert IDENTITY.root().hex() == ROOT


def test_root_is_the_stated_cbor() -> None:
    # Written out by hand, so that the vector does not depend on the library that made it.
    # Deterministic CBOR orders map keys by length, then bytes.
    cbor = (
        b"\xa8\x65dtype\x68bfloat16\x65epoch\x00\x65model\x61m\x68kv_dtype\x67float32"
        b"\x68revision\x60\x6ablock_size\x10\x6croot_version\x02\x6elayout_version\x01"
    )
    assert hashlib.sha256(cbor).hexdigest() == ROOT


def block_digest(parent: bytes, token_bytes: memoryview, extras: bytes = b"") -> bytes:
    """The digest of one block of all these tokens."""
    (digest,) = chain_digests(parent, token_bytes, len(token_bytes) // 4, {0: extras})
    return digest


def test_chain_vector() -> None:
    digests = chain_digests(IDENTITY.root(), ids(*range(35)), 16)
    assert [d.hex() for d in digests] == CHAIN


def test_chain_is_the_stated_concatenation() -> None:
    first = hashlib.sha256(bytes.fromhex(ROOT) + struct.pack("<16i", *range(16))).digest()
    assert first.hex() == CHAIN[0]
    assert block_digest(first, ids(*range(16, 32))).hex() == CHAIN[1]


def test_salted_vector() -> None:
    salt = tenant_salt(b"secret", "tenant", "client salt")
    assert salt is not None
    assert salt.hex() == SALT
    extras = {0: encode_extras([("salt", salt)])}
    digests = chain_digests(IDENTITY.root(), ids(*range(32)), 16, extras)
    assert digests[1].hex() == SALTED


def test_sha256_cbor_vector() -> None:
    digests = chain_digests_sha256_cbor(bytes(32), [range(16), range(16, 32)])
    assert digests[1].hex() == VLLM_CBOR
    # One block by hand: [h'00'*32, [0, 1], null].
    by_hand = hashlib.sha256(b"\x83\x58\x20" + bytes(32) + b"\x82\x00\x01\xf6").digest()
    assert chain_digests_sha256_cbor(bytes(32), [[0, 1]]) == [by_hand]


def test_keys_are_the_same_in_another_process() -> None:
    code = (
        "from array import array\n"
        "from stratakv.tiers.block import Identity, chain_digests\n"
        "root = Identity('m', '', 'bfloat16', 'float32', 16).root()\n"
        "view = memoryview(array('i', range(32)).tobytes())\n"
        "print(chain_digests(root, view, 16)[1].hex())\n"
    )
    for seed in ("0", "1234"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert run.stdout.strip() == CHAIN[1]


@pytest.mark.parametrize(
    "other",
    [
        Identity("n", "", "bfloat16", "float32", 16),
        Identity("m", "r", "bfloat16", "float32", 16),
        Identity("m", "", "float16", "float32", 16),
        Identity("m", "", "bfloat16", "bfloat16", 16),
        Identity("m", "", "bfloat16", "float32", 32),
        Identity("", "m", "bfloat16", "float32", 16),
        Identity("m", "", "bfloat16", "float32", 16, epoch=1),
    ],
)
def test_any_field_of_the_identity_changes_the_root(other: Identity) -> None:
    assert other.root() != IDENTITY.root()


def test_any_input_changes_the_digest() -> None:
    parent = IDENTITY.root()
    names = {
        block_digest(parent, ids(1, 2)),
        block_digest(parent, ids(2, 1)),
        block_digest(bytes(32), ids(1, 2)),
        block_digest(parent, ids(1, 2), encode_extras([("salt", b"x")])),
        block_digest(parent, ids(1, 2), encode_extras([("lora", b"x")])),
        block_digest(parent, ids(1, 2), encode_extras([("lora", "x")])),
        block_digest(parent, ids(1, 2), encode_extras([("mm", "x", 0)])),
        block_digest(parent, ids(1, 2), encode_extras([("mm", "x", 1)])),
        block_digest(parent, ids(1, 2), encode_extras([("lora", "x"), ("mm", "x", 1)])),
    }
    assert len(names) == 9


def test_random_chains_do_not_collide() -> None:
    rng = random.Random(7)
    root = IDENTITY.root()
    seen = set()
    for _ in range(500):
        tokens = [rng.randrange(-(2**31), 2**31) for _ in range(64)]
        seen.update(chain_digests(root, ids(*tokens), 4))
    assert len(seen) == 500 * 16


def test_partial_block_has_no_key() -> None:
    assert chain_digests(IDENTITY.root(), ids(*range(15)), 16) == []
    assert len(chain_digests(IDENTITY.root(), ids(*range(31)), 16)) == 1


def test_no_secret_no_tenant_no_salt_shares() -> None:
    assert tenant_salt(b"", "", "") is None


def test_salts_separate() -> None:
    salts = {
        tenant_salt(b"", "", "a"),
        tenant_salt(b"", "a", ""),
        tenant_salt(b"s", "", ""),
        tenant_salt(b"s", "a", ""),
        tenant_salt(b"s", "", "a"),
        tenant_salt(b"s", "a", "b"),
        tenant_salt(b"s", "ab", ""),
    }
    assert len(salts) == 7
    assert None not in salts


def test_key_vector_and_round_trip() -> None:
    key = pack_key(b"\x01" * 32, group=2, shard_rank=1, shard_count=4)
    assert key.hex() == "01" * 32 + "0200" + "0100" + "0400" + "0000"
    assert unpack_key(key) == (b"\x01" * 32, 2, 1, 4)
    assert key_suffix() == bytes.fromhex("0000000001000000")


@pytest.mark.parametrize(
    "key",
    [b"", bytes(39), bytes(41), bytes(40), b"\x01" * 40],
    ids=["empty", "short", "long", "no shards", "trailing bytes"],
)
def test_impossible_keys_are_refused(key: bytes) -> None:
    with pytest.raises(InvalidBlock):
        unpack_key(key)


def test_impossible_shards_and_digests_are_refused() -> None:
    with pytest.raises(InvalidBlock):
        pack_key(bytes(32), shard_rank=2, shard_count=2)
    with pytest.raises(InvalidBlock):
        pack_key(bytes(31))


def test_layout_vector_and_sizes() -> None:
    assert LAYOUT.layout_id().hex() == LAYOUT_ID
    assert LAYOUT.page_bytes == 6 * 2 * 16 * 2 * 64 * 4
    assert LAYOUT.token_bytes * 16 == LAYOUT.page_bytes
    small = BlockLayout(1, 1, 1, 3, "float16")
    assert small.page_bytes == 12
    assert small.slot_bytes == ALIGNMENT


@pytest.mark.parametrize(
    "fields",
    [(5, 16, 2, 64, "float32"), (6, 32, 2, 64, "float32"), (6, 16, 4, 64, "float32"),
     (6, 16, 2, 32, "float32"), (6, 16, 2, 64, "bfloat16")],
)  # fmt: skip
def test_any_field_changes_the_layout_id(fields: tuple[int, int, int, int, str]) -> None:
    assert BlockLayout(*fields).layout_id() != LAYOUT.layout_id()


@pytest.mark.parametrize("fields", [(0, 16, 2, 64, "float32"), (6, 16, 2, 64, "int4")])
def test_impossible_layouts_are_refused(fields: tuple[int, int, int, int, str]) -> None:
    with pytest.raises(InvalidBlock):
        BlockLayout(*fields)


EXPECTED = RecordHeader(
    key=pack_key(b"\x01" * 32),
    layout_id=b"\x02" * 16,
    payload_bytes=4,
    generation=7,
    tag=b"\x03" * 16,
)


ENCODED = replace(EXPECTED, codec=1, decoded_bytes=9)
# As HEADER, but for the codec, the decoded length and with them the checksum.
ENCODED_CHECKSUM = "8dae6f57de4ab99014df65b24a462a45"


def test_encoded_header_vector() -> None:
    header = encode_header(ENCODED, b"abcd")
    plain = bytes.fromhex(HEADER)
    assert (
        header[:112] == plain[:12] + b"\1\0\0\0" + plain[16:88] + b"\x09" + bytes(7) + plain[96:112]
    )
    assert header[112:].hex() == ENCODED_CHECKSUM
    assert decode_header(header) == ENCODED
    assert (ENCODED.block_bytes, EXPECTED.block_bytes) == (9, 4)
    assert check_record(header, b"abcd", ENCODED) is None
    # Neither is ever taken for the other.
    assert check_record(header, b"abcd", EXPECTED) is Defect.VERSION
    assert check_record(plain, b"abcd", ENCODED) is Defect.VERSION
    assert check_record(header, b"abcd", replace(ENCODED, decoded_bytes=8)) is Defect.LENGTH


def test_a_codec_number_fits_a_byte() -> None:
    with pytest.raises(ValueError, match="number up to 255, not 256"):
        encode_header(replace(EXPECTED, codec=256), b"abcd")
    header = bytearray.fromhex(HEADER)
    header[13] = 1
    found = decode_header(header)
    assert found is not None and found.codec == 256
    assert check_record(header, b"abcd", found) is Defect.VERSION


def test_header_vector() -> None:
    assert encode_header(EXPECTED, b"abcd").hex() == HEADER
    assert check_record(bytes.fromhex(HEADER), b"abcd", EXPECTED) is None


@pytest.mark.parametrize("bit", range(0, HEADER_BYTES * 8, 5))
def test_any_flipped_header_bit_is_refused(bit: int) -> None:
    header = bytearray.fromhex(HEADER)
    header[bit // 8] ^= 1 << (bit % 8)
    assert check_record(header, b"abcd", EXPECTED) is not None


@pytest.mark.parametrize("bit", range(32))
def test_any_flipped_payload_bit_is_refused(bit: int) -> None:
    payload = bytearray(b"abcd")
    payload[bit // 8] ^= 1 << (bit % 8)
    assert check_record(bytes.fromhex(HEADER), payload, EXPECTED) is Defect.CHECKSUM


def test_an_intact_record_in_the_wrong_place_is_refused() -> None:
    other = RecordHeader(pack_key(b"\x09" * 32), EXPECTED.layout_id, 4, 7)
    assert check_record(encode_header(other, b"abcd"), b"abcd", EXPECTED) is Defect.KEY
    other = RecordHeader(EXPECTED.key, b"\x09" * 16, 4, 7)
    assert check_record(encode_header(other, b"abcd"), b"abcd", EXPECTED) is Defect.LAYOUT
    other = RecordHeader(EXPECTED.key, EXPECTED.layout_id, 4, 8)
    assert check_record(encode_header(other, b"abcd"), b"abcd", EXPECTED) is Defect.GENERATION
    assert check_record(bytes.fromhex(HEADER), b"abc", EXPECTED) is Defect.LENGTH
    assert check_record(bytes.fromhex(HEADER)[:100], b"abcd", EXPECTED) is Defect.SHORT
