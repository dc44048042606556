# SPDX-License-Identifier: Apache-2.0
"""Flags come before the environment, that before the file, that before the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.config.engine_options import engine_config
from stratakv.engine.config.lora_config import LoraModule
from stratakv.engine.config.resolve import Settings, resolve
from stratakv.engine.config.schema import SCHEMA, variable_of
from stratakv.engine.config.server_options import ServerConfig, server_config
from stratakv.tiers.settings.values import GIB, MIB, ConfigError

# For each option three values as text, and what each of them is read as.
VALUES: Mapping[str, tuple[tuple[str, Any], tuple[str, Any], tuple[str, Any]]] = {
    "model": (("/a", "/a"), ("./b/", "./b/"), ("org/c", "org/c")),
    "served_model_name": (("a", "a"), ("b", "b"), ("c", "c")),
    "revision": (("a", "a"), ("b", "b"), ("c", "c")),
    "dtype": (("float64", "float64"), ("float32", "float32"), ("auto", "auto")),
    "device": (("cpu", "cpu"), ("cuda", "cuda"), ("cuda:3", "cuda:3")),
    "attention_backend": (("gather", "gather"), ("kernels", "kernels"), ("auto", "auto")),
    "strict_kernels": (("true", True), ("no", False), ("ON", True)),
    "enforce_eager": (("true", True), ("no", False), ("ON", True)),
    "compilation": (("elementwise", "elementwise"), ("none", "none"), ("none", "none")),
    "load_format": (("safetensors", "safetensors"), ("dummy", "dummy"), ("auto", "auto")),
    "enable_return_routed_experts": (("true", True), ("no", False), ("ON", True)),
    "max_model_len": (("64", 64), ("32", 32), ("16", 16)),
    "reasoning_start": (("<a>", "<a>"), ("none", "none"), ("b c", "b c")),
    "reasoning_end": (("</a>", "</a>"), ("none", "none"), ("b c", "b c")),
    "pooling": (("mean", "mean"), ("last", "last"), ("mean", "mean")),
    "block_size": (("64", 64), ("32", 32), ("16", 16)),
    "num_blocks": (("64", 64), ("32", 32), ("16", 16)),
    "kv_cache_memory_bytes": (("1GiB", GIB), ("2MiB", 2 * MIB), ("5", 5)),
    "gpu_memory_utilization": (("0.9", 0.9), ("0.5", 0.5), ("1", 1.0)),
    "kv_cache_dtype": (("fp8", "fp8_e4m3"), ("fp8_e4m3", "fp8_e4m3"), ("auto", "auto")),
    "enable_prefix_caching": (("true", True), ("no", False), ("ON", True)),
    "block_hash": (("sha256", "sha256"), ("sha256_cbor", "sha256_cbor"), ("sha256", "sha256")),
    "state_checkpoint_interval": (("64", 64), ("0", 0), ("1024", 1024)),
    "max_num_batched_tokens": (("64", 64), ("32", 32), ("16", 16)),
    "max_num_seqs": (("64", 64), ("32", 32), ("16", 16)),
    "long_prefill_token_threshold": (("64", 64), ("32", 32), ("16", 16)),
    "enable_chunked_prefill": (("0", False), ("1", True), ("off", False)),
    "admit_below": (("0.1", 0.1), ("0.2", 0.2), ("1", 1.0)),
    "preempt_above": (("0.1", 0.1), ("0.2", 0.2), ("1", 1.0)),
    "kv_offload": (("cpu", ("cpu",)), ("cpu,ssd", ("cpu", "ssd")), ("none", ())),
    "kv_offload_policy": (("lru", "lru"), ("arc", "arc"), ("s3-fifo", "s3-fifo")),
    "kv_offload_load": (("always", "always"), ("both", "both"), ("auto", "auto")),
    "kv_offload_load_failure": (("fail", "fail"), ("recompute", "recompute"), ("fail", "fail")),
    "kv_offload_faults": tuple((f"load:every={n}", f"load:every={n}") for n in (5, 6, 7)),
    "kv_offload_cpu_bytes": (("1GiB", GIB), ("2MiB", 2 * MIB), ("5", 5)),
    "kv_offload_cpu_huge_pages": (("on", True), ("off", False), ("yes", True)),
    "kv_offload_ssd_path": (("/a", Path("/a")), ("/b", Path("/b")), ("/c", Path("/c"))),
    "kv_offload_ssd_bytes": (("1GiB", GIB), ("2MiB", 2 * MIB), ("5", 5)),
    "kv_offload_ssd_durability": (("sync", "sync"), ("async", "async"), ("sync", "sync")),
    "kv_offload_ssd_codec": (("none", "none"), ("lossless", "lossless"), ("fp8", "fp8")),
    "kv_offload_ssd_policy": (("adaptive", "adaptive"), ("arc", "arc"), ("lru", "lru")),
    "kv_offload_ssd_admission": (("all", "all"), ("reuse", "reuse"), ("all", "all")),
    "kv_offload_ssd_daily_bytes": (("1TB", 10**12), ("2GiB", 2 * GIB), ("5MiB", 5 * MIB)),
    "kv_offload_ssd_exclusive": (("on", True), ("off", False), ("yes", True)),
    "kv_offload_ssd_mac_key_file": (("/a", Path("/a")), ("/b", Path("/b")), ("/c", Path("/c"))),
    "kv_offload_remote_token_file": (("/a", Path("/a")), ("/b", Path("/b")), ("/c", Path("/c"))),
    "kv_offload_remote_ca_file": (("/a", Path("/a")), ("/b", Path("/b")), ("/c", Path("/c"))),
    "kv_offload_remote_cert_file": (("/a", Path("/a")), ("/b", Path("/b")), ("/c", Path("/c"))),
    "kv_offload_remote_key_file": (("/a", Path("/a")), ("/b", Path("/b")), ("/c", Path("/c"))),
    "kv_offload_remote_server_name": (("a", "a"), ("b", "b"), ("c", "c")),
    "kv_offload_remote_tag_key_file": (("/a", Path("/a")), ("/b", Path("/b")), ("/c", Path("/c"))),
    "kv_offload_remote_lookup_seconds": (("0.5", 0.5), ("2", 2.0), ("60", 60.0)),
    "kv_peers": (
        ("grpc://a:1", ("grpc://a:1",)),
        ("grpc://a:1,grpc://b:2", ("grpc://a:1", "grpc://b:2")),
        ("grpcs://c:3", ("grpcs://c:3",)),
    ),
    "kv_peers_token_file": (("/a", Path("/a")), ("/b", Path("/b")), ("/c", Path("/c"))),
    "kv_peers_ca_file": (("/a", Path("/a")), ("/b", Path("/b")), ("/c", Path("/c"))),
    "kv_peers_cert_file": (("/a", Path("/a")), ("/b", Path("/b")), ("/c", Path("/c"))),
    "kv_peers_key_file": (("/a", Path("/a")), ("/b", Path("/b")), ("/c", Path("/c"))),
    "kv_peers_server_name": (("a", "a"), ("b", "b"), ("c", "c")),
    "kv_serve": (("a:1", "a:1"), ("b:2", "b:2"), ("[::1]:3", "[::1]:3")),
    "kv_serve_token_file": (("/a", Path("/a")), ("/b", Path("/b")), ("/c", Path("/c"))),
    "kv_serve_tls_cert": (("/a", Path("/a")), ("/b", Path("/b")), ("/c", Path("/c"))),
    "kv_serve_tls_key": (("/a", Path("/a")), ("/b", Path("/b")), ("/c", Path("/c"))),
    "kv_serve_tls_client_ca": (("/a", Path("/a")), ("/b", Path("/b")), ("/c", Path("/c"))),
    "kv_serve_insecure": (("on", True), ("off", False), ("yes", True)),
    "kv_offload_tier_options": (
        ("a.b=c", {"a": {"b": "c"}}),
        ("a.b=c,a.d=e=f", {"a": {"b": "c", "d": "e=f"}}),
        ("x.y=1", {"x": {"y": "1"}}),
    ),
    "require_tiers": (("on", True), ("off", False), ("yes", True)),
    "speculative_method": (("ngram", "ngram"), ("suffix", "suffix"), ("none", "none")),
    "speculative_model": (("/a", "/a"), ("./b/c", "./b/c"), ("org/model", "org/model")),
    "num_speculative_tokens": (("1", 1), ("8", 8), ("64", 64)),
    "prompt_lookup_min": (("1", 1), ("2", 2), ("3", 3)),
    "prompt_lookup_max": (("4", 4), ("5", 5), ("256", 256)),
    "speculative_adaptive": (("on", True), ("off", False), ("yes", True)),
    "enable_lora": (("on", True), ("off", False), ("yes", True)),
    "lora_modules": (
        ("a=/a", (LoraModule("a", Path("/a")),)),
        ("a=/a,b=/b", (LoraModule("a", Path("/a")), LoraModule("b", Path("/b")))),
        ("c=d/e", (LoraModule("c", Path("d/e")),)),
    ),
    "lora_dir": (("/a", Path("/a")), ("/b", Path("/b")), ("/c", Path("/c"))),
    "max_loras": (("1", 1), ("2", 2), ("3", 3)),
    "max_lora_rank": (("8", 8), ("64", 64), ("1", 1)),
    "max_cpu_loras": (("8", 8), ("16", 16), ("4", 4)),
    "num_threads": (("1", 1), ("2", 2), ("3", 3)),
    "distributed_executor_backend": (("mp", "mp"), ("uni", "uni"), ("mp", "mp")),
    "role": (("both", "both"), ("prefill", "prefill"), ("decode", "decode")),
    "async_scheduling": (("0", False), ("1", True), ("off", False)),
    "session_idle_seconds": (("1", 1.0), ("2.5", 2.5), ("60", 60.0)),
    "logits_processors": (
        ("a:B", ("a:B",)),
        ("a:B,c.d:E", ("a:B", "c.d:E")),
        ("c:D.E", ("c:D.E",)),
    ),
    "structured_outputs_backend": (
        ("xgrammar", "xgrammar"),
        ("llguidance", "guidance"),
        ("auto", "auto"),
    ),
    "scheduling_policy": (("fcfs", "fcfs"), ("priority", "priority"), ("mine", "mine")),
    "reserve": (("none", "none"), ("prompt", "prompt"), ("full", "full")),
    "pin_tenant_share": (("0.5", 0.5), ("1", 1.0), ("0", 0.0)),
    "step_trace": (("/a", Path("/a")), ("/b", Path("/b")), ("/c", Path("/c"))),
    "tenant_secret": tuple((text * 16, text.encode() * 16) for text in "abc"),  # type: ignore[dict-item]
    "host": (("a", "a"), ("b", "b"), ("c", "c")),
    "port": (("1", 1), ("2", 2), ("0", 0)),
    "api_key": (("a", "a"), ("b", "b"), ("c", "c")),
    "generation_config": (("none", "none"), ("auto", "auto"), ("vllm", "none")),
    "tool_call_parser": (("hermes", "hermes"), ("none", "none"), ("mine", "mine")),
    "chat_template": (("a.jinja", Path("a.jinja")), ("/b/c", Path("/b/c")), ("./d", Path("d"))),
    "enable_dev_routes": (("yes", True), ("false", False), ("1", True)),
    "log_level": (("debug", "debug"), ("info", "info"), ("error", "error")),
    "log_json": (("yes", True), ("false", False), ("1", True)),
    "log_stats": (("yes", True), ("false", False), ("1", True)),
    "metrics_without_key": (("yes", True), ("false", False), ("1", True)),
    "allowed_origins": (
        ("*", ("*",)),
        ("https://a.org,http://b:3000", ("https://a.org", "http://b:3000")),
        ("http://[::1]:3000", ("http://[::1]:3000",)),
    ),
    "allowed_methods": (("get", ("GET",)), ("GET,POST", ("GET", "POST")), ("*", ("*",))),
    "allowed_headers": (("*", ("*",)), ("authorization", ("authorization",)), ("x-a", ("x-a",))),
    "allow_credentials": (("yes", True), ("false", False), ("1", True)),
    "allowed_hosts": (("*", ("*",)), ("A.org,b", ("a.org", "b")), ("c.", ("c",))),
    "media_domain": (
        ("A.org,b:8443", ("a.org", "b:8443")),
        ("bücher.example.", ("xn--bcher-kva.example",)),
        ("c:443", ("c",)),
    ),
    "tenant_header": (("X-Tenant", "x-tenant"), ("a", "a"), ("b", "b")),
    "ssl_keyfile": (("/a", Path("/a")), ("/b", Path("/b")), ("/c", Path("/c"))),
    "ssl_certfile": (("/a", Path("/a")), ("/b", Path("/b")), ("/c", Path("/c"))),
    "ssl_ca_certs": (("/a", Path("/a")), ("/b", Path("/b")), ("/c", Path("/c"))),
    "ssl_cert_reqs": (("0", 0), ("1", 1), ("2", 2)),
}


def settings_of(
    tmp_path: Path, text: str, environ: Mapping[str, str] | None = None, **flags: Any
) -> Settings:
    """A file of this text below the variables, below the flags."""
    path = tmp_path / "stratakv.yaml"
    path.write_text(text)
    return resolve(flags, environ or {}, str(path))


def test_every_option_is_tried_here() -> None:
    assert list(VALUES) == list(SCHEMA)


@pytest.mark.parametrize("name", VALUES)
def test_the_highest_layer_that_gives_an_option_decides_it(name: str, tmp_path: Path) -> None:
    (flag, of_flag), (variable, of_variable), (line, of_file) = VALUES[name]
    text, environ = f'{name}: "{line}"', {variable_of(name): variable}

    above_all = settings_of(tmp_path, text, environ, **{name: flag}).given[name]
    assert (above_all.value, above_all.kind) == (of_flag, "flag")
    middle = settings_of(tmp_path, text, environ).given[name]
    assert (middle.value, middle.kind, middle.origin) == (
        of_variable, "variable", variable_of(name),
    )  # fmt: skip
    lowest = settings_of(tmp_path, text).given[name]
    assert (lowest.value, lowest.kind) == (of_file, "file")
    assert lowest.origin == f"{name} of {tmp_path}/stratakv.yaml"
    assert resolve({}, {}).given == {}, "and else the default holds"


@pytest.mark.parametrize("name", VALUES)
def test_reading_again_changes_nothing(name: str) -> None:
    """What a layer has read is read once more by the value objects' makers."""
    for text, value in VALUES[name]:
        assert SCHEMA[name].read("x", text) == SCHEMA[name].read("x", value) == value


def test_all_layers_arrive_in_the_value_objects(tmp_path: Path) -> None:
    settings = settings_of(
        tmp_path, "block_size: 32\nport: 1", {"STRATAKV_LOG_JSON": "on"}, num_threads="2"
    )
    config = engine_config(settings.model, settings.engine_options)
    assert (config.cache.block_size, config.num_threads) == (32, 2)
    server = server_config(settings.server_options)
    assert server == ServerConfig(port=1, log_json=True)
    assert settings.summary == (
        f"1 by the command line, 1 by the environment, 2 by {tmp_path}/stratakv.yaml"
    )


@pytest.mark.parametrize(
    ("text", "environ", "flags", "left"),
    [
        ("kv_cache_memory_bytes: 1GiB", {}, {"num_blocks": "9"}, {"num_blocks": 9}),
        ("num_blocks: 9", {"STRATAKV_KV_CACHE_MEMORY_BYTES": "5"}, {},
         {"kv_cache_memory_bytes": 5}),
        ("num_blocks: 9", {"STRATAKV_KV_CACHE_MEMORY_BYTES": "5"}, {"num_blocks": "7"},
         {"num_blocks": 7}),
        ("kv_offload: cpu,ssd\nkv_offload_ssd_path: /a\nkv_offload_cpu_bytes: 1MiB", {},
         {"kv_offload": "cpu"}, {"kv_offload": ("cpu",), "kv_offload_cpu_bytes": MIB}),
        ("kv_offload: cpu\nkv_offload_cpu_bytes: 1MiB", {"STRATAKV_KV_OFFLOAD": "none"}, {},
         {"kv_offload": ()}),
    ],
)  # fmt: skip
def test_one_of_two_exclusive_options_hides_the_other_below(
    tmp_path: Path, text: str, environ: dict[str, str], flags: dict[str, str], left: dict[str, Any]
) -> None:
    settings = settings_of(tmp_path, text, environ, **flags)
    assert {name: each.value for name, each in settings.given.items()} == left
    engine_config(settings.model, settings.engine_options)


def refusal_of(settings: Settings) -> str:
    with pytest.raises(ConfigError) as refusal:
        engine_config(settings.model, settings.engine_options)
    return str(settings.explain(refusal.value))


def test_a_contradiction_within_a_layer_is_refused_with_its_origins(tmp_path: Path) -> None:
    text = refusal_of(settings_of(tmp_path, "num_blocks: 9\nkv_cache_memory_bytes: 1GiB"))
    assert "give one" in text
    assert f"--num-blocks comes from num_blocks of {tmp_path}/stratakv.yaml" in text
    assert "--kv-cache-memory-bytes comes from kv_cache_memory_bytes of " in text


def test_a_contradiction_across_layers_names_both_origins(tmp_path: Path) -> None:
    environ = {"STRATAKV_ENABLE_PREFIX_CACHING": "false"}
    text = refusal_of(settings_of(tmp_path, "", environ, kv_offload="cpu"))
    assert text.endswith(
        "drop one of them (--kv-offload comes from the command line, --enable-prefix-caching "
        "comes from STRATAKV_ENABLE_PREFIX_CACHING)"
    )


def test_a_refusal_of_flags_alone_stays_as_it_is(tmp_path: Path) -> None:
    text = refusal_of(settings_of(tmp_path, "dtype: auto", num_blocks="1"))
    assert text == "--num-blocks must be at least 2, not 1"


def test_a_model_that_is_not_there_is_named_with_its_origin(tmp_path: Path) -> None:
    text = refusal_of(resolve({}, {"STRATAKV_MODEL": "/nowhere/at/all"}))
    assert "/nowhere/at/all is not a directory" in text
    assert text.endswith("(MODEL comes from STRATAKV_MODEL)")
