# SPDX-License-Identifier: Apache-2.0
"""A codec that halves the size of 16-bit blocks: e4m3 numbers, with a scale for each row of a head.

    encoded = for each layer, K or V, token and head, in the order of the block:
              one byte e: the row's scale is 2 ** (e - 127)
              then for each of these rows: `head_dim` numbers of 8 bits, e4m3

The scale is the smallest power of two that brings the row's largest number to 448, e4m3's maximum,
or less. Scaling by a power of two is exact in every dtype, so the only loss is the rounding to
e4m3:

    |x - decoded x| <= max(|x| / 16, scale / 1024)

An e4m3 number has three mantissa bits, so rounding changes it by 1/16 at most; below 2 ** -6 the
numbers are 2 ** -9 apart. Numbers within a sixteenth of the dtype's maximum could round to
infinity. Blocks with such numbers, an infinity or a NaN are stored without encoding.

The codec is not in `tiers/codecs/`, because `tiers/` imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...tiers.block import BlockLayout
from ...tiers.codecs.base import Codec
from ...tiers.errors import TierConfigError

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
# Numbers encoded at a time: these fit into the CPU's cache, and from 32768 numbers on torch would
# start its own threads, beside the many threads that move blocks.
_CHUNK_NUMBERS = 32767
_BIAS = 127  # the bias of a float32's exponent
_SMALLEST, _LARGEST = -126, 120  # powers of two: the least normal float32; the largest over 448
_HALF_TO_E4M3 = 256  # e4m3's bits, read as float16, give a 256th of the number
_MANTISSA_OF_LARGEST = 0.875  # 448 = 0.875 * 2 ** 9
_EXPONENT_OF_LARGEST = 9


class _Rows(NamedTuple):
    numbers: torch.Tensor  # [rows, head_dim] of the dtype
    exponents: torch.Tensor  # [rows, 1] bytes
    codes: torch.Tensor  # [rows, head_dim] bytes


class Fp8Codec(Codec):
    """e4m3 with scales, for bfloat16, float16 and float32. A decoded number differs from the
    original x by at most max(|x| / 16, s / 1024). The scale s is a power of two, at most 1/224 of
    the largest number of the row (K or V of one token in one head)."""

    name = "fp8"
    number = 2
    is_lossless = False

    def __init__(self, layout: BlockLayout) -> None:
        super().__init__(layout)
        self._dtype = DTYPES[layout.kv_dtype]
        self._largest = torch.finfo(self._dtype).max
        self._width = layout.head_dim
        self._rows = layout.page_bytes // (self._dtype.itemsize * self._width)
        self.encoded_bytes = self._rows * (1 + self._width)

    @classmethod
    def validate_layout(cls, layout: BlockLayout) -> None:
        if layout.kv_dtype not in DTYPES:
            reasons = {
                "fp8_e4m3": "whose numbers have 8 bits already",
                "float64": "which is there for tests of equality",
            }
            raise TierConfigError(
                f"the codec fp8 is for blocks of {', '.join(DTYPES)}, not of {layout.kv_dtype}, "
                f"{reasons[layout.kv_dtype]}; choose the codec none or lossless"
            )

    def encode(self, payload: memoryview, out: memoryview) -> int | None:
        if len(out) < self.encoded_bytes:
            return None
        for numbers, exponents, codes in self._chunks(payload, out):
            x = numbers.float()
            peaks = x.abs().amax(1, keepdim=True)
            # Written with `not`, so that NaN is refused too.
            if not peaks.max().item() <= self._largest * (1 - 1 / 16):
                return None
            mantissas, powers = torch.frexp(peaks)
            powers += (mantissas > _MANTISSA_OF_LARGEST).int() - _EXPONENT_OF_LARGEST
            powers.clamp_(min=_SMALLEST)
            exponents.copy_(powers + _BIAS)
            x *= _two_to(-powers)
            codes.view(torch.float8_e4m3fn).copy_(x)
        return self.encoded_bytes

    def decode(self, encoded: memoryview, payload: memoryview) -> None:
        if len(encoded) != self.encoded_bytes:
            raise ValueError(f"{len(encoded)} encoded bytes instead of {self.encoded_bytes}")
        for numbers, exponents, codes in self._chunks(payload, encoded):
            powers = exponents.int() - _BIAS
            if not _SMALLEST <= powers.min().item() <= powers.max().item() <= _LARGEST:
                raise ValueError("a scale is out of range")
            # Conversion by bits is three times as fast as torch's own conversion.
            bits = codes.view(torch.int8).short()  # the sign fills the upper byte
            signs = bits & -0x8000
            bits &= 0x7F
            if bits.max().item() == 0x7F:
                raise ValueError("a number is a NaN")
            bits <<= 7
            bits |= signs
            x = bits.view(torch.float16).float()
            x *= _HALF_TO_E4M3
            x *= _two_to(powers)
            if x.abs().max().item() > self._largest:
                raise ValueError(f"a number is larger than {self._largest:g}")
            numbers.copy_(x)

    def _chunks(self, payload: memoryview, encoded: memoryview) -> Iterator[_Rows]:
        numbers = _tensor(payload).view(self._dtype).view(self._rows, self._width)
        whole = _tensor(encoded)
        exponents = whole[: self._rows].view(self._rows, 1)
        codes = whole[self._rows : self.encoded_bytes].view(self._rows, self._width)
        step = max(1, _CHUNK_NUMBERS // self._width)
        for start in range(0, self._rows, step):
            rows = slice(start, start + step)
            yield _Rows(numbers[rows], exponents[rows], codes[rows])


def _two_to(powers: torch.Tensor) -> torch.Tensor:
    """2 ** powers, exactly, for powers of int32 from -126 to 127."""
    return ((powers + _BIAS) << 23).view(torch.float32)


def _tensor(buffer: memoryview) -> torch.Tensor:
    """Return the bytes of a buffer as a tensor; only a read-only buffer is copied."""
    return torch.frombuffer(bytearray(buffer) if buffer.readonly else buffer, dtype=torch.uint8)
