# SPDX-License-Identifier: Apache-2.0
"""Adapter: a LoRA adapter as requests refer to it."""

from __future__ import annotations

from typing import NamedTuple


class Adapter(NamedTuple):
    """An adapter that is loaded under a name. The keys of its blocks have the fingerprint alone, so
    one name never finds the blocks of its predecessor, and equal adapters share theirs."""

    name: str
    fingerprint: bytes  # 32 bytes: everything in the adapter that can change a token
