# SPDX-License-Identifier: Apache-2.0
"""The seal of a record and the key that it comes from: what they are, and which files are a key."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.mac_key import LEAST_BYTES, MOST_BYTES, MacKey, read_mac_key
from stratakv.tiers.record import (
    HEADER_BYTES,
    SEAL_BYTES,
    Defect,
    PlainHeaders,
    RecordHeader,
    Seal,
    check_fields,
    check_record,
    encode_header,
)
from stratakv.tiers.tag import payload_digest

from ..open_files import open_paths

KEY = MacKey(bytes(range(32)))
FLAG = "--some-key-file"
PLAIN = RecordHeader(bytes(range(40)), b"layout..layout..", 4, 77)
SEALED = replace(PLAIN, seal=KEY.seal(b"model"))


def test_the_seal_is_what_the_documents_say() -> None:
    header = encode_header(SEALED, b"abcd")
    of_store = hmac.new(bytes(range(32)), b"store\0model", hashlib.sha256).digest()
    wanted = hmac.new(of_store, header[:112] + b"abcd", hashlib.sha256).digest()[:16]
    assert header[112:] == wanted and len(wanted) == SEAL_BYTES
    assert header[:112] == encode_header(PLAIN, b"abcd")[:112], "the layout stays"
    assert KEY.id == hmac.new(bytes(range(32)), b"id", hashlib.sha256).digest()[:8]
    # The vectors of docs/abi.md.
    assert KEY.id.hex() == "8adc89f941958303"
    assert header[112:].hex() == "64a1799b4446a16e9e6a37d6253cdca8"


@pytest.mark.parametrize("seal", [None, SEALED.seal])
def test_headers_that_share_what_is_the_same(rng: random.Random, seal: Seal | None) -> None:
    """They are those of `encode_header`, bit for bit."""
    payload = rng.randbytes(5000)
    digest, layout_id = payload_digest(payload), rng.randbytes(16)
    headers = PlainHeaders(layout_id, len(payload), seal)
    for generation in (0, 1, 2**32, 2**64 - 1):
        key, tag = rng.randbytes(40), rng.randbytes(16)
        header = RecordHeader(key, layout_id, len(payload), generation, tag=tag, seal=seal)
        made = headers.encode_headers(key, generation, tag, payload, digest)
        assert made == encode_header(header, payload, digest)
        assert check_record(made, payload, header) is None
    for key, tag in ((rng.randbytes(39), bytes(16)), (rng.randbytes(40), bytes(17))):
        with pytest.raises(ValueError, match="a 40-byte key"):
            headers.encode_headers(key, 1, tag, payload, digest)


def test_a_sealed_record_is_accepted_under_its_key_only() -> None:
    sealed, plain = encode_header(SEALED, b"abcd"), encode_header(PLAIN, b"abcd")
    assert check_record(sealed, b"abcd", SEALED) is None
    assert check_record(plain, b"abcd", PLAIN) is None
    assert check_record(plain, b"abcd", SEALED) is Defect.CHECKSUM
    assert check_record(sealed, b"abcd", PLAIN) is Defect.CHECKSUM
    others = (MacKey(bytes(32)).seal(b"model"), KEY.seal(b""), KEY.seal(b"another model"))
    for other in others:
        assert check_record(sealed, b"abcd", replace(SEALED, seal=other)) is Defect.CHECKSUM
    assert check_fields(plain, b"abcd", SEALED) is None, "which does not look at payloads"


def test_any_flipped_bit_of_a_sealed_record_is_noticed(rng: random.Random) -> None:
    payload = rng.randbytes(500)
    expected = replace(SEALED, payload_bytes=500)
    record = encode_header(expected, payload) + payload
    assert check_record(record[:HEADER_BYTES], record[HEADER_BYTES:], expected) is None
    for bit in range(8 * HEADER_BYTES, 8 * len(record), 7):
        flipped = bytearray(record)
        flipped[bit // 8] ^= 1 << bit % 8
        found = check_record(flipped[:HEADER_BYTES], flipped[HEADER_BYTES:], expected)
        assert found is Defect.CHECKSUM
    for bit in range(8 * HEADER_BYTES):
        flipped = bytearray(record)
        flipped[bit // 8] ^= 1 << bit % 8
        assert check_record(flipped[:HEADER_BYTES], payload, expected) is not None


def test_one_seal_serves_many_threads(rng: random.Random) -> None:
    seal = Seal(b"k" * 32)
    payloads = [memoryview(rng.randbytes(300_000)) for _ in range(4)]
    wanted = [hmac.digest(b"k" * 32, b"h" + bytes(p), "sha256")[:16] for p in payloads]
    found: list[list[bytes]] = [[] for _ in payloads]

    def work(index: int) -> None:
        found[index] = [seal.digest(b"h", payloads[index]) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[each] * 20 for each in wanted]


def test_nothing_that_is_printed_holds_the_key() -> None:
    key = MacKey(b"a secret of thirty-two bytes....")
    shown = repr(key) + repr(replace(PLAIN, seal=key.seal(b""))) + repr(vars(key.seal(b"")))
    assert "secret" not in shown


def _file(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("size", [LEAST_BYTES, 100, MOST_BYTES])
def test_every_byte_of_the_file_is_the_key(
    tmp_path: Path, size: int, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    content = rng.randbytes(size - 1) + b"\n"
    key = read_mac_key(_file(tmp_path / "key", content), FLAG)
    assert key.id == MacKey(content).id != MacKey(content[:-1] + b" ").id
    assert caplog.text == ""


@pytest.mark.parametrize("size", [0, LEAST_BYTES - 1, MOST_BYTES + 1])
def test_a_file_of_another_size_is_refused(tmp_path: Path, size: int) -> None:
    path = _file(tmp_path / "key", bytes(size))
    told = f"more than {MOST_BYTES}" if size > MOST_BYTES else str(size)
    message = f"{FLAG} names {path}, which has {told} bytes where 32 to 4096 .*head -c 32 /dev/ur"
    with pytest.raises(TierConfigError, match=message):
        read_mac_key(path, FLAG)
    with pytest.raises(TierConfigError, match="has 32 to 4096 bytes"):
        MacKey(bytes(size))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TierConfigError, match=r"No such file.*make one with"):
        read_mac_key(tmp_path / "none", FLAG)
    os.mkfifo(tmp_path / "pipe")  # nobody ever writes to it
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(TierConfigError, match="is no regular file"):
            read_mac_key(path, FLAG)
    with pytest.raises(TierConfigError, match="is no regular file"):
        read_mac_key(tmp_path, FLAG)
    assert str(tmp_path) not in open_paths()


def test_a_file_that_others_can_use_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    path = _file(tmp_path / "key", bytes(32), 0o644)
    assert read_mac_key(path, FLAG).id == MacKey(bytes(32)).id
    assert caplog.text.count("users other than its owner may use (mode 0644)") == 1
    assert f"chmod 600 {path}" in caplog.text


def test_a_key_in_the_directory_that_it_guards_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "ssd"
    store.mkdir()
    inside, outside = _file(store / "key", bytes(32)), _file(tmp_path / "key", bytes(32))
    (tmp_path / "link").symlink_to(inside)
    for path in (inside, tmp_path / "link"):
        with pytest.raises(TierConfigError, match="could exchange it; keep it elsewhere"):
            read_mac_key(path, FLAG, store)
    (store / "link").symlink_to(outside)
    with pytest.raises(TierConfigError, match="keep it elsewhere"):
        read_mac_key(store / "link", FLAG, store)
    assert read_mac_key(outside, FLAG, store).id == MacKey(bytes(32)).id
