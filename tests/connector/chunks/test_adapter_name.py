# SPDX-License-Identifier: Apache-2.0
"""AdapterName: the fingerprint has the content of an adapter, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stratakv.connector.chunks.adapter_name import name_adapter
from stratakv.tiers.identity.digest_cache import DigestCache
from stratakv.tiers.settings.values import ConfigError

from ..vllm.adapter_files import MODULES, make_adapter

NO_CACHE = DigestCache(None)


@pytest.mark.parametrize(
    ("seed", "fields", "is_same"),
    [
        (1, {}, True),
        (1, {"target_modules": list(reversed(MODULES))}, True),
        (1, {"base_model_name_or_path": "/elsewhere", "inference_mode": True}, True),
        (2, {}, False),
        (1, {"lora_alpha": 16}, False),
        (1, {"use_rslora": True}, False),
        (1, {"rank_pattern": {"q_proj": 4}}, False),
        (1, {"a_field_of_next_year": 1}, False),
    ],
)
def test_content_only(tmp_path: Path, seed: int, fields: dict[str, Any], is_same: bool) -> None:
    first = name_adapter(str(make_adapter(tmp_path / "first", 1)), NO_CACHE)
    other = name_adapter(str(make_adapter(tmp_path / "other", seed, **fields)), NO_CACHE)
    assert (first.fingerprint == other.fingerprint) == is_same


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_one_changed_byte_and_missing_files(tmp_path: Path, name: str) -> None:
    folder = make_adapter(tmp_path / "it", 1)
    before = name_adapter(str(folder), NO_CACHE)
    assert before.is_unchanged
    content = bytearray((folder / name).read_bytes())
    place = content.index(b'"r": 8') + 5 if name.endswith("json") else len(content) - 1
    content[place] ^= 1
    (folder / name).write_bytes(content)
    assert not before.is_unchanged
    assert name_adapter(str(folder), NO_CACHE).fingerprint != before.fingerprint
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=r"cannot be read|holds no weights"):
        name_adapter(str(folder), NO_CACHE)
    with pytest.raises(ConfigError, match="give a folder on this machine"):
        name_adapter("org/adapter-on-the-hub", NO_CACHE)
