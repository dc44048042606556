# SPDX-License-Identifier: Apache-2.0
"""Blocks come back bit for bit, bytes that no encoder wrote are refused, codecs have names."""

from __future__ import annotations

import random
import struct
import sys

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from stratakv.tiers.block import DTYPE_BYTES, BlockLayout
from stratakv.tiers.codecs.known_codecs import make_codec, readable_codecs
from stratakv.tiers.codecs.lossless import STRETCH_BYTES, LosslessCodec
from stratakv.tiers.errors import TierConfigError

DTYPES = sorted(DTYPE_BYTES)


def layout_of(dtype: str, head_dim: int = 32) -> BlockLayout:
    return BlockLayout(
        num_layers=2, block_size=16, num_kv_heads=2, head_dim=head_dim, kv_dtype=dtype
    )


def smooth_block(layout: BlockLayout, seed: int) -> bytearray:
    """Numbers of a few exponents in a noise of low bits, as keys and values are."""
    rng, width = random.Random(seed), DTYPE_BYTES[layout.kv_dtype]
    block = bytearray(rng.randbytes(layout.page_bytes))
    block[width - 1 :: width] = bytes(
        rng.choice((61, 62, 63, 190, 191)) for _ in range(layout.page_bytes // width)
    )
    return block


def encoded(codec: LosslessCodec, block: bytes | bytearray) -> bytearray:
    out = bytearray(2 * len(block))
    used = codec.encode(memoryview(block), memoryview(out))
    assert used is not None
    assert not any(out[used:]), "written behind the end"
    return out[:used]


def decoded(codec: LosslessCodec, data: bytes | bytearray) -> bytes:
    payload = bytearray(codec.layout.page_bytes)
    codec.decode(memoryview(data), memoryview(payload))
    return bytes(payload)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_become_smaller_and_come_back(dtype: str) -> None:
    layout = layout_of(dtype)
    codec = LosslessCodec(layout)
    for seed in range(10):
        block = smooth_block(layout, seed)
        small = encoded(codec, block)
        assert len(small) < len(block)
        assert decoded(codec, small) == block


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    head_dim=st.integers(1, 40),
    seed=st.integers(0, 2**32),
    shortest=st.binary(max_size=64),
)
def test_any_bytes_come_back(dtype: str, head_dim: int, seed: int, shortest: bytes) -> None:
    layout = layout_of(dtype, head_dim)
    codec = LosslessCodec(layout)
    noise = random.Random(seed).randbytes(layout.page_bytes)
    repeated = (shortest * layout.page_bytes)[: layout.page_bytes].ljust(layout.page_bytes, b"\0")
    for block in (noise, repeated, bytes(layout.page_bytes)):
        assert decoded(codec, encoded(codec, block)) == block


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_a_block_of_several_stretches(dtype: str) -> None:
    layout = BlockLayout(11, 32, 7, 96, dtype)
    assert layout.page_bytes > STRETCH_BYTES
    assert layout.page_bytes % STRETCH_BYTES
    codec = LosslessCodec(layout)
    block = smooth_block(layout, 1)
    assert decoded(codec, encoded(codec, block)) == block


def test_what_does_not_fit_is_no_encoding() -> None:
    layout = layout_of("bfloat16")
    codec = LosslessCodec(layout)
    block = smooth_block(layout, 3)
    size = len(encoded(codec, block))
    for room in (0, 1, 3, size // 2, size - 1, size):
        guarded = bytearray(b"\xa5" * (size + 64))
        used = codec.encode(memoryview(block), memoryview(guarded)[:room])
        assert used == (size if room == size else None)
        assert guarded[room:] == b"\xa5" * (size + 64 - room)


def test_one_codec_serves_many_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    layout = layout_of("bfloat16")
    codec = LosslessCodec(layout)
    blocks = [smooth_block(layout, seed) for seed in range(64)]
    with ThreadPoolExecutor(8) as pool:
        back = pool.map(lambda block: decoded(codec, encoded(codec, block)), blocks * 4)
        assert list(back) == blocks * 4


def test_every_shortened_or_longer_encoding_is_refused() -> None:
    codec = LosslessCodec(layout_of("bfloat16"))
    data = encoded(codec, smooth_block(codec.layout, 5))
    for stop in {*range(64), *range(0, len(data), 37), len(data) - 1}:
        with pytest.raises(ValueError, match=r"encoded bytes|frame"):
            decoded(codec, data[:stop])
    with pytest.raises(ValueError, match="5 bytes follow the last frame"):
        decoded(codec, data + b"12345")


def test_damaged_encodings_end_well(rng: random.Random, scale: str) -> None:
    """Flipped, overwritten and mixed bytes: a block or a ValueError, nothing else."""
    codec = LosslessCodec(layout_of("bfloat16"))
    whole = [encoded(codec, smooth_block(codec.layout, seed)) for seed in range(4)]
    refused = 0
    for _ in range(3000 if scale == "ci" else 300_000):
        data = bytearray(rng.choice(whole))
        start = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[start] ^= 1 << rng.randrange(8)
            case 1:
                stop = min(len(data), start + rng.randrange(1, 200))
                data[start:stop] = rng.randbytes(stop - start)
            case 2:
                data[start:] = rng.choice(whole)[start:]
            case _:
                data = bytearray(rng.randbytes(rng.randrange(300)))
        try:
            assert len(decoded(codec, data)) == codec.layout.page_bytes
        except ValueError:
            refused += 1
    assert refused > 1000


def test_a_frame_that_says_it_is_huge_takes_no_memory() -> None:
    codec = LosslessCodec(layout_of("bfloat16"))
    # Magic, descriptor with eight bytes of content size, 4 EiB of it.
    frame = bytes.fromhex("28b52ffd") + b"\xe0" + struct.pack("<Q", 2**62) + b"\x01\x00\x00"
    with pytest.raises(ValueError, match="does not hold the 4096 bytes"):
        decoded(codec, struct.pack("<I", len(frame)) + frame)
    with pytest.raises(ValueError, match="a frame ends at 4294967299, behind 8 encoded bytes"):
        decoded(codec, b"\xff" * 8)
    # A small content behind a huge window: streams of zstd would make room for the window.
    plane = zstandard.ZstdCompressor(level=1).compress(bytes(4096))
    window = bytearray(
        bytes.fromhex("28b52ffd") + b"\x40" + b"\xff" + struct.pack("<H", 4096 - 256)
    )
    with pytest.raises(ValueError, match="cannot be decompressed"):
        decoded(codec, struct.pack("<I", len(window)) + window + plane)


def test_codecs_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of("float16")
    assert make_codec("none", layout) is None
    codec = make_codec("lossless", layout)
    assert isinstance(codec, LosslessCodec)
    assert codec.is_lossless
    assert list(readable_codecs(layout, None)) == [LosslessCodec.number]
    assert readable_codecs(layout, codec)[codec.number] is codec
    with pytest.raises(TierConfigError, match=r"no codec 'lz4'; there are: none, lossless$"):
        make_codec("lz4", layout)
    with pytest.raises(TierConfigError, match=r"none, lossless, mine$"):
        make_codec("lz4", layout, {"mine": LosslessCodec})
    assert isinstance(make_codec("mine", layout, {"mine": LosslessCodec}), LosslessCodec)


def test_without_the_package_the_codec_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.delitem(sys.modules, "stratakv.tiers.codecs.lossless")
    with pytest.raises(TierConfigError, match=r"run `pip install '.\[codecs\]'`"):
        make_codec("lossless", layout_of("float16"))
    assert readable_codecs(layout_of("float16"), None) == {}
