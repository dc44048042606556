# SPDX-License-Identifier: Apache-2.0
"""The name that engines of others give their models' blocks here: every byte of every file, or a
warning that asks for a revision."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stratakv.connector.chunks.model_name import (
    HostModel,
    name_model,
    settings_text,
    warn_of_unseen,
)
from stratakv.connector.lmcache import model_names
from stratakv.connector.lmcache.model_names import ModelNames
from stratakv.connector.sglang.host_model import names_of as names_of_sglang
from stratakv.connector.vllm.host_model import names_of, names_of_tier
from stratakv.tiers.identity.digest_cache import DigestCache
from stratakv.tiers.settings.values import ConfigError

from .vllm.adapter_files import make_adapter

NOTHING = DigestCache(None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"rope_theta": 1}')
    (model / "model-1.safetensors").write_bytes(bytes(10_000))
    (model / "model-2.safetensors").write_bytes(bytes(10_000))
    (model / "tokenizer.json").write_text("{}")
    return model


def name_of(path: Path | str, **other: Any) -> str:
    name = name_model(HostModel(str(path), **other), cache=NOTHING)
    assert not name.unseen
    return name.text


def test_a_copy_has_the_same_name(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("other words")
    (tmp_path / "copy" / ".lock").touch()
    assert name_of(tmp_path / "copy") == name_of(folder)
    assert name_of(folder).startswith("sha256:") and len(name_of(folder)) == 71


@pytest.mark.regression
def test_w01_any_byte_of_any_file_changes_the_name(folder: Path) -> None:
    names = {name_of(folder)}
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        for place in {0, 5000 % len(content), len(content) - 1}:
            file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            before = len(names)
            names.add(name_of(folder))
            assert len(names) == before + 1, (file, place)
        file.write_bytes(content)
    file.rename(folder / "other.json")
    names.add(name_of(folder))
    (folder / "more.bin").touch()
    names.add(name_of(folder))
    assert len(names) == 14


def test_models_of_the_hub_are_looked_up_in_its_cache(folder: Path, tmp_path: Path) -> None:
    commit = "a" * 40
    hub = tmp_path / "hub" / "models--org--name"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text(commit)
    (hub / "blobs").mkdir()
    shutil.copytree(folder, hub / "snapshots" / commit)
    for file in (hub / "snapshots" / commit).iterdir():  # links, as the Hub's library makes them
        file.rename(hub / "blobs" / file.name)
        file.symlink_to(hub / "blobs" / file.name)
    place = str(tmp_path / "hub")
    assert name_of("org/name", cache_folder=place) == name_of(folder)
    assert name_of("org/name:Q4_K_M", cache_folder=place) == name_of(folder)
    assert name_of("org/name", revision=commit, cache_folder=place) == name_of(folder)
    other = name_model(HostModel("org/name", "v2", place), cache=NOTHING)
    assert (other.text, other.unseen) == ("org/name@v2", "its files are not here")


def test_a_single_file_is_a_model(folder: Path) -> None:
    (folder / "m.gguf").write_bytes(b"GGUF")
    assert name_of(folder / "m.gguf") != name_of(folder)


def test_what_cannot_be_read_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read .Input/output error"):
        name_of(folder)


@pytest.mark.parametrize(
    ("name", "why"),
    [("s3://bucket/model", "not here"), ("org/none", "not here"), ("\0", "not here")],
)
def test_what_is_not_seen_asks_for_a_revision(
    name: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = HostModel(name)
    found = name_model(model, cache=NOTHING)
    assert found.text == name and why in found.unseen
    warn_of_unseen("vLLM", model, found, "of May")
    assert not caplog.records
    warn_of_unseen("vLLM", model, found, None)
    [record] = caplog.records
    assert record.levelno == logging.WARNING and "Set `revision`" in record.message


def test_a_folder_without_weights_is_not_a_name(folder: Path) -> None:
    """As one that a host fills from an object store: configuration alone would name all weights."""
    for file in folder.glob("*.safetensors"):
        file.unlink()
    found = name_model(HostModel(str(folder)), cache=NOTHING)
    assert found.text == str(folder) and "holds no weights" in found.unseen


def test_settings_are_the_same_text_in_every_process() -> None:
    one = settings_text({"a": {1, 2}, "b": SimpleNamespace, "c": None, "d": b"x", "e": object()})
    assert one == settings_text(
        {"e": object(), "c": None, "d": b"x", "b": SimpleNamespace, "a": {2, 1}}
    )
    assert one != settings_text({"a": {1, 2}})


# Below vLLM


def config(model: Path | str, **changes: Any) -> Any:
    """What StrataConnector sees of vLLM."""
    hf_config = SimpleNamespace(to_dict=lambda: {"rope_theta": 1, "_name_or_path": str(model)})
    own: dict[str, Any] = {
        "model": str(model), "dtype": "torch.bfloat16", "hf_config": hf_config, "revision": None,
        "quantization": None, "seed": 0,
    }  # fmt: skip
    load = {"load_format": "auto", "download_dir": None} | changes.pop("load", {})
    draft = changes.pop("draft", None)
    return SimpleNamespace(
        model_config=SimpleNamespace(**own | changes),
        load_config=SimpleNamespace(**load),
        speculative_config=draft and SimpleNamespace(draft_model_config=draft),
    )


@pytest.mark.regression
def test_y01_what_vllm_was_told_beside_the_files_counts(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "draft")
    (tmp_path / "draft" / "model-2.safetensors").write_bytes(b"other")
    overridden = SimpleNamespace(to_dict=lambda: {"rope_theta": 2})
    seen = [
        names_of(config(folder, **changes), None)
        for changes in (
            {},
            {"dtype": "torch.float16"},
            {"hf_config": overridden},
            {"quantization": "fp8"},
            {"load": {"load_format": "dummy"}},
            {"load": {"load_format": "dummy"}, "seed": 1},
            {"draft": SimpleNamespace(model=str(tmp_path / "draft"))},
        )
    ]
    assert len(set(seen)) == len(seen)
    assert seen[0] == names_of(config(folder, seed=1), None), "no dummy weights, no seed"
    itself = SimpleNamespace(model=str(folder))
    assert seen[0] == names_of(config(folder, draft=itself), None), "as n-grams are drafted"
    shutil.copytree(folder, tmp_path / "copy")
    assert seen[0] == names_of(config(tmp_path / "copy"), None)


def test_weights_of_an_object_store_are_not_its_pulled_configuration(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = names_of(config(folder, model_weights="s3://bucket/model"), None)
    assert names.model == "s3://bucket/model"
    assert "Set `revision`" in caplog.text


def test_the_tier_says_what_it_does_not_see(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    names = names_of_tier(str(folder), None)
    assert names.model == name_of(folder) and not names.settings
    assert "--hf-overrides" in caplog.text and "revision" in caplog.text
    caplog.clear()
    assert names_of_tier(str(folder), "of May") == names
    assert not caplog.records


# Below SGLang


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install(**arguments: Any) -> None:
        module = SimpleNamespace(get_server_args=lambda: SimpleNamespace(**arguments))
        monkeypatch.setitem(__import__("sys").modules, "sglang.srt.runtime_context", module)

    return install


@pytest.mark.regression
def test_y01_sglang_names_the_files_and_what_it_was_told(
    folder: Path, sglang: Callable[..., None]
) -> None:
    seen = set()
    for changes in (
        {},
        {"dtype": "float16"},
        {"json_model_override_args": '{"rope_theta": 2}'},
        {"load_format": "dummy"},
        {"load_format": "dummy", "random_seed": 5},
        {"quantization": "fp8"},
    ):
        sglang(**{"model_path": str(folder), "dtype": "auto", "load_format": "auto"} | changes)
        names = names_of_sglang("served", None)
        assert names.model == name_of(folder)
        seen.add(names)
    assert len(seen) == 6


@pytest.mark.parametrize("form", ["reference", "text", "table"])
def test_sglang_names_the_content_of_its_adapters(
    folder: Path, tmp_path: Path, sglang: Callable[..., None], form: str
) -> None:
    """SGLang's ids of adapters that it loads at its start have name and path alone."""

    def names(*paths: Path) -> Any:
        given: Any = [SimpleNamespace(lora_name="ann", lora_path=str(path)) for path in paths]
        if form == "text":
            given = [f"ann={path}" for path in paths]
        if form == "table":
            given = dict.fromkeys(["ann"], str(paths[0])) if paths else {}
        sglang(model_path=str(folder), lora_paths=given or None)
        return names_of_sglang("served", None)

    adapter = make_adapter(tmp_path / "adapter", 1)
    first = names(adapter)
    sglang(model_path=str(folder))
    assert names() == names_of_sglang("served", None) != first, "as without adapters"
    assert names(adapter) == first
    make_adapter(adapter, 2)
    assert names(adapter) not in (first, names())
    make_adapter(adapter, 1)
    assert names(adapter) == first
    with pytest.raises(ConfigError, match="give a folder on this machine"):
        names(Path("org/adapter"))


def test_an_sglang_that_does_not_tell(caplog: pytest.LogCaptureFixture) -> None:
    assert names_of_sglang("served", None) == ("served", "")
    assert "Set `revision`" in caplog.text and "does not say where" in caplog.text


# Below LMCache


def test_lmcache_keeps_nothing_of_a_model_that_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_names, "FIRST_SECONDS", 60.0)
    models = ModelNames(None)
    assert models.resolve_name(str(folder)) == name_of(folder)
    os.utime(folder / "model-1.safetensors", ns=(0, 0))
    assert models.resolve_name(str(folder)) == name_of(folder), "it is looked at once a second"
    monkeypatch.setattr(model_names, "CHECK_SECONDS", 0.0)
    assert models.resolve_name(str(folder)) is None
    assert models.resolve_name(str(folder)) is None, "and not under the new name either"
    [reason] = models.refused
    assert "have changed since they were hashed" in reason and reason in caplog.text


def test_lmcache_waits_for_no_large_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_names, "FIRST_SECONDS", 0.0)
    go_on, read = threading.Event(), os.preadv

    def wait(*arguments: Any) -> int:
        assert go_on.wait(60)
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", wait)
    models = ModelNames(None)
    assert models.resolve_name(str(folder)) is None, "a miss, and no wait"
    go_on.set()
    models._models[str(folder)].ready.wait(60)
    assert models.resolve_name(str(folder)) == name_of(folder)


def test_lmcache_says_why_a_model_is_not_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(model_names, "FIRST_SECONDS", 60.0)
    monkeypatch.setattr(model_names, "MOST_MODELS", 2)
    monkeypatch.setattr(os, "preadv", fail)
    models = ModelNames(None)
    assert models.resolve_name(str(folder)) is None
    assert "Input/output error" in models.refused[0]
    assert models.resolve_name("org/name") == "org/name"
    assert models.resolve_name("org/third") is None, "only so many"
