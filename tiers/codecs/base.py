# SPDX-License-Identifier: Apache-2.0
"""The contract of a codec, which turns a block's bytes into fewer bytes and back.

Slots keep their size: a codec saves moved bytes. It knows no files, sockets, keys or checksums.

A caller may rely on this:
- `decode` returns the block that `encode` wrote: every bit of it if `is_lossless`, else within the
  bound that the codec's class states;
- `encode` writes nothing behind the end of `out`, and `decode` reads nothing behind the end of
  `encoded`;
- for any bytes `decode` ends with the block or with ValueError, in memory bounded by the size of a
  block;
- several threads may call all methods at once.

The caller must give buffers of bytes (`memoryview` of format B), payloads `layout.page_bytes` long.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..block import BlockLayout


class Codec(ABC):
    """An encoding of the blocks of one layout. Raises TierConfigError for an unfit layout."""

    name: str
    number: int  # 1 to 255, in the record; 0 is a block without a codec
    is_lossless: bool

    def __init__(self, layout: BlockLayout) -> None:
        self.validate_layout(layout)
        self.layout = layout

    @classmethod
    @abstractmethod
    def validate_layout(cls, layout: BlockLayout) -> None:
        """Raise TierConfigError, with the cure, for a layout that the codec does not support."""

    @abstractmethod
    def encode(self, payload: memoryview, out: memoryview) -> int | None:
        """Encode a block to the beginning of `out`. Return the number of bytes; None if the block
        does not fit or has no encoding: the caller stores it as it is, and `out` is undefined."""

    @abstractmethod
    def decode(self, encoded: memoryview, payload: memoryview) -> None:
        """Decode the block to `payload`. Raises ValueError for bytes that `encode` cannot have
        written; the content of `payload` is undefined then."""
