# SPDX-License-Identifier: Apache-2.0
"""The promise of a codec: a block's bytes in fewer bytes, and back.

Slots keep their size, so a codec saves bytes moved, not capacity. Knows nothing of files, sockets,
keys or checksums.

A caller may rely on this:
- `decode` of what `encode` wrote gives the block back: every bit of it where `is_lossless`, else
  within the bound that the codec's class states;
- `encode` writes nothing behind the end of `out`, and `decode` reads nothing behind the end of
  `encoded`;
- whatever the bytes are, `decode` ends, with the block or with ValueError, in memory that is
  bounded by the size of a block;
- all of it may be called from several threads at once.

The caller must give buffers of bytes (`memoryview` of format B), payloads `layout.page_bytes` long.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..block import BlockLayout


class Codec(ABC):
    """A way to write the blocks of one layout. Raises TierConfigError where it does not fit."""

    name: str
    number: int  # 1 to 255, what a record says; 0 is a block as it is
    is_lossless: bool

    def __init__(self, layout: BlockLayout) -> None:
        self.validate_layout(layout)
        self.layout = layout

    @classmethod
    @abstractmethod
    def validate_layout(cls, layout: BlockLayout) -> None:
        """Raises TierConfigError, with what to do, for a layout that the codec is not for."""

    @abstractmethod
    def encode(self, payload: memoryview, out: memoryview) -> int | None:
        """Write a block to the beginning of `out`; how many bytes that took. None where it does
        not fit or has no encoding: it is to be stored as it is, and `out` holds nothing of use."""

    @abstractmethod
    def decode(self, encoded: memoryview, payload: memoryview) -> None:
        """Write the block to `payload`. Raises ValueError for what `encode` cannot have written;
        `payload` holds nothing of use then."""
