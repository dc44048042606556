# SPDX-License-Identifier: Apache-2.0
"""What the processes of grammars are told, and what they answer: MessagePack, over sockets that
both ends have. To the first process it goes in packets, with descriptors; to the others in a
stream, each message behind its length (u32, little-endian).

    engine ── Start, Fork, Reap ──► the first process, which forks the others and never compiles
           ── Ask, Row, Leave   ──► one of those: it compiles, or follows what it has compiled
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from ...request.structured_params import Kind
from ..base import Form

_LENGTH = struct.Struct("<I")
MOST_BYTES = 64 * 1024**2  # a compiled grammar, many times a client's text
_MOST_PACKET_BYTES = 131072
_MOST_TOGETHER = 65536  # of a message that goes out in one piece
LOOK_SECONDS = 0.05  # each look takes the interpreter's lock from those who compute
SEND_SECONDS = 30.0  # for whoever reads at once, where it is run at all

Message = TypeVar("Message")


class Start(msgspec.Struct):
    """The first message: for which model, by which backend, within which limits."""

    backend: str
    model_path: str
    vocab_size: int
    end_ids: list[int]
    memory_bytes: int  # of one that compiles, beside what the first takes before


class Started(msgspec.Struct):
    """The answer to it, once; or why not."""

    error: str = ""


class Fork(msgspec.Struct, tag=True):
    """Have a process, whose end of a socket comes with it. The last has the processor only while
    nobody else wants it."""

    is_last: bool


class Forked(msgspec.Struct):
    """Its number; a descriptor of it comes along."""

    pid: int


class Reap(msgspec.Struct, tag=True):
    """One has ended, or was killed just now: until it is asked for its number is not used again."""

    pid: int


class Reaped(msgspec.Struct):
    """How it ended: an exit status, or a signal below zero."""

    status: int


class Ask(msgspec.Struct, tag=True):
    """One grammar. `is_second`: the backend that comes first has taken too long."""

    kind: Kind
    text: str
    any_whitespace: bool
    whitespace_pattern: str
    is_second: bool
    cpu_seconds: float


class Answer(msgspec.Struct):
    """Its form and the row of an answer that begins, with the processor's seconds of that; or why
    not."""

    form: Form | None = None
    error: str = ""
    first_words: bytes = b""
    first_seconds: float = 0.0


class Row(msgspec.Struct, tag=True):
    """For one matcher of the grammar that was compiled last, by number; a number that is new begins
    one. It takes back tokens, goes on by others, and makes a row where that is wanted."""

    matcher: int
    rollback: int
    tokens: list[int]
    is_wanted: bool
    cpu_seconds: float


class RowAnswer(msgspec.Struct):
    """How many of the tokens it allowed; behind one that it did not allow nothing has changed, and
    no row is made."""

    num_accepted: int = 0
    may_end: bool = False
    words: bytes = b""
    error: str = ""


class Leave(msgspec.Struct, tag=True):
    """This matcher is not used any more. Nothing is answered."""

    matcher: int


def send_packet(control: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    """Raises OSError."""
    control.settimeout(SEND_SECONDS)
    socket.send_fds(control, [msgspec.msgpack.encode(message)], list(descriptors))


def receive_packet(
    control: socket.socket,
    kind: type[Message] | Any,
    look: Callable[[], None] | None = None,
) -> tuple[Message, list[int]]:
    """The next message, as `receive`, and the descriptors that came with it."""
    control.settimeout(None if look is None else LOOK_SECONDS)
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(control, _MOST_PACKET_BYTES, 1)
        except TimeoutError:
            assert look is not None
            look()
            continue
        except OSError as error:
            raise EOFError(str(error)) from None
        if not data:
            raise EOFError("the other end is gone")
        message: Message = msgspec.msgpack.decode(data, type=kind)
        return message, descriptors


def send(connection: socket.socket, message: Any) -> None:
    """Raises OSError."""
    body = msgspec.msgpack.encode(message)
    head = _LENGTH.pack(len(body))
    connection.settimeout(SEND_SECONDS)
    if len(body) <= _MOST_TOGETHER:
        connection.sendall(head + body)
    else:
        connection.sendall(head)
        connection.sendall(body)


def receive(
    connection: socket.socket,
    kind: type[Message] | Any,
    look: Callable[[], None] | None = None,
) -> Message:
    """The next message. With `look` that is called now and then while none comes, and may raise;
    without, it waits for ever. Raises EOFError where the other end is gone."""
    connection.settimeout(None if look is None else LOOK_SECONDS)
    size = _LENGTH.unpack(_read(connection, _LENGTH.size, look))[0]
    if size > MOST_BYTES:
        raise EOFError(f"a message of {size} bytes, and at most {MOST_BYTES} may be")
    message: Message = msgspec.msgpack.decode(_read(connection, size, look), type=kind)
    return message


def _read(connection: socket.socket, size: int, look: Callable[[], None] | None) -> bytearray:
    data = bytearray(size)
    view, done, next_look = memoryview(data), 0, time.monotonic() + LOOK_SECONDS
    while done < size:
        if look is not None and time.monotonic() >= next_look:
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
