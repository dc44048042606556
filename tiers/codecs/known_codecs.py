# SPDX-License-Identifier: Apache-2.0
"""Codecs by name: the values of the codec flag, and the functions that make the codecs. `CODECS`
has the codecs without torch; callers pass in other codecs (connector/device/fp8_codec.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..block import BlockLayout
from ..errors import TierConfigError
from .base import Codec

# A function that makes a codec, or raises TierConfigError for an unsupported layout.
CodecFactory = Callable[[BlockLayout], Codec]

NONE = "none"
DEFAULT_CODEC = NONE
# The names of codecs that round K and V; these need torch, so `connector/build.py` passes them in.
ROUNDING_CODECS = ("fp8",)


def _lossless(layout: BlockLayout) -> Codec:
    try:
        from .lossless import LosslessCodec
    except ImportError as error:
        raise TierConfigError(
            f"the codec lossless needs a package that is not installed ({error}); run "
            "`pip install '.[codecs]'` in a clone of StrataKV, or choose the codec none"
        ) from error
    return LosslessCodec(layout)


CODECS: Mapping[str, CodecFactory] = {"lossless": _lossless}


def make_codec(
    name: str, layout: BlockLayout, more: Mapping[str, CodecFactory] | None = None
) -> Codec | None:
    """Make the codec `name`; None for "none". Raises TierConfigError for an unusable codec."""
    if name == NONE:
        return None
    codecs = {**CODECS, **(more or {})}
    if name not in codecs:
        raise TierConfigError(
            f"there is no codec {name!r}; there are: {', '.join([NONE, *codecs])}"
        )
    return codecs[name](layout)


def readable_codecs(layout: BlockLayout, codec: Codec | None) -> dict[int, Codec]:
    """Return the codecs, by number, whose records a tier that writes with `codec` can read: `codec`
    and all lossless codecs. So a store opens with and without a lossless codec."""
    found: dict[int, Codec] = {}
    for factory in CODECS.values():
        try:
            each = factory(layout)
        except TierConfigError:
            continue  # the codec's records will be misses
        found[each.number] = each
    if codec is not None:
        found[codec.number] = codec
    return found
