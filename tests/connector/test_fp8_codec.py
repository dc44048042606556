# SPDX-License-Identifier: Apache-2.0
"""fp8 blocks stay within the bound that the codec states, and what has no encoding is told."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from stratakv.connector.device.fp8_codec import DTYPES, Fp8Codec
from stratakv.tiers.base import Stored
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.codecs.known_codecs import ROUNDING_CODECS, make_codec
from stratakv.tiers.contract import SECONDS, make_buffers, make_keys
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.ssd import SsdStore

NAMES = sorted(DTYPES)


def test_the_codecs_that_round_are_known_by_name() -> None:
    """Other options refuse them by these names."""
    assert (Fp8Codec.name,) == ROUNDING_CODECS
    assert not Fp8Codec.is_lossless


def codec_for(dtype: str, head_dim: int = 64) -> Fp8Codec:
    return Fp8Codec(BlockLayout(3, 16, 2, head_dim, dtype))


def rows_of(codec: Fp8Codec) -> tuple[int, int]:
    width = codec.layout.head_dim
    return codec.layout.page_bytes // (DTYPES[codec.layout.kv_dtype].itemsize * width), width


def block_of(numbers: torch.Tensor) -> memoryview:
    return memoryview(bytearray(numbers.contiguous().view(torch.uint8).numpy().tobytes()))


def through(codec: Fp8Codec, numbers: torch.Tensor) -> torch.Tensor | None:
    """Encode and decode; None where there is no encoding."""
    out = bytearray(codec.encoded_bytes + 64)
    used = codec.encode(block_of(numbers), memoryview(out))
    if used is None:
        return None
    assert used == codec.encoded_bytes
    assert not any(out[used:]), "written behind the end"
    payload = bytearray(codec.layout.page_bytes)
    codec.decode(memoryview(out)[:used], memoryview(payload))
    return torch.frombuffer(payload, dtype=numbers.dtype).view(numbers.shape)


def check_bound(codec: Fp8Codec, numbers: torch.Tensor) -> torch.Tensor:
    """The decoded numbers; each is within the bound of the class, with the coarsest scale."""
    decoded = through(codec, numbers)
    assert decoded is not None
    x, y = numbers.double(), decoded.double()
    # The scale is below 2/448 of the row's largest, and no smaller than float32 can say.
    scale = (x.abs().amax(1, keepdim=True) * 2 / 448).clamp(min=2.0**-126)
    bound = torch.maximum(x.abs() / 16, scale / 1024)
    assert bool(((x - y).abs() <= bound).all())
    return decoded


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("head_dim", [1, 5, 64, 128])
def test_random_numbers_stay_within_the_bound(dtype: str, head_dim: int) -> None:
    codec = codec_for(dtype, head_dim)
    shape = rows_of(codec)
    generator = torch.Generator().manual_seed(head_dim)
    for spread in (1e-6, 1.0, 40.0):
        x = torch.randn(shape, generator=generator)
        numbers = (x * torch.exp(torch.randn(shape, generator=generator) * 3) * spread).clamp(
            -60000, 60000
        )
        check_bound(codec, numbers.to(DTYPES[dtype]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_number_of_the_dtype(dtype: str) -> None:
    """All 16-bit patterns that are finite and below the largest, each beside larger ones."""
    codec = codec_for(dtype)
    rows, width = rows_of(codec)
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    limit = torch.finfo(DTYPES[dtype]).max * 15 / 16
    every = every[every.double().abs() <= limit]
    room = rows * width
    for start in range(0, len(every), room):
        part = every[start : start + room]
        numbers = torch.zeros(room, dtype=DTYPES[dtype])
        numbers[: len(part)] = part
        ordered = check_bound(codec, numbers.view(rows, width))
        # Alone in a row, a number is the row's largest.
        assert bool((ordered.isfinite()).all())
        shuffled = numbers[torch.randperm(room, generator=torch.Generator().manual_seed(start))]
        check_bound(codec, shuffled.view(rows, width))


@pytest.mark.parametrize("dtype", NAMES)
def test_numbers_alone_in_their_row(dtype: str) -> None:
    """With one number to a row every number meets the finest scale."""
    codec = codec_for(dtype, 1)
    rows, width = rows_of(codec)
    info = torch.finfo(DTYPES[dtype])
    largest = info.max * 15 / 16
    extremes = [0.0, -0.0, info.tiny, -info.tiny, info.smallest_normal, info.eps, 448.0, 449.0]
    extremes += [largest, -largest, largest / 448, info.smallest_normal / 2, 0.875, 0.8751]
    smallest = torch.tensor([1, 2, 3, 5, 7, 9, 15, 17, 33, 100], dtype=torch.int32)
    if DTYPES[dtype].itemsize == 2:
        subnormal = smallest.to(torch.int16).view(DTYPES[dtype])
    else:
        subnormal = smallest.view(torch.float32)
    some = torch.cat([torch.tensor(extremes, dtype=torch.float64).to(DTYPES[dtype]), subnormal])
    some = some[some.double().abs() <= largest]
    numbers = some.repeat(-(-rows // len(some)))[:rows].view(rows, width)
    decoded = check_bound(codec, numbers)
    assert bool((decoded.signbit() == numbers.signbit()).all())
    # One scale for each number: all of them are normal in e4m3, but for those of float32's end.
    normal = numbers.double().abs() >= 2.0**-126 * 448
    error = (decoded.double() - numbers.double()).abs()[normal]
    assert bool((error <= numbers.double().abs()[normal] / 16).all())


@pytest.mark.parametrize("dtype", NAMES)
def test_numbers_that_e4m3_has_come_back_exactly(dtype: str) -> None:
    codec = codec_for(dtype)
    shape = rows_of(codec)
    for value in (0.0, 1.0, -0.15625, 1.875 * 2.0**-10, 2.0**-13):
        numbers = torch.full(shape, value).to(DTYPES[dtype])
        decoded = through(codec, numbers)
        assert decoded is not None
        assert torch.equal(decoded, numbers), value


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), "max", "-max"])
def test_what_cannot_be_kept_within_the_bound_has_no_encoding(
    dtype: str, value: float | str
) -> None:
    codec = codec_for(dtype)
    largest = torch.finfo(DTYPES[dtype]).max
    number = {"max": largest, "-max": -largest}.get(str(value), value)
    numbers = torch.ones(rows_of(codec)).to(DTYPES[dtype])
    numbers[-1, -1] = float(number)
    assert through(codec, numbers) is None


def test_too_little_room_is_no_encoding() -> None:
    codec = codec_for("bfloat16")
    numbers = torch.ones(rows_of(codec)).to(torch.bfloat16)
    out = bytearray(codec.encoded_bytes - 1)
    assert codec.encode(block_of(numbers), memoryview(out)) is None
    assert not any(out)
    assert codec.encoded_bytes * 2 == codec.layout.page_bytes * (1 + 1 / 64)


def test_a_block_that_is_read_only_is_taken() -> None:
    codec = codec_for("bfloat16")
    numbers = torch.randn(rows_of(codec)).to(torch.bfloat16)
    out, same = bytearray(codec.encoded_bytes), bytearray(codec.encoded_bytes)
    assert codec.encode(memoryview(bytes(block_of(numbers))), memoryview(out)) == len(out)
    codec.encode(block_of(numbers), memoryview(same))
    assert out == same


def test_bytes_that_no_encoder_wrote_are_refused(rng: random.Random) -> None:
    codec = codec_for("float16")
    rows, _width = rows_of(codec)
    size = codec.encoded_bytes
    payload = memoryview(bytearray(codec.layout.page_bytes))
    good = bytearray(size)
    assert codec.encode(memoryview(bytearray(codec.layout.page_bytes)), memoryview(good)) == size
    codec.decode(memoryview(good), payload)
    for length in (0, 1, rows, size - 1, size + 1):
        with pytest.raises(ValueError, match=f"{length} encoded bytes instead of {size}"):
            codec.decode(memoryview(bytearray(length)), payload)
    damage = [(0, 0, "scale"), (1, 255, "scale"), (rows - 1, 248, "scale"),
              (rows, 0x7F, "NaN"), (size - 1, 0xFF, "NaN")]  # fmt: skip
    for place, value, what in damage:
        bad = bytearray(good)
        bad[place] = value
        with pytest.raises(ValueError, match=what):
            codec.decode(memoryview(bad), payload)
    bad = bytearray(good)
    bad[0], bad[rows] = 127 + 9, 0x7E  # 448 * 512, where 65504 is the largest
    with pytest.raises(ValueError, match="larger than 65504"):
        codec.decode(memoryview(bad), payload)
    for _ in range(200):
        try:
            codec.decode(memoryview(bytearray(rng.randbytes(size))), payload)
        except ValueError:
            continue
        assert bool(torch.frombuffer(payload, dtype=torch.float16).isfinite().all())


@pytest.mark.parametrize(
    ("dtype", "reason"), [("fp8_e4m3", "8 bits already"), ("float64", "tests of equality")]
)
def test_other_dtypes_are_refused(dtype: str, reason: str) -> None:
    layout = BlockLayout(1, 16, 1, 64, dtype)
    with pytest.raises(TierConfigError, match=f"not of {dtype}, .*{reason}; choose"):
        make_codec("fp8", layout, {"fp8": Fp8Codec})


def test_a_store_keeps_blocks_in_half_the_bytes(tmp_path: Path) -> None:
    """Through the disk and a restart; a block with an infinity comes back as it was."""
    layout = BlockLayout(4, 16, 2, 64, "bfloat16")
    keys, buffers = make_keys(24), make_buffers(24, layout)
    blocks = [torch.randn(layout.page_bytes // 128, 64).to(torch.bfloat16) for _ in keys]
    blocks[5][3, 3] = float("inf")
    for buffer, numbers in zip(buffers, blocks, strict=True):
        buffer[:] = block_of(numbers)
    for codec in (Fp8Codec(layout), make_codec("fp8", layout, {"fp8": Fp8Codec})):
        store = SsdStore(tmp_path / "ssd", layout, 8 * 1024**2, codec=codec)
        assert set(store.store(keys, buffers).result(SECONDS)) == {Stored.KEPT}
        into = make_buffers(len(keys), layout)
        assert None not in store.load(keys, into).result(SECONDS)
        for number, (buffer, numbers) in enumerate(zip(into, blocks, strict=True)):
            decoded = torch.frombuffer(buffer, dtype=torch.bfloat16).view(numbers.shape)
            expected = numbers if number == 5 else check_bound(Fp8Codec(layout), numbers)
            assert torch.equal(decoded, expected)
        # 32 KiB of numbers become 16 KiB and 256 scales: five pages of eight.
        assert store.stats().loaded_bytes_saved == 23 * 3 * 4096
        store.close(SECONDS)


def test_it_says_that_it_loses_precision() -> None:
    codec = make_codec("fp8", BlockLayout(1, 16, 1, 64, "float16"), {"fp8": Fp8Codec})
    assert codec is not None
    assert not codec.is_lossless
