# SPDX-License-Identifier: Apache-2.0
"""The block hasher: computes the digests of a request's full blocks as its tokens arrive.

`tiers/block.py` computes the digests; this module decides which tokens and which extras of a
request (salt, adapter, embeddings) go into the digest of each block."""

from __future__ import annotations

import hashlib

import cbor2
import numpy as np

from ...tiers.block import Extra, chain_digests, chain_digests_sha256_cbor, encode_extras
from ..request.request import BlockHasher, Request

# The value at the start of the digest chain of `sha256_cbor`; routers must use the same value.
_CBOR_SEED = "0"
_TAIL = b"stratakv.tail"


def make_block_hasher(root: bytes, block_size: int, algorithm: str = "sha256") -> BlockHasher:
    """Return a hasher, which computes the digests (32 bytes each) of a request's full blocks that
    `block_hashes` lacks, continuing the hash chain from the last digest there.

    `sha256` starts the chain from `root` (`Identity.root()`). `sha256_cbor` is the form that
    routers can recompute. This chain starts from the CBOR of "0", so that a store of such digests
    must be bound to one root by other means. Raises ValueError for another algorithm or a block
    size below 1."""
    if block_size < 1:
        raise ValueError(f"a block has at least 1 token, not {block_size}")
    if algorithm == "sha256":
        return _sha256_hasher(root, block_size)
    if algorithm == "sha256_cbor":
        return _sha256_cbor_hasher(root, block_size)
    raise ValueError(f"the block hash is sha256 or sha256_cbor, not {algorithm!r}")


def _sha256_hasher(root: bytes, block_size: int) -> BlockHasher:
    def hash_new_blocks(request: Request) -> list[bytes]:
        known = request.block_hashes
        first = len(known)
        end = request.num_tokens // block_size
        if end <= first:
            return []
        extras = _encoded_extras(request, first, end, block_size)
        # Digests are over little-endian ints; on little-endian hosts this makes no copy.
        tokens = request.all_token_ids[first * block_size : end * block_size]
        raw = tokens.astype("<i4", copy=False).data.cast("B")
        return chain_digests(known[-1] if known else root, raw, block_size, extras)

    def hash_tail(request: Request) -> bytes:
        first = request.num_prompt_tokens // block_size
        tokens = request.prompt_token_ids[first * block_size :]
        if not len(tokens):
            return b""
        extras = _encoded_extras(request, first, first + 1, block_size)
        raw = tokens.astype("<i4", copy=False).data.cast("B")
        parent = request.block_hashes[first - 1] if first else root
        return _tail_digest(len(tokens), chain_digests(parent, raw, len(tokens), extras)[0])

    return BlockHasher(block_size, root, hash_new_blocks, hash_tail)


def _tail_digest(num_tokens: int, digest: bytes) -> bytes:
    """Return the digest of a partial block, which differs from digests of full blocks and of
    partial blocks with another number of tokens."""
    return hashlib.sha256(_TAIL + num_tokens.to_bytes(4, "little") + digest).digest()


def _encoded_extras(
    request: Request, first: int, end: int, block_size: int
) -> dict[int, bytes] | None:
    """Return the extras of the blocks `first`..`end` by index relative to `first`. The salt goes
    into a request's first block only, because the hash chain includes it in later blocks; the
    adapter into every block; embeddings and pictures into the blocks that contain them."""
    salt: list[Extra] = [] if request.cache_salt is None else [("salt", request.cache_salt)]
    adapter = request.adapter
    lora: list[Extra] = [] if adapter is None else [("lora", adapter.fingerprint)]
    embeds = _embeds_digests(request, first, end, block_size)
    pictures = _pictures_of_blocks(request, first, end, block_size)
    extras: dict[int, bytes] = {}
    # Without adapter, embeddings and pictures only the request's first block can have extras.
    for index in range(end - first if lora or embeds or pictures else min(end, 1 - first)):
        kinds = [*(salt if first + index == 0 else ()), *lora]
        kinds += [("mm", digest, offset) for digest, offset in pictures.get(index, ())]
        if index in embeds:
            kinds.append(("embeds", embeds[index]))
        if kinds:
            extras[index] = encode_extras(kinds)
    return extras or None


def _pictures_of_blocks(
    request: Request, first: int, end: int, block_size: int
) -> dict[int, list[tuple[bytes, int]]]:
    """Return the pictures in each of the blocks `first`..`end`, by index relative to `first`: a
    picture's digest, and its first token relative to the block, negative in an earlier block."""
    found: dict[int, list[tuple[bytes, int]]] = {}
    for each in request.pictures:
        last = min(end, -(-each.end // block_size))
        for block in range(max(first, each.start // block_size), last):
            pair = (each.digest, each.start - block * block_size)
            found.setdefault(block - first, []).append(pair)
    return found


def _embeds_digests(request: Request, first: int, end: int, block_size: int) -> dict[int, bytes]:
    """Return the hashes of the embeddings (numbers and dtype) in blocks `first`..`end` of a prompt,
    by index relative to `first`. Blocks without embeddings have no entry."""
    embeds = request.prompt_embeds
    if embeds is None:
        return {}
    found = {}
    for block in range(first, min(end, -(-len(embeds) // block_size))):
        rows = np.ascontiguousarray(embeds[block * block_size : (block + 1) * block_size])
        found[block - first] = hashlib.sha256(rows.dtype.str.encode() + rows.tobytes()).digest()
    return found


def _sha256_cbor_hasher(root: bytes, block_size: int) -> BlockHasher:
    start = hashlib.sha256(cbor2.dumps(_CBOR_SEED, canonical=True)).digest()

    def hash_new_blocks(request: Request) -> list[bytes]:
        known = request.block_hashes
        first = len(known)
        end = request.num_tokens // block_size
        if end <= first:
            return []
        tokens = request.all_token_ids[first * block_size : end * block_size]
        blocks = tokens.reshape(-1, block_size).tolist()
        extras = _plain_extras(request, first, end, block_size)
        return chain_digests_sha256_cbor(known[-1] if known else start, blocks, extras)

    def hash_tail(request: Request) -> bytes:
        first = request.num_prompt_tokens // block_size
        tokens = request.prompt_token_ids[first * block_size :].tolist()
        if not tokens:
            return b""
        extras = _plain_extras(request, first, first + 1, block_size)
        parent = request.block_hashes[first - 1] if first else start
        (digest,) = chain_digests_sha256_cbor(parent, [tokens], extras)
        return _tail_digest(len(tokens), digest)

    return BlockHasher(block_size, root, hash_new_blocks, hash_tail)


def _plain_extras(
    request: Request, first: int, end: int, block_size: int
) -> dict[int, Extra] | None:
    """Return the extras of `_encoded_extras` as plain values, in the order that routers expect:
    adapter before salt. The value of an adapter is not its name but its fingerprint in hexadecimal
    digits, as in `/v1/models`."""
    adapter = request.adapter
    lora: Extra = () if adapter is None else (adapter.fingerprint.hex(),)
    extras: dict[int, Extra] = dict.fromkeys(range(end - first), lora) if lora else {}
    if first == 0 and request.cache_salt is not None:
        extras[0] = (*lora, request.cache_salt)
    for index, pictures in _pictures_of_blocks(request, first, end, block_size).items():
        flat = [part for digest, offset in pictures for part in (digest.hex(), offset)]
        own = extras.get(index, ())
        extras[index] = (*own[: len(lora)], *flat, *own[len(lora) :])
    for index, digest in _embeds_digests(request, first, end, block_size).items():
        extras[index] = (*extras.get(index, ()), digest)
    return extras or None
