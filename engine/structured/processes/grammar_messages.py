# SPDX-License-Identifier: Apache-2.0
"""Messages to the grammar processes and the answers, as MessagePack over socket pairs. Messages to
the first process are packets, some with file descriptors. The other processes use a stream, in
which each message follows its length (u32, little-endian).

    engine ── Start, Fork, Reap ──► the first process, which forks the others and never compiles
           ── Ask, Row, Leave   ──► a forked process: it compiles grammars and makes mask rows"""

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
MOST_BYTES = 64 * 1024**2  # limit of a message; compiled grammars are many times a client's text
_MOST_PACKET_BYTES = 131072
_MOST_TOGETHER = 65536  # a message up to this size is sent in one call with its length
LOOK_SECONDS = 0.05  # each look takes the interpreter's lock from computing threads
SEND_SECONDS = 30.0  # ample: the receiver reads as soon as it gets a processor

Message = TypeVar("Message")


class Start(msgspec.Struct):
    """The first message: the model, the backend and the memory limit."""

    backend: str
    model_path: str
    vocab_size: int
    end_ids: list[int]
    memory_bytes: int  # for compiling, beyond the first process's memory


class Started(msgspec.Struct):
    """The answer to Start. A nonempty `error` is the reason why the backend cannot be opened."""

    error: str = ""


class Fork(msgspec.Struct, tag=True):
    """Fork a process; the packet carries the new process's end of a socket pair. With `is_last` the
    new process runs only while no other thread needs the CPU (SCHED_IDLE)."""

    is_last: bool


class Forked(msgspec.Struct):
    """The answer to Fork: the process's id. The packet carries its pidfd."""

    pid: int


class Reap(msgspec.Struct, tag=True):
    """Wait for a process that has ended or was killed. The kernel does not reuse a process's id
    before it is waited for."""

    pid: int


class Reaped(msgspec.Struct):
    """The answer to Reap: an exit status, or a negative signal number."""

    status: int


class Ask(msgspec.Struct, tag=True):
    """Compile a grammar. `is_second`: the preferred backend took too long."""

    kind: Kind
    text: str
    any_whitespace: bool
    whitespace_pattern: str
    is_second: bool
    cpu_seconds: float


class Answer(msgspec.Struct):
    """The answer to Ask: the grammar's form, the mask row at the beginning of an answer and the CPU
    time of that row; or an error."""

    form: Form | None = None
    error: str = ""
    first_words: bytes = b""
    first_seconds: float = 0.0


class Row(msgspec.Struct, tag=True):
    """Move a matcher of the last compiled grammar: undo `rollback` tokens, accept `tokens`, and
    make a mask row if `is_wanted`. An unused `matcher` number makes a new matcher."""

    matcher: int
    rollback: int
    tokens: list[int]
    is_wanted: bool
    cpu_seconds: float


class RowAnswer(msgspec.Struct):
    """The answer to Row. `num_accepted` counts the tokens before the first refused token. The
    refused token and later tokens change nothing; no row is made after a refused token."""

    num_accepted: int = 0
    may_end: bool = False
    words: bytes = b""
    error: str = ""


class Leave(msgspec.Struct, tag=True):
    """Drop a matcher. `Leave` has no answer."""

    matcher: int


def send_packet(control: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    """Send a message in one packet. Raises OSError."""
    control.settimeout(SEND_SECONDS)
    socket.send_fds(control, [msgspec.msgpack.encode(message)], list(descriptors))


def receive_packet(
    control: socket.socket,
    kind: type[Message] | Any,
    look: Callable[[], None] | None = None,
) -> tuple[Message, list[int]]:
    """Return the next message, like `receive`, and the file descriptors that came with it."""
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
    """Send a message after its length. Raises OSError."""
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
    """Return the next message. While waiting, call `look` every LOOK_SECONDS; `look` may raise.
    Without `look`, wait for ever. Raises EOFError if the other end is closed."""
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
