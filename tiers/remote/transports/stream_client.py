# SPDX-License-Identifier: Apache-2.0
"""StreamConnection: the client's end of gRPC streams, for servers whose data connection cannot be
reached. Streams are slower than other transports, but pass through any proxy."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from ....proto.v1 import cache_service_pb2 as messages
from ...block import BlockLayout
from ...tag import Proof, Proofs, unpack_proof
from ...wire.connection_tags import Tags
from ...wire.frames import NO_PROOF, State, WireError, pack_keys
from ...wire.limits import PIECE_BYTES
from ...wire.protobuf_messages import header_message, read_header
from ...wire.raw_messages import Piece
from ...wire.rpc import Stub
from ...wire.sockets import ConnectionLost
from .block_connection import BlockConnection

_STATES: dict[int, State] = {int(state): state for state in State}


class StreamConnection(BlockConnection):
    """A connection over the gRPC channel of `stub`. Every call carries `metadata`."""

    kind = "streams"

    def __init__(
        self,
        stub: Stub,
        metadata: Sequence[tuple[str, str]],
        layout: BlockLayout,
        boot_id: bytes,
        tag_key: bytes | None = None,
        namespace: bytes = b"",
    ) -> None:
        self.boot_id = boot_id
        self._stub = stub
        self._metadata = tuple(metadata)
        self._layout_id = layout.layout_id()
        self._page_bytes = layout.page_bytes
        self._tags = Tags(layout, tag_key, namespace)
        self.corrupt_keys = []
        self._call: Any = None
        self._aborted = False

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], deadline: float
    ) -> list[Proof | None]:
        request = messages.LoadRequest(keys=pack_keys(keys))
        call = self._begin_call(self._stub.load, request, deadline)
        arriving = _Arriving(keys, buffers, self._tags, self._layout_id)
        try:
            for piece in call:
                arriving.take_piece(piece, self._page_bytes)
        except (grpc.RpcError, WireError, ValueError) as error:
            call.cancel()
            raise _lost(error) from error
        self.corrupt_keys = arriving.corrupt_keys
        self.corrupt_blocks += len(self.corrupt_keys)
        return arriving.proofs

    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs,
        deadline: float,
    ) -> list[State | None]:
        damaged: list[int] = []
        pieces = self._pieces(keys, buffers, proofs, damaged)
        call = self._begin_call(self._stub.store.future, pieces, deadline)
        try:
            response = call.result(max(0.001, deadline - time.monotonic()))
            states: list[State | None] = [_STATES[byte] for byte in response.states]
        except (grpc.RpcError, grpc.FutureTimeoutError, KeyError) as error:
            call.cancel()
            raise _lost(error) from error
        if len(states) != len(keys):
            raise ConnectionLost(f"{len(states)} answers to {len(keys)} blocks")
        self.boot_id = response.boot_id
        for index in damaged:
            states[index] = None
        return states

    def abort_call(self) -> None:
        self._aborted = True
        call = self._call
        if call is not None:
            call.cancel()

    def close(self) -> None:
        self.abort_call()

    def _begin_call(self, method: Any, request: Any, deadline: float) -> Any:
        left = deadline - time.monotonic()
        if left <= 0 or self._aborted:
            raise ConnectionLost("the deadline passed" if left <= 0 else "the call was ended")
        try:
            self._call = method(request, timeout=left, metadata=self._metadata)
        except ValueError as error:  # the channel was replaced
            raise ConnectionLost(str(error)) from error
        return self._call

    def _pieces(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs,
        damaged: list[int],
    ) -> Iterator[Piece]:
        for index, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            payload = buffer[: self._page_bytes]
            proof = self._tags.prove(key, payload, proofs[index])
            if proof is None:
                damaged.append(index)
                proof = unpack_proof(NO_PROOF)
            for offset in range(0, self._page_bytes, PIECE_BYTES):
                header = None
                if not offset:
                    header = header_message(
                        key, self._layout_id, self._page_bytes, proof.tag, proof.digest
                    )
                part = payload[offset : offset + PIECE_BYTES]
                yield Piece(index=index, header=header, offset=offset, payload=part)


class _Arriving:
    """The blocks of a load, assembled from the received pieces."""

    def __init__(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        tags: Tags,
        layout_id: bytes,
    ) -> None:
        self.proofs: list[Proof | None] = [None] * len(keys)
        self.corrupt_keys: list[bytes] = []
        self._keys = keys
        self._buffers = buffers
        self._tags = tags
        self._layout_id = layout_id
        self._index = -1
        self._received = 0
        self._tag = b""
        self._hasher: Any = None

    def take_piece(self, piece: Piece, page_bytes: int) -> None:
        """Copy the next piece to its buffer. Raises WireError if an earlier piece is missing."""
        if piece.state is State.MISS:
            return
        if piece.header is not None:
            if not self._index < piece.index < len(self._keys):
                raise WireError(f"a piece of block {piece.index} does not follow on the one before")
            key, self._tag, _ = read_header(piece.header, self._layout_id, page_bytes)
            if key != self._keys[piece.index]:
                raise WireError("a block came under another key than was asked for")
            self._index, self._received = piece.index, 0
            self._hasher = self._tags.begin_block(key)
        end = self._received + len(piece.payload)
        follows = (piece.index, piece.offset) == (self._index, self._received)
        if not follows or not piece.payload or end > page_bytes:
            raise WireError(f"a piece of block {piece.index} does not follow on the one before")
        part = self._buffers[self._index][self._received : end]
        part[:] = piece.payload
        if self._hasher is not None:
            self._hasher.update(part)
        self._received = end
        if end == page_bytes and self._hasher is not None:
            key = self._keys[self._index]
            proof = self._tags.received(key, self._hasher, self._tag)
            self.proofs[self._index] = proof
            if proof is None:
                self.corrupt_keys.append(key)


def _lost(error: Exception) -> ConnectionLost:
    if isinstance(error, grpc.RpcError):
        return ConnectionLost(f"{error.code().name}: {error.details()}")
    return ConnectionLost(str(error) or type(error).__name__)
