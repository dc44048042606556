# SPDX-License-Identifier: Apache-2.0
"""The single message from the launcher to a new core process, over the process's standard input.

The format is a length (u32, little-endian), then msgpack. The launcher then keeps the pipe open
without sending more: end of file means that the launcher has ended."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from ..config.engine_config import EngineConfig

_LENGTH = struct.Struct("<I")
MAX_BYTES = 1 << 20


class CoreStart(msgspec.Struct):
    """All settings that a core process needs to start."""

    config: EngineConfig
    to_core_endpoint: str  # the address from which the core pulls messages
    from_core_endpoint: str  # the address to which the core pushes messages
    log_level: str
    log_json: bool = False


Start = TypeVar("Start", bound=msgspec.Struct)


def encode_start(start: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(start, enc_hook=encode_path)
    return _LENGTH.pack(len(body)) + body


def read_start(stream: BinaryIO, kind: type[Start]) -> Start:
    """Read a start message. Raise ValueError for other input, such as a terminal's."""
    head = stream.read(_LENGTH.size)
    size = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
    body = stream.read(size) if 0 < size <= MAX_BYTES else b""
    if not body or len(body) != size:
        raise ValueError(
            "the core process is started by the engine's client and takes its settings from "
            "there; use `stratakv serve`"
        )
    return msgspec.msgpack.decode(body, type=kind, dec_hook=decode_path)


def tell_import(progress: Callable[[str], None]) -> None:
    """Report that torch will be imported, unless it already is. The import takes seconds, or half a
    minute on a busy machine or a cold disk."""
    if "torch" not in sys.modules:
        progress("importing torch")


def encode_path(value: Any) -> Any:
    """Encode a Path as text. Raises NotImplementedError for another type."""
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"no encoding for {type(value).__name__}")


def decode_path(kind: type, value: Any) -> Any:
    """Decode the text of `encode_path` to a Path. Raises NotImplementedError for any other type."""
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"no decoding to {kind.__name__}")
