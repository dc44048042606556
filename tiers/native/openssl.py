# SPDX-License-Identifier: Apache-2.0
"""The functions of OpenSSL that Python's hashlib uses, for the compiled library. The library makes
the HMACs of many names in one call. For each name, hashlib would copy a hash state four times and
make four objects.

The functions are looked up by name in the library that hashlib is linked to. `key_hasher` returns
None, and hashlib is used, if that library is missing (a Python with OpenSSL built in), if there is
no compiled library, or if a first test HMAC is wrong."""

from __future__ import annotations

import ctypes
import functools
import hmac
import importlib.util
import logging
import weakref
from collections.abc import Callable

from .native_library import library

log = logging.getLogger(__name__)

_NAMES = (
    "EVP_MD_CTX_new", "EVP_MD_CTX_free", "EVP_MD_CTX_copy_ex", "EVP_DigestUpdate",
    "EVP_DigestFinal_ex",
)  # fmt: skip
_BLOCK_BYTES = 64  # of SHA-256
_DIGEST_BYTES = 32


class _OpenSsl:
    """OpenSSL functions, called by ctypes. Raises AttributeError if one is missing."""

    def __init__(self, found: ctypes.CDLL) -> None:
        address, number = ctypes.c_void_p, ctypes.c_int
        self._new, self.free, self._update = (
            found.EVP_MD_CTX_new, found.EVP_MD_CTX_free, found.EVP_DigestUpdate,
        )  # fmt: skip
        self._sha256, self._begin = found.EVP_sha256, found.EVP_DigestInit_ex
        self._new.restype = self._sha256.restype = address
        self._new.argtypes = self._sha256.argtypes = ()
        self.free.restype, self.free.argtypes = None, (address,)
        self._begin.restype, self._begin.argtypes = number, (address, address, address)
        self._update.restype = number
        self._update.argtypes = (address, ctypes.c_char_p, ctypes.c_size_t)
        functions = [ctypes.cast(getattr(found, name), address) for name in _NAMES]
        self.functions = (address * len(_NAMES))(*functions)  # as names.cpp has them

    def begun(self, block: bytes) -> int:
        """The address of a SHA-256 context with `block` hashed. Callers free it. Raises OSError."""
        context: int | None = self._new()
        if context is None:
            raise OSError("OpenSSL has no memory")
        if (
            self._begin(context, self._sha256(), None) != 1
            or self._update(context, block, len(block)) != 1
        ):
            self.free(context)
            raise OSError("OpenSSL makes no SHA-256")
        return context


@functools.cache
def _openssl() -> _OpenSsl | None:
    """The functions, looked up once in a process; None if one is missing."""
    module = importlib.util.find_spec("_hashlib")
    if module is None or not module.has_location:
        return None
    try:
        # The module is loaded already, and with it the library that has the symbols.
        return _OpenSsl(ctypes.CDLL(module.origin))
    except (OSError, AttributeError) as error:
        log.info("%s leads to no functions of OpenSSL (%s)", module.origin, error)
        return None


class KeyHasher:
    """Makes HMAC-SHA256 with a key of up to 64 bytes. Thread-safe. Raises OSError."""

    def __init__(self, openssl: _OpenSsl, call: Callable[..., int], key: bytes) -> None:
        if len(key) > _BLOCK_BYTES:
            raise ValueError(f"expected a key of up to {_BLOCK_BYTES} bytes, got {len(key)}")
        self._call = call
        self._functions = openssl.functions
        padded = key.ljust(_BLOCK_BYTES, b"\0")
        for name, byte in (("_inner", 0x36), ("_outer", 0x5C)):
            context = openssl.begun(bytes(each ^ byte for each in padded))
            weakref.finalize(self, openssl.free, context)
            setattr(self, name, context)
        if self.hmac_keys(padded, 1) != hmac.digest(key, padded, "sha256") + padded[_DIGEST_BYTES:]:
            raise OSError("OpenSSL makes another HMAC than hashlib")

    _inner: int
    _outer: int

    def hmac_keys(self, keys: bytes, count: int) -> bytes:
        """`count` joined keys of equal length, each with its first 32 bytes turned to its HMAC."""
        size = len(keys) // max(1, count)
        if size * count != len(keys) or (count and size < _DIGEST_BYTES):
            raise ValueError(f"{len(keys)} bytes are no {count} keys")
        hashed = ctypes.create_string_buffer(len(keys))
        if self._call(self._functions, self._inner, self._outer, keys, count, size, hashed):
            raise OSError("OpenSSL made no HMAC")
        return hashed.raw


def key_hasher(key: bytes) -> KeyHasher | None:
    """Return a `KeyHasher` for this key, or None if hashlib must be used instead."""
    compiled, openssl = library(), _openssl()
    if compiled is None or openssl is None:
        return None
    try:
        return KeyHasher(openssl, compiled.names, key)
    except OSError as error:
        log.warning("keys of blocks are hashed by hashlib: %s", error)
        return None
