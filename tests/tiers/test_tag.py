# SPDX-License-Identifier: Apache-2.0
"""Tags and digests: golden vectors, since they lie on disks and travel between releases, and what
each of them tells apart."""

from __future__ import annotations

import hashlib
import hmac

import pytest
import xxhash

from stratakv.tiers.block import pack_key
from stratakv.tiers.tag import PROOF_BYTES, Proof, Tagger, payload_digest, unpack_proof

from .blocks import SMALL

KEY = pack_key(bytes(range(32)))
PAYLOAD = bytes(range(256)) * 8
LAYOUT_ID = bytes(range(16))
TAG_KEY = bytes(range(32, 64))
NAME = b"STRKVTAG" + LAYOUT_ID + (2048).to_bytes(8, "little") + KEY


def test_golden_vectors() -> None:
    plain = Tagger(LAYOUT_ID, 2048).prove(KEY, PAYLOAD)
    keyed = Tagger(LAYOUT_ID, 2048, TAG_KEY).prove(KEY, PAYLOAD)
    assert plain.digest.hex() == "df73e0768dd183fadd420471ff96bd00"
    assert plain.tag.hex() == "a5ff46c2a5bd455b2d6e653edde2d711"
    assert keyed == (bytes.fromhex("0e40247e04be692ae6d1efdb95e571e3"), plain.digest)


def test_what_they_are_made_of() -> None:
    """The tag of `docs/abi.md`, for whoever writes another client."""
    digest = xxhash.xxh3_128_digest(PAYLOAD)
    tag = xxhash.xxh3_128_digest(NAME + digest)
    assert Tagger(LAYOUT_ID, 2048).prove(KEY, PAYLOAD) == (tag, digest)
    signed = hmac.digest(TAG_KEY, NAME + PAYLOAD, hashlib.sha256)[:16]
    assert Tagger(LAYOUT_ID, 2048, TAG_KEY).prove(KEY, PAYLOAD) == (signed, digest)


@pytest.mark.parametrize("tag_key", [None, TAG_KEY], ids=["plain", "keyed"])
def test_a_payload_in_parts(tag_key: bytes | None) -> None:
    tagger = Tagger(LAYOUT_ID, 2048, tag_key)
    hasher = tagger.create_hasher(KEY)
    for start in range(0, len(PAYLOAD), 100):
        hasher.update(memoryview(PAYLOAD)[start : start + 100])
    assert tagger.finish_proof(KEY, hasher) == tagger.prove(KEY, PAYLOAD)


@pytest.mark.parametrize("tag_key", [None, TAG_KEY], ids=["plain", "keyed"])
def test_a_tag_tells_key_layout_length_and_bytes(tag_key: bytes | None) -> None:
    other_key, changed = pack_key(bytes(32)), bytes([1]) + PAYLOAD[1:]
    tags = {
        Tagger(LAYOUT_ID, 2048, tag_key).prove(KEY, PAYLOAD).tag,
        Tagger(LAYOUT_ID, 2048, tag_key).prove(other_key, PAYLOAD).tag,
        Tagger(bytes(16), 2048, tag_key).prove(KEY, PAYLOAD).tag,
        Tagger(LAYOUT_ID, 2049, tag_key).prove(KEY, PAYLOAD).tag,
        Tagger(LAYOUT_ID, 2048, tag_key).prove(KEY, changed).tag,
    }
    assert len(tags) == 5


def test_another_tag_key_makes_another_tag() -> None:
    one, other = Tagger(LAYOUT_ID, 2048, TAG_KEY), Tagger(LAYOUT_ID, 2048, bytes(32))
    assert one.prove(KEY, PAYLOAD).tag != other.prove(KEY, PAYLOAD).tag
    assert one.prove(KEY, PAYLOAD).digest == other.prove(KEY, PAYLOAD).digest


def test_a_proof_is_packed_and_unpacked() -> None:
    proof = Tagger(SMALL.layout_id(), 5).prove(KEY, b"abcde")
    packed = proof.pack()
    assert len(packed) == PROOF_BYTES
    assert unpack_proof(packed) == proof == Proof(packed[:16], payload_digest(b"abcde"))
