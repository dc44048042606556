# SPDX-License-Identifier: Apache-2.0
"""What a core tells of its blocks: two cores find each other's exactly if they tell the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratakv.engine.router.node_identity import find_difference
from stratakv.tiers.block import tenant_salt
from stratakv.tiers.mac_key import MacKey
from stratakv.tiers.settings.values import ConfigError

from ...tiers.cache_server.rig import ServerProcess, server_process
from .conftest import MakeCore, prompt_of, request, run

KEYS = {name: bytes([number]) * 32 for number, name in enumerate(("KEY A", "KEY B"), start=1)}
SECRETS = ("a secret of tenants", "another secret of tenants")
OPTIONS: dict[str, dict[str, str]] = {
    "nothing": {},
    "dtype": {"dtype": "float32"},
    "block size": {"block_size": "16"},
    "revision": {"revision": "mended by hand"},
    "hash": {"block_hash": "sha256_cbor"},
    "hash and revision": {"block_hash": "sha256_cbor", "revision": "mended by hand"},
    "secret": {"tenant_secret": SECRETS[0]},
    "other secret": {"tenant_secret": SECRETS[1]},
    "tag key": {"kv_offload_remote_tag_key_file": "KEY A"},
    "other tag key": {"kv_offload_remote_tag_key_file": "KEY B"},
    # What does not have to agree.
    "pool and role": {"num_blocks": "90", "max_num_seqs": "4", "max_model_len": "200"},
}
TRIES = 10
OF_LAYOUT = ("dtype", "block size")  # the cache server has one layout, and lets no other in
PAIRS = [
    *[("nothing", name) for name in OPTIONS if name != "nothing"],
    *[(name, name) for name in ("nothing", "revision", "hash", "secret", "tag key")],
    ("hash", "hash and revision"),
    ("secret", "other secret"),
    ("tag key", "other tag key"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process("--cpu-bytes", "32MiB") as server:
        yield server


def _options(name: str, port: int, folder: Path) -> dict[str, object]:
    options: dict[str, object] = {**OPTIONS[name]}
    if key := options.get("kv_offload_remote_tag_key_file"):
        path = folder / str(key)
        path.touch(mode=0o600)
        path.write_bytes(KEYS[str(key)])
        options["kv_offload_remote_tag_key_file"] = str(path)
    return options | {
        "kv_offload": f"cpu,grpc://127.0.0.1:{port}",
        "kv_offload_cpu_bytes": "1MiB",
        "kv_offload_load": "always",
        "require_tiers": name not in OF_LAYOUT,
    }


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_blocks_are_found_where_identities_agree(
    make_core: MakeCore, server: ServerProcess, tmp_path: Path, one: str, other: str
) -> None:
    agree = one == other or other == "pool and role"
    first = make_core(role="prefill", **_options(one, server.port, tmp_path))
    second = make_core(role="decode", **_options(other, server.port, tmp_path))
    # A look-up may end before its answer comes, on a busy machine: where blocks are to be found,
    # another prompt is tried.
    for attempt in range(TRIES if agree else 1):
        prompt = prompt_of(70, seed=PAIRS.index((one, other)) + attempt * len(PAIRS))
        run(first, request(f"p{attempt}", prompt, max_tokens=1))
        name = f"d{attempt}"
        found = run(second, request(name, prompt))[name].cached_tokens_by_tier
        assert found is not None
        num_found = found.get("remote", 0)
        if num_found:
            break
    told = [core.ready().identity for core in (first, second)]
    difference = find_difference(*told, with_blocks=True)
    assert (difference is None) == (num_found > 0) == agree
    assert [each["role"] for each in told] == ["prefill", "decode"]
    assert all(each["tiers"] == "cpu,remote" for each in told)


def test_of_secrets_eight_bits_are_told(
    make_core: MakeCore, server: ServerProcess, tmp_path: Path
) -> None:
    """Those of the salt and of the key's number, and nothing longer that is made of a secret."""
    for secret in SECRETS:
        options = _options("tag key", server.port, tmp_path) | {"tenant_secret": secret}
        told = make_core(**options).ready().identity
        salt = tenant_salt(secret.encode(), "", "")
        assert salt is not None and told["tenant_secret"] == salt.hex()[:2]
        assert told["tag_key"] == MacKey(KEYS["KEY A"]).id.hex()[:2]
        rest = json.dumps({k: v for k, v in told.items() if k not in ("tenant_secret", "tag_key")})
        plain = make_core().ready().identity
        assert plain["tenant_secret"] == plain["tag_key"] == "none"
        assert secret not in rest and KEYS["KEY A"].hex() not in rest
        for digest in (salt, hashlib.sha256(secret.encode()).digest()):
            assert digest.hex()[:16] not in rest


def test_a_core_without_prefix_caching_has_blocks_for_nobody(make_core: MakeCore) -> None:
    told = make_core(enable_prefix_caching=False).ready().identity
    difference = find_difference(told, make_core().ready().identity, with_blocks=True)
    assert difference is not None and difference[:3] == ("block_hash", "none", "sha256")


def test_a_tag_key_that_is_gone_after_the_tiers_were_opened(
    make_core: MakeCore,
    server: ServerProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = _options("tag key", server.port, tmp_path)

    def gone(path: Path) -> bytes:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(Path, "read_bytes", gone)
    with pytest.raises(ConfigError, match="was exchanged while the engine was starting"):
        make_core(**options)
