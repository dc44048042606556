# SPDX-License-Identifier: Apache-2.0
"""Adapter: a LoRA adapter in a request."""

from __future__ import annotations

from typing import NamedTuple


class Adapter(NamedTuple):
    """An adapter that is loaded under a name. The keys of blocks include the fingerprint and not
    the name. So equal adapters share blocks, and a reused name finds no old blocks."""

    name: str
    fingerprint: bytes  # 32-byte digest of everything in the adapter that can change a token
