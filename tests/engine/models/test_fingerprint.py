# SPDX-License-Identifier: Apache-2.0
"""The fingerprint: equal for equal numbers, wherever they lie, and changed by any that differ."""

from __future__ import annotations

import itertools
import shutil

import pytest

from stratakv.engine.models.checkpoint import fingerprint as module
from stratakv.engine.models.checkpoint.fingerprint import fingerprint
from stratakv.engine.options import EMBEDDED_MODEL
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
    golden = "37bfe7688b3600aa55818e911f9a3a418a7e229a912d6c11f6da0002e684ae5a"
    assert fingerprint(directory.path) == golden


def test_the_embedded_model_keeps_its_name():
    """Its blocks lie on people's disks, and a field added to the specification renames none."""
    golden = "74d682d8fdb30ba1e4a76a31815a746a15b4d879c57a7c2c33e4116b68fd2d4b"
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


def test_it_keeps_still_where_only_the_ends_of_texts_change(directory):
    directory.write_single()
    before = fingerprint(directory.path)
    directory.write_config(eos_token_id=[3, 4], bos_token_id=7, use_cache=False)
    assert fingerprint(directory.path) == before


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_every_byte_of_a_small_model_counts(name, directory):
    directory.write_single()
    before = fingerprint(directory.path)
    directory.tensors[name][-1, -1] += 1e-3
    directory.write_single()
    assert fingerprint(directory.path) != before


def test_large_files_are_sampled_evenly_to_the_last_byte(monkeypatch):
    samples = module._samples(1000, 10**9)
    assert len(samples) == module.SAMPLES
    assert samples[0] == (1000, 4096)
    assert sum(samples[-1]) == 10**9
    steps = {b[0] - a[0] for a, b in itertools.pairwise(samples)}
    assert max(steps) - min(steps) <= 1
    assert module._samples(10, 10 + 64 * 4096) == [(10, 64 * 4096)]
    assert module._samples(10, 10) == [(10, 0)]


def test_a_file_that_is_no_safetensors_is_refused(directory):
    for content in (b"", b"\xff" * 64):
        (directory.path / "model.safetensors").write_bytes(content)
        with pytest.raises(ConfigError, match="is not a whole safetensors file"):
            fingerprint(directory.path)
