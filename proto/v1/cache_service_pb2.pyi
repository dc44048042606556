# SPDX-License-Identifier: Apache-2.0
from stratakv.proto.v1 import block_pb2 as _block_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlockState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_STATE_UNSPECIFIED: _ClassVar[BlockState]
    BLOCK_STATE_HIT: _ClassVar[BlockState]
    BLOCK_STATE_PENDING: _ClassVar[BlockState]
    BLOCK_STATE_WANTED: _ClassVar[BlockState]
    BLOCK_STATE_KEPT: _ClassVar[BlockState]
    BLOCK_STATE_NO_ROOM: _ClassVar[BlockState]
    BLOCK_STATE_CORRUPT: _ClassVar[BlockState]
BLOCK_STATE_UNSPECIFIED: BlockState
BLOCK_STATE_HIT: BlockState
BLOCK_STATE_PENDING: BlockState
BLOCK_STATE_WANTED: BlockState
BLOCK_STATE_KEPT: BlockState
BLOCK_STATE_NO_ROOM: BlockState
BLOCK_STATE_CORRUPT: BlockState

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("boot_id", "server_version", "layout", "max_keys", "max_blocks", "max_piece_bytes", "capacity_bytes", "tenant", "max_lease_ms")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MAX_KEYS_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MAX_LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    boot_id: bytes
    server_version: str
    layout: _block_pb2.BlockLayout
    max_keys: int
    max_blocks: int
    max_piece_bytes: int
    capacity_bytes: int
    tenant: str
    max_lease_ms: int
    def __init__(self, boot_id: _Optional[bytes] = ..., server_version: _Optional[str] = ..., layout: _Optional[_Union[_block_pb2.BlockLayout, _Mapping]] = ..., max_keys: _Optional[int] = ..., max_blocks: _Optional[int] = ..., max_piece_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., tenant: _Optional[str] = ..., max_lease_ms: _Optional[int] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("layout",)
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    layout: _block_pb2.BlockLayout
    def __init__(self, layout: _Optional[_Union[_block_pb2.BlockLayout, _Mapping]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("boot_id", "capacity_bytes", "is_read_only")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_READ_ONLY_FIELD_NUMBER: _ClassVar[int]
    boot_id: bytes
    capacity_bytes: int
    is_read_only: bool
    def __init__(self, boot_id: _Optional[bytes] = ..., capacity_bytes: _Optional[int] = ..., is_read_only: bool = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    def __init__(self, keys: _Optional[bytes] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("prefix", "states", "boot_id")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    prefix: int
    states: bytes
    boot_id: bytes
    def __init__(self, prefix: _Optional[int] = ..., states: _Optional[bytes] = ..., boot_id: _Optional[bytes] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    def __init__(self, keys: _Optional[bytes] = ...) -> None: ...

class BlockPiece(_message.Message):
    __slots__ = ("index", "state", "header", "offset", "payload")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    index: int
    state: BlockState
    header: _block_pb2.BlockHeader
    offset: int
    payload: bytes
    def __init__(self, index: _Optional[int] = ..., state: _Optional[_Union[BlockState, str]] = ..., header: _Optional[_Union[_block_pb2.BlockHeader, _Mapping]] = ..., offset: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class StoreResponse(_message.Message):
    __slots__ = ("states", "boot_id")
    STATES_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    states: bytes
    boot_id: bytes
    def __init__(self, states: _Optional[bytes] = ..., boot_id: _Optional[bytes] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("keys", "lease_ms")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    lease_ms: int
    def __init__(self, keys: _Optional[bytes] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("lease", "prefix")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    lease: int
    prefix: int
    def __init__(self, lease: _Optional[int] = ..., prefix: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: int
    def __init__(self, lease: _Optional[int] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("was_held",)
    WAS_HELD_FIELD_NUMBER: _ClassVar[int]
    was_held: bool
    def __init__(self, was_held: bool = ...) -> None: ...

class TouchRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    def __init__(self, keys: _Optional[bytes] = ...) -> None: ...

class TouchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("keys", "all")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    all: bool
    def __init__(self, keys: _Optional[bytes] = ..., all: bool = ...) -> None: ...

class DeleteResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: int
    def __init__(self, deleted: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchEvent(_message.Message):
    __slots__ = ("sequence", "boot_id", "stored", "removed", "cleared", "lost")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    boot_id: bytes
    stored: bytes
    removed: bytes
    cleared: bool
    lost: int
    def __init__(self, sequence: _Optional[int] = ..., boot_id: _Optional[bytes] = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., cleared: bool = ..., lost: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("name", "capacity_bytes", "used_bytes", "blocks", "hits", "misses", "stored_blocks", "loaded_blocks", "evicted_blocks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    STORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    capacity_bytes: int
    used_bytes: int
    blocks: int
    hits: int
    misses: int
    stored_blocks: int
    loaded_blocks: int
    evicted_blocks: int
    def __init__(self, name: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., stored_blocks: _Optional[int] = ..., loaded_blocks: _Optional[int] = ..., evicted_blocks: _Optional[int] = ...) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("tiers", "leases", "corrupt_blocks")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[TierStats]
    leases: int
    corrupt_blocks: int
    def __init__(self, tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ..., leases: _Optional[int] = ..., corrupt_blocks: _Optional[int] = ...) -> None: ...

class OpenDataRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenDataResponse(_message.Message):
    __slots__ = ("ticket", "ticket_ms", "port", "unix_path", "boot_id")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TICKET_MS_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    UNIX_PATH_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    ticket_ms: int
    port: int
    unix_path: str
    boot_id: bytes
    def __init__(self, ticket: _Optional[bytes] = ..., ticket_ms: _Optional[int] = ..., port: _Optional[int] = ..., unix_path: _Optional[str] = ..., boot_id: _Optional[bytes] = ...) -> None: ...
