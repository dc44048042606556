# SPDX-License-Identifier: Apache-2.0
"""Makes the key of an SGLang page from SGLang's hash of the page and from all other values that
determine the page's bytes.

    root    = SHA-256( canonical CBOR of the fields of PageIdentity )
    digest  = SHA-256( root | SGLang's page hash )
    key     = digest | group 0 | shard 0 of 1                               (40 bytes, docs/abi.md)

SGLang's hash chains token ids, its id of the adapter and the request's `cache_salt`; `settings`
covers the content of the adapters that SGLang loads at its start (host_model.py). The hash does not
cover model, dtype, ranks and the layout of bytes in the host pool. With MLA every tensor-parallel
rank has the same bytes, and one rank writes them, so the identity does not include the rank."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import cbor2

from ...tiers.block import key_suffix
from ...tiers.settings.values import ConfigError
from .host_model import ModelNames

_NAMESPACE = b"sglang-page-1\0"
_SUFFIX = key_suffix()

# The dtypes of pools whose pages contain all data that a reader needs (no separate scales).
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "uint8")
# The layouts in which a page has one piece of K and one piece of V.
LAYOUTS = ("page_first", "page_first_direct")
MAX_KEY_CHARACTERS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PageIdentity:
    """The values, in addition to SGLang's hashes, that two engines must agree on to share pages."""

    model: str  # a digest of the model's files, or SGLang's name (host_model.py)
    settings: str  # digest of SGLang's arguments that change numbers; may be empty
    revision: str
    salt: str
    host_version: str  # major.minor.patch of SGLang, because patches change host pools
    pool: str  # the class of the host pool
    kv_dtype: str
    kv_layout: str
    page_size: int  # tokens
    logical_page_size: int
    parts: tuple[int, ...]  # bytes of each piece of a page
    layers: tuple[int, int]  # first, and last + 1
    heads: tuple[int, int]  # heads in this rank's pool, and numbers per head
    is_mla: bool
    parallel: tuple[int, ...]  # size and rank: tensor, pipeline, context, decode context

    @property
    def page_bytes(self) -> int:
        return sum(self.parts)

    def root(self) -> bytes:
        """A 32-byte digest of all fields, for keys and stores."""
        return hashlib.sha256(cbor2.dumps(asdict(self), canonical=True)).digest()

    def namespace(self) -> bytes:
        return _NAMESPACE + self.root()


def read_identity(
    config: Any,
    pool: Any,
    parts: tuple[int, ...],
    names: ModelNames,
    *,
    revision: str,
    salt: str,
    version: str,
) -> PageIdentity:
    """Make the identity from SGLang's HiCacheStorageConfig and host pool. Raises ConfigError for
    pages that are not supported."""
    dtype = str(pool.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(
            f"pages of SGLang with numbers of dtype {dtype} cannot be kept, as far as StrataKV "
            f"knows; use --kv-cache-dtype auto, or one that is stored as {', '.join(DTYPES)}"
        )
    if pool.layout not in LAYOUTS:
        raise ConfigError(
            f"pages of SGLang's layout {pool.layout} lie in a piece for every layer; use "
            "--hicache-mem-layout page_first --hicache-io-backend kernel, or page_first_direct "
            "with direct"
        )
    if config.should_split_heads:
        raise ConfigError(
            "StrataKV does not split heads between engines of other tensor-parallel sizes; leave "
            "tp_lcm_size out of --hicache-storage-backend-extra-config"
        )
    is_mla = bool(config.is_mla_model)
    return PageIdentity(
        model=names.model,
        settings=names.settings,
        revision=revision,
        salt=salt,
        host_version=version,
        pool=type(pool).__name__,
        kv_dtype=dtype,
        kv_layout=pool.layout,
        page_size=int(pool.page_size),
        logical_page_size=int(config.logical_page_size or 0),
        parts=parts,
        layers=(int(pool.start_layer or 0), int(pool.end_layer or 0)),
        heads=(int(getattr(pool, "head_num", 0)), int(getattr(pool, "head_dim", 0))),
        is_mla=is_mla,
        parallel=(
            *((0, 0) if is_mla else (config.tp_size, config.tp_rank)),
            config.pp_size,
            config.pp_rank,
            config.attn_cp_size,
            config.attn_cp_rank,
            config.dcp_size,
            config.dcp_rank,
        ),
    )


class PageKeys:
    """Makes the tiers' keys from SGLang's page hashes."""

    def __init__(self, root: bytes) -> None:
        self._root = hashlib.sha256(root)

    def derive_page_key(self, key: str) -> bytes:
        """Return the 40-byte key of a page. Raises ValueError if `key` cannot be a page's hash."""
        if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY_CHARACTERS:
            raise ValueError(f"a page of SGLang has a hash of 1 to {MAX_KEY_CHARACTERS} characters")
        hasher = self._root.copy()
        hasher.update(key.encode())
        return hasher.digest() + _SUFFIX
