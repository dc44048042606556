# SPDX-License-Identifier: Apache-2.0
"""The contract of a codec, which encodes a block in fewer bytes and decodes the bytes again.

A codec saves bytes read or written, but no disk space, because slots keep their size. A codec
handles no files, sockets, keys or checksums.

A caller may rely on these properties:
- `decode` restores the block that `encode` got: every bit if `is_lossless`, else within the error
  bound that the codec's class states;
- `encode` writes only within `out`, and `decode` reads only within `encoded`;
- for any bytes, `decode` fills a block or raises ValueError, in memory bounded by a block's size;
- several threads may call all methods at the same time.

Every buffer must be a `memoryview` of format B (bytes), and a payload `layout.page_bytes` long."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..block import BlockLayout


class Codec(ABC):
    """A codec for blocks of one layout. Raises TierConfigError for an unsupported layout."""

    name: str
    number: int  # 1 to 255, stored in records; 0 in a record means no codec
    is_lossless: bool

    def __init__(self, layout: BlockLayout) -> None:
        self.validate_layout(layout)
        self.layout = layout

    @classmethod
    @abstractmethod
    def validate_layout(cls, layout: BlockLayout) -> None:
        """Raise TierConfigError, with a remedy, for a layout that the codec does not support."""

    @abstractmethod
    def encode(self, payload: memoryview, out: memoryview) -> int | None:
        """Encode a block into `out`. Return the number of bytes; None if the block does not fit or
        cannot be encoded. After None the caller stores the block unencoded and ignores `out`."""

    @abstractmethod
    def decode(self, encoded: memoryview, payload: memoryview) -> None:
        """Decode a block into `payload`. Raises ValueError for bytes that `encode` cannot have
        written; the content of `payload` is then undefined."""
