# SPDX-License-Identifier: Apache-2.0
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlockKey(_message.Message):
    __slots__ = ("digest", "group", "shard_rank", "shard_count")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SHARD_RANK_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    group: int
    shard_rank: int
    shard_count: int
    def __init__(self, digest: _Optional[bytes] = ..., group: _Optional[int] = ..., shard_rank: _Optional[int] = ..., shard_count: _Optional[int] = ...) -> None: ...

class BlockLayout(_message.Message):
    __slots__ = ("layout_version", "num_layers", "block_size_tokens", "num_kv_heads", "head_dim", "kv_dtype")
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    layout_version: int
    num_layers: int
    block_size_tokens: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str
    def __init__(self, layout_version: _Optional[int] = ..., num_layers: _Optional[int] = ..., block_size_tokens: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., kv_dtype: _Optional[str] = ...) -> None: ...

class BlockHeader(_message.Message):
    __slots__ = ("key", "layout_id", "generation", "payload_bytes", "tag", "payload_digest")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_DIGEST_FIELD_NUMBER: _ClassVar[int]
    key: BlockKey
    layout_id: bytes
    generation: int
    payload_bytes: int
    tag: bytes
    payload_digest: bytes
    def __init__(self, key: _Optional[_Union[BlockKey, _Mapping]] = ..., layout_id: _Optional[bytes] = ..., generation: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., tag: _Optional[bytes] = ..., payload_digest: _Optional[bytes] = ...) -> None: ...
