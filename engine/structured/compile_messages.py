# SPDX-License-Identifier: Apache-2.0
"""What the process that tries grammars out is told, and what it answers: JSON behind its length
(u32, little-endian), over a socket that both ends have."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from ..structured_params import Kind
from .base import Form

_LENGTH = struct.Struct("<I")
MOST_BYTES = 64 * 1024**2  # a grammar in a backend's own language, many times a client's text
LAST = "last"  # an argument of the process
LOOK_SECONDS = 0.25  # each look takes the interpreter's lock from those who compute

Message = TypeVar("Message", bound=msgspec.Struct)


class Start(msgspec.Struct):
    """The first message: for which model, by which backend, within which limits."""

    backend: str
    model_path: str
    vocab_size: int
    end_ids: list[int]
    cpu_seconds: float  # for one grammar
    memory_bytes: int  # beside what the process takes before the first


class Ask(msgspec.Struct):
    """One grammar."""

    kind: Kind
    text: str
    any_whitespace: bool
    whitespace_pattern: str


class Answer(msgspec.Struct):
    """To the start and to each grammar: to the first without a form. Or why not."""

    form: Form | None = None
    error: str = ""


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """Raises OSError."""
    body = msgspec.json.encode(message)
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive(
    connection: socket.socket,
    kind: type[Message],
    look: Callable[[], None] = lambda: None,
) -> Message:
    """The next message. `look` is called now and then while none comes, and may raise. Raises
    EOFError where the other end is gone."""
    size = _LENGTH.unpack(_read(connection, _LENGTH.size, look))[0]
    if size > MOST_BYTES:
        raise EOFError(f"a message of {size} bytes, and at most {MOST_BYTES} may be")
    return msgspec.json.decode(_read(connection, size, look), type=kind)


def _read(connection: socket.socket, size: int, look: Callable[[], None]) -> bytearray:
    data = bytearray(size)
    view, done, next_look = memoryview(data), 0, time.monotonic() + LOOK_SECONDS
    while done < size:
        if time.monotonic() >= next_look:
            look()
            next_look = time.monotonic() + LOOK_SECONDS
        try:
            count = connection.recv_into(view[done:])
        except TimeoutError:
            continue
        except OSError as error:
            raise EOFError(str(error)) from None
        if count == 0:
            raise EOFError("the other end is gone")
        done += count
    return data
