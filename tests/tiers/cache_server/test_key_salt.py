# SPDX-License-Identifier: Apache-2.0
"""Stored keys are exactly HMAC-SHA256, the same in every process, and of one tenant each."""

from __future__ import annotations

import hashlib
import hmac
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratakv.tiers.block import pack_key
from stratakv.tiers.cache_server import key_salt
from stratakv.tiers.cache_server.key_salt import KeySalt
from stratakv.tiers.cache_server.secret_file import SECRET_BYTES
from stratakv.tiers.contract import make_keys
from stratakv.tiers.native import native_library as native
from stratakv.tiers.native import openssl

SECRET = bytes(range(32))
# Written down once: who changes it makes every store on a disk unreadable.
KEY = pack_key(bytes(range(100, 132)), 1, 2, 4)
STORED = "df58cc21564b4f43a6edd6d9a833f850ce2ccde9c733945b160af0310ff7757b0100020004000000"

_CODE = """
import sys
from stratakv.tiers.cache_server.key_salt import KeySalt
print(KeySalt(bytes(range(32)), "ann").salt_keys([bytes.fromhex(sys.argv[1])])[0].hex())
"""


def test_a_stored_key_is_the_one_written_down() -> None:
    (stored,) = KeySalt(SECRET, "ann").salt_keys([KEY])
    assert stored.hex() == STORED


def test_it_is_the_same_in_every_process() -> None:
    for seed in ("0", "1"):
        output = subprocess.run(
            [sys.executable, "-c", _CODE, KEY.hex()],
            env={"PYTHONHASHSEED": seed},
            cwd="/",
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert output.strip() == STORED


@given(
    st.binary(min_size=32, max_size=100), st.text(max_size=50), st.binary(min_size=40, max_size=40)
)
def test_it_is_hmac_sha256(secret: bytes, tenant: str, key: bytes) -> None:
    """Whoever makes it: OpenSSL's functions by themselves, where they are found, and hashlib."""
    tenant_key = hmac.new(secret, tenant.encode(), hashlib.sha256).digest()
    expected = hmac.new(tenant_key, key, hashlib.sha256).digest() + key[32:]
    assert KeySalt(secret, tenant).salt_keys([key]) == [expected]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_salt, "key_hasher", lambda _key: None)
        assert KeySalt(secret, tenant).salt_keys([key]) == [expected]


def test_openssl_is_found_here() -> None:
    """Where hashlib is linked to it, as it is in all that CI runs."""
    if not native.has_digests() or not getattr(sys.modules["_hashlib"], "__file__", None):
        pytest.skip("needs the compiled library, and OpenSSL outside of Python")
    hasher = openssl.key_hasher(SECRET)
    assert hasher is not None
    keys = [pack_key(bytes([number]) * 32, number) for number in range(100)]
    made = [hmac.digest(SECRET, key, "sha256") + key[32:] for key in keys]
    assert hasher.hmac_keys(b"".join(keys), 100) == b"".join(made)
    assert hasher.hmac_keys(b"", 0) == b""
    for damaged, count in ((bytes(41), 2), (bytes(31), 1), (b"", 1), (bytes(40), 0)):
        with pytest.raises(ValueError, match="are no"):
            hasher.hmac_keys(damaged, count)


@pytest.mark.parametrize("fault", ["another digest", "an error", "no memory"])
def test_where_openssl_fails_hashlib_makes_the_keys(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found, here = native.library(), openssl._openssl()
    if found is None or here is None:
        pytest.skip("needs the compiled library, and OpenSSL outside of Python")
    made = found.names

    def names(*arguments: Any) -> int:
        *_, written = arguments
        status: int = made(*arguments)
        written[0] = bytes([written.raw[0] ^ (fault == "another digest")])
        return 1 if fault == "an error" else status

    monkeypatch.setattr(found, "names", names)
    if fault == "no memory":
        monkeypatch.setattr(here, "_new", lambda: None)
    (stored,) = KeySalt(SECRET, "ann").salt_keys([KEY])
    assert stored.hex() == STORED
    assert "keys of blocks are hashed by hashlib" in caplog.text


def test_secret_tenant_and_every_bit_of_a_key_count() -> None:
    salts = [
        KeySalt(secret, tenant)
        for secret in (SECRET, bytes(32), SECRET + b"\1")
        for tenant in ("ann", "eve", "", "ann ")
    ]
    keys = [KEY]
    for bit in range(8 * len(KEY)):
        changed = bytearray(KEY)
        changed[bit // 8] ^= 1 << bit % 8
        keys.append(bytes(changed))
    digests = [stored[:32] for salt in salts for stored in salt.salt_keys(keys)]
    assert len(set(digests)) == len(salts) * len(keys)


def test_keys_stand_in_their_order_and_on_their_own() -> None:
    keys = make_keys(10)
    salt = KeySalt(SECRET, "ann")
    assert salt.salt_keys(keys) == [salt.salt_keys([key])[0] for key in keys]
    assert salt.salt_keys([]) == []
    assert [stored[32:] for stored in salt.salt_keys(keys)] == [key[32:] for key in keys]


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="a server secret has 32 bytes or more, not 31"):
        KeySalt(bytes(SECRET_BYTES - 1), "ann")
