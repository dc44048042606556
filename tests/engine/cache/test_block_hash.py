# SPDX-License-Identifier: Apache-2.0
"""Block hashing of requests: what goes into a digest, and that growing changes no digest."""

from __future__ import annotations

import hashlib

import cbor2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratakv.engine.cache.block_hash import make_block_hasher
from stratakv.engine.request.adapter import Adapter
from stratakv.engine.request.request import BlockHasher, Request
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.tiers.block import Identity

ROOT = Identity("model", "", "float32", "float32", 4).root()
HASHER = make_block_hasher(ROOT, 4)
ADAPTER = Adapter("a", b"f" * 32)
TOKENS = list(range(10, 19))  # two full blocks and one token


def hashes(
    tokens: list[int],
    hasher: BlockHasher = HASHER,
    cache_salt: bytes | None = None,
    adapter: Adapter | None = None,
) -> list[bytes]:
    request = Request(
        "r",
        tokens,
        SamplingParams(),
        block_hasher=hasher,
        cache_salt=cache_salt,
        adapter=adapter,
    )
    return request.block_hashes


def test_a_digest_is_the_hash_of_parent_and_packed_ids() -> None:
    first = hashlib.sha256(ROOT + np.array(TOKENS[:4], "<i4").tobytes()).digest()
    second = hashlib.sha256(first + np.array(TOKENS[4:8], "<i4").tobytes()).digest()
    assert hashes(TOKENS) == [first, second]


def test_golden_chain() -> None:
    assert [digest.hex()[:16] for digest in hashes(TOKENS, make_block_hasher(b"r" * 32, 4))] == [
        "5d5962576a0a3a3f",
        "c3d25b660e3d3cda",
    ]


def test_the_salt_is_in_the_first_block_and_the_chain_carries_it() -> None:
    salted = hashes(TOKENS, cache_salt=b"s")
    extras = cbor2.dumps([["salt", b"s"]], canonical=True)
    raw = np.array(TOKENS, "<i4").tobytes()
    first = hashlib.sha256(ROOT + raw[:16] + extras).digest()
    assert salted == [first, hashlib.sha256(first + raw[16:32]).digest()]
    assert not set(salted) & set(hashes(TOKENS))


def test_the_adapter_is_in_the_digest_of_every_block() -> None:
    raw = np.array(TOKENS, "<i4").tobytes()
    lora = cbor2.dumps([["lora", b"f" * 32]], canonical=True)
    both = cbor2.dumps([["salt", b"s"], ["lora", b"f" * 32]], canonical=True)
    first = hashlib.sha256(ROOT + raw[:16] + both).digest()
    second = hashlib.sha256(first + raw[16:32] + lora).digest()
    assert hashes(TOKENS, cache_salt=b"s", adapter=ADAPTER) == [first, second]


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_an_adapter_counts_by_its_content_and_not_by_its_name(algorithm: str) -> None:
    hasher = make_block_hasher(ROOT, 4, algorithm)
    adapted = hashes(TOKENS, hasher, adapter=ADAPTER)
    assert hashes(TOKENS, hasher, adapter=ADAPTER._replace(name="b")) == adapted
    other = hashes(TOKENS, hasher, adapter=ADAPTER._replace(fingerprint=b"f" * 31 + b"g"))
    assert not set(adapted) & set(other)
    assert not set(adapted) & set(hashes(TOKENS, hasher))


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@given(
    prompt=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20),
    pieces=st.lists(st.lists(st.integers(0, 99), max_size=9), max_size=5),
    salt=st.sampled_from([None, b"salt"]),
    lora=st.sampled_from([None, ADAPTER]),
)
def test_growing_by_pieces_hashes_blocks_as_if_they_came_at_once(
    algorithm: str,
    prompt: list[int],
    pieces: list[list[int]],
    salt: bytes | None,
    lora: Adapter | None,
) -> None:
    hasher = make_block_hasher(ROOT, 4, algorithm)
    grown = Request(
        "r", prompt, SamplingParams(), block_hasher=hasher, cache_salt=salt, adapter=lora
    )
    for piece in pieces:
        for token_id in piece:
            grown.append_output_token(token_id)
    whole = prompt + [token for piece in pieces for token in piece]
    assert grown.block_hashes == hashes(whole, hasher, salt, lora)
    assert len(grown.block_hashes) == len(whole) // 4


def test_sha256_cbor_is_the_chain_routers_compute() -> None:
    def cbor_hash(value: object) -> bytes:
        return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()

    first = cbor_hash([cbor_hash("0"), TOKENS[:4], None])
    second = cbor_hash([first, TOKENS[4:8], None])
    assert hashes(TOKENS, make_block_hasher(ROOT, 4, "sha256_cbor")) == [first, second]
    salted = hashes(TOKENS, make_block_hasher(ROOT, 4, "sha256_cbor"), b"s", ADAPTER)
    assert salted[0] == cbor_hash([cbor_hash("0"), TOKENS[:4], ["66" * 32, b"s"]])
    assert salted[1] == cbor_hash([salted[0], TOKENS[4:8], ["66" * 32]])


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="sha256 or sha256_cbor, not 'md5'"):
        make_block_hasher(ROOT, 4, "md5")
    with pytest.raises(ValueError, match="at least 1 token"):
        make_block_hasher(ROOT, 0)
