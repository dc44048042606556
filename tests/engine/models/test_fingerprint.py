# SPDX-License-Identifier: Apache-2.0
"""The fingerprint: equal for equal numbers, wherever they lie, and changed by any that differ."""

from __future__ import annotations

import json
import shutil

import pytest

from stratakv.engine.config.engine_options import EMBEDDED_MODEL
from stratakv.engine.models.checkpoint.fingerprint import ModelFiles, fingerprint
from stratakv.tiers.settings.values import ConfigError


def test_it_is_the_same_for_a_copy_elsewhere(directory, tmp_path_factory):
    directory.write_sharded()
    copy = tmp_path_factory.mktemp("copies") / "model"
    shutil.copytree(directory.path, copy)
    first = fingerprint(directory.path)
    assert fingerprint(copy) == first
    assert len(first) == 64 and int(first, 16) >= 0


def test_it_is_a_golden_value(directory):
    """Blocks on disk are named with it, so it must not drift. The file is made by hand, because a
    header's padding is the business of whoever writes it."""
    header = b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    content = len(header).to_bytes(8, "little") + header + bytes(range(8))
    (directory.path / "model.safetensors").write_bytes(content)
    golden = "ca9b56f4aa0308cc320526ad65c9bd265cf92b0b5ffd7256cb51d4d081138ed1"
    assert fingerprint(directory.path) == golden


def test_the_embedded_model_keeps_its_name():
    """Its blocks lie on people's disks, and a field added to the specification renames none."""
    golden = "6c240b6681d53ab3f198c3fc840898befff8080e970a40a6101f963cc6ba7b1c"
    assert fingerprint(EMBEDDED_MODEL) == golden


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 20000.0},
        {"rms_norm_eps": 1e-6},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
)
def test_it_changes_with_configuration_that_changes_numbers(change, directory):
    directory.write_single()
    before = fingerprint(directory.path)
    directory.write_config(**change)
    assert fingerprint(directory.path) != before


@pytest.mark.parametrize("change", [{"eos_token_id": [3, 4]}, {"use_cache": False}, {"new": 1}])
def test_it_changes_with_every_key_of_the_configuration(change, directory):
    """A later version may compute by a key that this one passes over."""
    directory.write_single()
    before = fingerprint(directory.path)
    directory.write_config(**change)
    assert fingerprint(directory.path) != before


def test_it_keeps_still_where_a_file_changes_that_decides_no_block(directory):
    directory.write_single()
    before = fingerprint(directory.path)
    recommended = {"temperature": 0.5, "eos_token_id": [3, 4]}
    (directory.path / "generation_config.json").write_text(json.dumps(recommended))
    (directory.path / "tokenizer.json").write_text("{}")
    assert fingerprint(directory.path) == before


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_every_byte_of_a_small_model_counts(name, directory):
    directory.write_single()
    before = fingerprint(directory.path)
    directory.tensors[name][-1, -1] += 1e-3
    directory.write_single()
    assert fingerprint(directory.path) != before


def test_names_of_weight_files_count(directory):
    """Of a tensor that two files hold, the last file's is read."""
    directory.write_sharded()
    first, second = sorted(directory.path.glob("*.safetensors"))
    index = json.loads((directory.path / "model.safetensors.index.json").read_text())
    before = fingerprint(directory.path)
    other = {first.name: second.name, second.name: first.name}
    directory.write_index({name: other[file] for name, file in index["weight_map"].items()})
    first.rename(directory.path / "kept")
    second.rename(first)
    (directory.path / "kept").rename(second)
    assert fingerprint(directory.path) != before


def test_a_change_between_hashing_and_loading_is_refused(directory):
    directory.write_single()
    files = ModelFiles.read(directory.path)
    files.check_unchanged()
    directory.write_single()
    with pytest.raises(ConfigError, match=r"model\.safetensors was changed while it was read"):
        files.check_unchanged()


def test_a_file_that_is_no_safetensors_is_refused(directory):
    for content in (b"", b"\xff" * 64):
        (directory.path / "model.safetensors").write_bytes(content)
        with pytest.raises(ConfigError, match="is not a whole safetensors file"):
            fingerprint(directory.path)
