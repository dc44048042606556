# SPDX-License-Identifier: Apache-2.0
"""A whole engine over an SSD tier that somebody else can write: forged blocks become no answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stratakv.tiers.block import ALIGNMENT
from stratakv.tiers.mac_key import read_mac_key
from stratakv.tiers.record import HEADER_BYTES, decode_header, encode_header
from stratakv.tiers.settings.values import ConfigError
from stratakv.tiers.ssd.folder.identity_note import read_note
from stratakv.tiers.ssd.folder.reconcile import record_bytes_of
from stratakv.tiers.ssd.store_check import check_store
from stratakv.tiers.tag import Tagger

from .conftest import MakeCore, Reference, prompt_of, request, run

Tiers = dict[str, str]
PROMPT = prompt_of(100)
FLAG = "kv_offload_ssd_mac_key_file"


@pytest.fixture
def sealed_tiers(make_core: MakeCore, small_tiers: Tiers, tmp_path: Path) -> Tiers:
    """Tiers with a key, whose ssd holds the blocks of PROMPT, and whose cpu tier is empty."""
    (tmp_path / "mac.key").write_bytes(bytes(range(32)))
    (tmp_path / "mac.key").chmod(0o600)
    tiers = small_tiers | {FLAG: str(tmp_path / "mac.key"), "kv_offload_load": "always"}
    _answer(make_core, tiers)
    return tiers


def _answer(make_core: MakeCore, tiers: Tiers) -> tuple[list[int], int]:
    """What an engine answers, and how many tokens of the prompt it got from the disk."""
    core = make_core(**tiers)
    result = run(core, request("r", PROMPT))["r"]
    core.shutdown(10.0)
    return result.new_token_ids, result.cached_tokens_by_tier.get("ssd", 0)


def _forge_all(path: Path) -> int:
    """Zero every payload, and make every header fit as far as anybody can without the key."""
    note = read_note(path)
    assert note is not None
    size, forged = record_bytes_of(note.page_bytes), 0
    with (path / "blocks").open("r+b") as file:
        for slot in range(path.joinpath("blocks").stat().st_size // size):
            file.seek(slot * size)
            header = decode_header(file.read(HEADER_BYTES))
            if header is not None:
                payload = bytes(header.payload_bytes)
                tagger = Tagger(header.layout_id, header.payload_bytes)
                header = replace(header, tag=tagger.prove(header.key, payload).tag)
                raw = encode_header(header, payload)
                file.seek(slot * size)
                file.write(raw + bytes(ALIGNMENT - HEADER_BYTES) + payload)
                forged += 1
    return forged


def test_blocks_come_back_under_their_key(
    make_core: MakeCore, sealed_tiers: Tiers, greedy_reference: Reference
) -> None:
    assert _answer(make_core, sealed_tiers) == (greedy_reference(PROMPT, 6), 96)


def test_forged_blocks_are_computed_instead(
    make_core: MakeCore, sealed_tiers: Tiers, greedy_reference: Reference
) -> None:
    path, wanted = Path(sealed_tiers["kv_offload_ssd_path"]), greedy_reference(PROMPT, 6)
    forged = _forge_all(path)
    assert forged >= 12
    key = read_mac_key(Path(sealed_tiers[FLAG]), "the key")
    assert check_store(path, mac_key=key).counts == {"checksum": forged}
    assert _answer(make_core, sealed_tiers) == (wanted, 0)
    # Without a key the same forgery is believed, and changes the answer.
    plain = {name: value for name, value in sealed_tiers.items() if name != FLAG}
    plain["kv_offload_ssd_path"] += "-plain"
    assert _answer(make_core, plain) == (wanted, 0)
    assert _forge_all(Path(plain["kv_offload_ssd_path"])) >= 12
    tokens, loaded = _answer(make_core, plain)
    assert loaded == 96 and tokens != wanted


def test_another_key_or_none_is_refused_at_the_start(
    make_core: MakeCore, sealed_tiers: Tiers
) -> None:
    key = Path(sealed_tiers[FLAG])
    key.write_bytes(bytes(32))
    with pytest.raises(ConfigError, match=r"made for the MAC key \w{16}, and this engine has the"):
        make_core(**sealed_tiers)
    del sealed_tiers[FLAG]
    with pytest.raises(ConfigError, match="and this engine has no MAC key; give the key file"):
        make_core(**sealed_tiers)


def test_a_key_file_that_is_none_is_refused_at_the_start(
    make_core: MakeCore, sealed_tiers: Tiers
) -> None:
    inside = Path(sealed_tiers["kv_offload_ssd_path"], "key")
    for path, cure in ((Path("/no/such"), "head -c 32 /dev/urandom"), (inside, "elsewhere")):
        with pytest.raises(
            ConfigError, match=f"--kv-offload-ssd-mac-key-file names {path}.*{cure}"
        ):
            make_core(**sealed_tiers | {FLAG: str(path)})
