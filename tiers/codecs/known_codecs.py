# SPDX-License-Identifier: Apache-2.0
"""Codecs by name: what a flag may say, and who makes the codec for a layout.

Knows the codecs that need no more than bytes. Others, such as connector/device/fp8_codec.py, are
given by the modules that know them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..block import BlockLayout
from ..errors import TierConfigError
from .base import Codec

# Raises TierConfigError where the codec does not fit the layout.
CodecFactory = Callable[[BlockLayout], Codec]

NONE = "none"
DEFAULT_CODEC = NONE


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
    """A codec by name, `more` beside those known here; None for "none". Raises TierConfigError
    for an unknown name, and where the codec does not fit the layout or is not installed."""
    if name == NONE:
        return None
    codecs = {**CODECS, **(more or {})}
    if name not in codecs:
        raise TierConfigError(
            f"there is no codec {name!r}; there are: {', '.join([NONE, *codecs])}"
        )
    return codecs[name](layout)


def readable_codecs(layout: BlockLayout, codec: Codec | None) -> dict[int, Codec]:
    """By number, the codecs whose records a tier can read that writes with `codec`: that one, and
    those without loss, so that a store of blocks can be opened with and without one."""
    found: dict[int, Codec] = {}
    for factory in CODECS.values():
        try:
            each = factory(layout)
        except TierConfigError:
            continue  # its records will be misses
        found[each.number] = each
    if codec is not None:
        found[codec.number] = codec
    return found
