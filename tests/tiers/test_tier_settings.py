# SPDX-License-Identifier: Apache-2.0
"""Fields of the tiers' settings are options, and a new one needs its field and the code using it.

A field that nobody else has heard of is added in a process of its own, before anything makes a
table of options. It is then a flag, a variable, a key of a file, an argument of `LLM`, a line of
`config show`, a line of help, and part of what the store is opened with.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from stratakv.engine.config.engine_config import CacheConfig
from stratakv.engine.config.engine_options import OPTIONS
from stratakv.engine.config.offload_config import OffloadConfig
from stratakv.tiers import assemble
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.remote.credentials import Credentials
from stratakv.tiers.settings import readers
from stratakv.tiers.settings.option import check_options, options_of
from stratakv.tiers.settings.values import ConfigError
from stratakv.tiers.testing.memory_store import MemoryStore
from stratakv.tiers.tier_settings import (
    CpuSettings,
    RemoteTierSettings,
    SsdSettings,
    TierSettings,
)

LAYOUT = BlockLayout(1, 16, 1, 64, "bfloat16")

NEW_FIELD = '''
import contextlib, importlib.util, io, json, os, sys
import stratakv.tiers

FIELD = """
    spread_bytes: int = setting(
        8 * 2**20, readers.size, "how far it spreads", "SIZE", name="spread", least_bytes=2**20
    )
"""

spec = importlib.util.find_spec("stratakv.tiers.tier_settings")
before, own, after = spec.loader.get_source(spec.name).partition("    io_threads: int = 4\\n")
assert own, "the last field of SsdSettings"
tier_settings = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = stratakv.tiers.tier_settings = tier_settings
exec(compile(before + own + FIELD + after, spec.origin, "exec"), vars(tier_settings))

from stratakv.tiers import assemble
from stratakv.engine.cli.main import main
from stratakv.engine.config.engine_options import engine_config
from stratakv.tiers.block import BlockLayout

def printed(*words):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            main(list(words))
        except SystemExit:
            pass
    return out.getvalue()

def shown(*words):
    text = printed("config", "show", "--json", "--origin", "--kv-offload", "cpu,ssd", *words)
    return json.loads(text)["kv_offload_ssd_spread"]

flag = "--kv-offload-ssd-spread"
found = {"default": shown(), "flag": shown(flag, "1.5MiB"), "file": shown("--config", sys.argv[1])}
os.environ["STRATAKV_KV_OFFLOAD_SSD_SPREAD"] = "3MiB"
found["variable"] = shown()
found["refused"] = printed("config", "show", "--kv-offload", "cpu,ssd", flag, "5")
found["alone"] = printed("config", "show", "--kv-offload", "cpu", flag, "2MiB")
found["help"] = printed("serve", "--help")
del os.environ["STRATAKV_KV_OFFLOAD_SSD_SPREAD"]
given = {"kv_offload": "cpu,ssd", "kv_offload_ssd_spread": "4MiB"}
settings = engine_config(None, given).offload
opened = []
assemble.open_ssd = lambda layout, ssd, **more: opened.append(ssd) or 1 / 0
with contextlib.suppress(ZeroDivisionError):
    assemble.open_stores(BlockLayout(1, 16, 1, 64, "bfloat16"), settings, namespace=b"")
found["opened"] = opened[0].spread_bytes
print(json.dumps(found))
'''


def test_a_new_option_is_a_field_and_the_code_that_uses_it(tmp_path: Path) -> None:
    file = tmp_path / "stratakv.yaml"
    file.write_text("kv-offload-ssd-spread: 6MiB\n")
    done = subprocess.run(
        [sys.executable, "-c", NEW_FIELD, str(file)],
        cwd="/", capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    flag = "--kv-offload-ssd-spread"
    assert found["default"]["value"] == "8MiB"
    assert found["flag"] == {"value": "1.5MiB", "kind": "flag", "origin": flag}
    assert (found["file"]["value"], found["file"]["kind"]) == ("6MiB", "file")
    assert found["variable"]["value"] == "3MiB"
    assert found["variable"]["origin"] == "STRATAKV_KV_OFFLOAD_SSD_SPREAD"
    assert f"{flag} must be at least 1MiB, not 5 bytes" in found["refused"]
    assert f"{flag} is given but ssd is not in --kv-offload" in found["alone"]
    assert "how far it spreads (default: 8MiB)" in " ".join(found["help"].split())
    assert found["opened"] == 4 * 2**20


def test_each_field_of_a_part_is_an_option_of_the_engine() -> None:
    parts = {"cpu": CpuSettings, "ssd": SsdSettings, "remote": RemoteTierSettings}
    for part, kind in parts.items():
        here = {each.field for each in options_of(kind, part).values()}
        assert here == {o.field for o in OPTIONS.values() if o.section == f"offload.{part}"}
        assert here >= {field.name for field in fields(kind)} - {"populate_threads", "io_threads"}


def test_credentials_are_the_files_of_the_remote_tier() -> None:
    given = {field.name: Path(field.name) for field in fields(Credentials)}
    given["server_name"] = "cache"  # type: ignore[assignment]
    assert RemoteTierSettings(**given).credentials() == Credentials(**given)  # type: ignore[arg-type]


def test_values_from_python_are_checked_like_those_of_flags() -> None:
    with pytest.raises(ConfigError, match="--kv-offload-ssd-codec takes none or lossless or fp8"):
        OffloadConfig(ssd=SsdSettings(codec="zip"))
    with pytest.raises(ConfigError, match=r"--kv-offload-policy takes lru or .* did you mean lru"):
        OffloadConfig(cpu=CpuSettings(policy="lur"))
    with pytest.raises(ConfigError, match="--kv-offload-cpu-bytes must be at least 1MiB, not 5 by"):
        OffloadConfig(cpu=CpuSettings(capacity_bytes=5))
    with pytest.raises(ConfigError, match="number of I/O threads must be at least 1, not 0"):
        SsdSettings(io_threads=0)
    check_options(options_of(SsdSettings, ""), SsdSettings())


def test_words_from_python_are_those_that_settings_hold() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype takes 'fp8_e4m3' here, not 'fp8'"):
        CacheConfig(kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match=r"--block-hash takes .*, not ''"):
        CacheConfig(block_hash="")


def test_only_an_ssd_is_exclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(LAYOUT, 1 << 20, name="remote")
    monkeypatch.setattr(assemble, "open_stores", lambda *_given, **_options: [store])
    ssd = SsdSettings(exclusive=True)  # without a path there is none
    settings = TierSettings(cpu=CpuSettings(capacity_bytes=64 * LAYOUT.slot_bytes), ssd=ssd)
    tiers = assemble.open_hierarchy(LAYOUT, settings, lambda: None, namespace=b"x")
    try:
        assert tiers.hierarchy._write_backs._exclusive_store is None
    finally:
        assert tiers.hierarchy.close(5.0)


def test_synonyms_of_a_word() -> None:
    read = readers.one_of("auto", "fp8_e4m3", synonyms={"fp8": "fp8_e4m3"})
    assert [read("--x", word) for word in ("auto", "fp8", "fp8_e4m3")] == [
        "auto", "fp8_e4m3", "fp8_e4m3",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="--x takes auto or fp8_e4m3, not 'fp4'"):
        read("--x", "fp4")
