# SPDX-License-Identifier: Apache-2.0
"""vLLM's spellings: what each is read as, what it is refused with, and where it is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.config.engine_options import EMBEDDED_MODEL, engine_config
from stratakv.engine.config.resolve import read_config_settings, resolve
from stratakv.engine.config.schema import SCHEMA
from stratakv.engine.config.vllm_aliases import ALIASES
from stratakv.tiers.settings.values import GIB, ConfigError

# alias, value, what it gives
TAKEN: list[tuple[str, Any, dict[str, Any]]] = [
    ("kv_offloading_size", "1.5",
     {"kv_offload_cpu_bytes": 3 * GIB // 2, "kv_offload": ("cpu",)}),
    ("kv_offloading_backend", "native", {}),
    ("num_gpu_blocks_override", "77", {"num_blocks": 77}),
    ("prefix_caching_hash_algo", "sha256_cbor", {"block_hash": "sha256_cbor"}),
    ("guided_decoding_backend", "xgrammar", {"structured_outputs_backend": "xgrammar"}),
    ("pooler_config", '{"pooling_type": "MEAN"}', {"pooling": "mean"}),
    ("pooler_config", {"seq_pooling_type": "LAST", "normalize": True}, {"pooling": "last"}),
    ("override_pooler_config", '{"pooling_type": "LAST"}', {"pooling": "last"}),
    ("speculative_config", '{"method": "ngram", "num_speculative_tokens": 5, '
     '"prompt_lookup_max": 4, "prompt_lookup_min": 2}',
     {"speculative_method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4,
      "prompt_lookup_min": 2}),
    ("speculative_config", {"method": "suffix"}, {"speculative_method": "suffix"}),
    ("speculative_config", {"model": str(EMBEDDED_MODEL), "draft_tensor_parallel_size": 1},
     {"speculative_model": str(EMBEDDED_MODEL)}),
    ("speculative_config",
     {"method": "eagle", "model": str(EMBEDDED_MODEL), "num_speculative_tokens": 3},
     {"speculative_method": "eagle", "speculative_model": str(EMBEDDED_MODEL),
      "num_speculative_tokens": 3}),
    ("speculative_config", {"method": "ngram", "prompt_lookup_max": 2},
     {"speculative_method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 2}),
    ("tensor_parallel_size", "1", {}),
    ("tensor_parallel_size", 1, {}),
    ("pipeline_parallel_size", "1", {}),
    ("tokenizer_mode", "auto", {}),
    ("trust_remote_code", False, {}),
    ("swap_space", "0", {}),
    ("kv_transfer_config", False, {}),
    ("seed", "0", {}),
    ("max_logprobs", "20", {}),
    ("uvicorn_log_level", "warning", {"log_level": "warning"}),
    ("allowed_media_domains", "a.org,B.org:8443", {"media_domain": ("a.org", "b.org:8443")}),
    ("disable_log_stats", True, {"log_stats": False}),
    ("disable_log_stats", False, {"log_stats": True}),
    ("disable_log_requests", True, {}),
    ("enable_auto_tool_choice", True, {}),
    ("exclude_tools_when_tool_choice_none", True, {}),
    ("enable_prompt_tokens_details", True, {}),
]  # fmt: skip
WITH_A_NOTE = {
    "disable_log_requests", "enable_auto_tool_choice", "enable_prompt_tokens_details",
    "exclude_tools_when_tool_choice_none",
}  # fmt: skip

REFUSED: list[tuple[str, Any, str]] = [
    ("kv_offloading_size", "much", "takes a number, not 'much'"),
    ("kv_offloading_size", "0", "takes GiB above 0"),
    ("kv_offloading_size", "-1", "takes GiB above 0"),
    ("kv_offloading_size", "nan", "takes GiB above 0"),
    ("kv_offloading_size", "1e300", "up to 1073741824"),
    ("kv_offloading_backend", "lmcache", "takes native here, not 'lmcache'; .*--kv-offload cpu"),
    ("num_gpu_blocks_override", "many", "--num-gpu-blocks-override takes a whole number"),
    ("prefix_caching_hash_algo", "xxhash", "takes sha256 or sha256_cbor, not 'xxhash'"),
    ("guided_decoding_backend", "outlines", "takes auto or xgrammar or guidance, not 'outlines'"),
    ("pooler_config", '{"pooling_type": "CLS"}', "takes .*MEAN.* here, not "),
    ("pooler_config", "MEAN", "takes .* here, not 'MEAN'"),
    ("pooler_config", "{}", "takes .* here"),
    ("pooler_config", '{"pooling_type": "LAST", "normalize": false}', "vectors are normalised"),
    ("override_pooler_config", '{"pooling_type": "LAST", "dimensions": 8}', "takes .* here"),
    ("speculative_config", "{}", "takes an object such as .*method"),
    ("speculative_config", "ngram", "takes an object such as .*, not 'ngram'"),
    (
        "speculative_config",
        '{"method": "eagle3", "model": "head"}',
        "takes ngram or suffix or draft_model or eagle as .*, not 'eagle3': drafts of such heads",
    ),
    ("speculative_config", {"method": "medusa"}, "or eagle as its method here, not 'medusa'"),
    ("speculative_config", {"method": ["eagle"], "model": "head"}, "as its method here, not "),
    (
        "speculative_config",
        {"method": "ngram", "draft_tensor_parallel_size": 2},
        "here, and no 'draft_tensor_parallel_size'",
    ),
    ("tensor_parallel_size", "2", "takes 1 here, not '2'; the engine computes on one device"),
    ("pipeline_parallel_size", 2, "takes 1 here, not 2"),
    ("tokenizer_mode", "slow", "takes auto here"),
    ("trust_remote_code", True, "is not taken: no code of model repositories is run"),
    ("swap_space", "4", "is not taken: .*--kv-offload cpu"),
    ("kv_transfer_config", '{"kv_connector":"X"}', "is not taken: .*--kv-offload cpu,ssd"),
    ("seed", "42", "takes 0 here, not '42'; every request brings its own seed"),
    ("max_logprobs", "-1", "takes 20 here"),
    ("uvicorn_log_level", "trace", "takes debug or info or warning or error, not 'trace'"),
    ("allowed_media_domains", "https://a.org", "takes hosts such as pictures.example.org"),
    ("disable_log_stats", "maybe", "takes true or false"),
    ("disable_log_requests", "maybe", "takes true or false"),
    ("enable_auto_tool_choice", "maybe", "takes true or false"),
    ("exclude_tools_when_tool_choice_none", "maybe", "takes true or false"),
    ("enable_prompt_tokens_details", "maybe", "takes true or false"),
]


def test_every_alias_is_tried_here_and_is_no_option() -> None:
    assert {name for name, *_ in TAKEN} == set(ALIASES) == {name for name, *_ in REFUSED}
    assert not ALIASES.keys() & SCHEMA.keys()


@pytest.mark.parametrize(("name", "value", "expected"), TAKEN)
def test_taken(name: str, value: Any, expected: dict[str, Any]) -> None:
    settings = resolve({name: value}, {})
    assert {option: each.value for option, each in settings.given.items()} == expected
    flag = "--" + name.replace("_", "-")
    assert all(each.origin == flag for each in settings.given.values())
    assert bool(settings.notes) == (name in WITH_A_NOTE)
    assert all(note.startswith(f"{flag} has no effect: ") for note in settings.notes)
    engine_config(settings.model, settings.engine_options)


@pytest.mark.parametrize(("name", "value", "words"), REFUSED)
def test_refused(name: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} .*|{words}") as refusal:
        resolve({name: value}, {})
    assert refusal.match(words)


def test_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text("kv-offloading-size: 2\nnum_gpu_blocks_override: 9\ntrust_remote_code: false")
    given = read_config_settings(path).given
    assert given["kv_offload_cpu_bytes"].value == 2 * GIB
    assert given["kv_offload"].value == ("cpu",)
    assert given["num_blocks"].origin == f"num_gpu_blocks_override of {path}"


def test_the_size_leaves_the_tiers_that_another_layer_gives(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("kv_offload: cpu,ssd")
    given = resolve({"kv_offloading_size": "1"}, {}, str(path)).given
    assert (given["kv_offload"].value, given["kv_offload_cpu_bytes"].value) == (("cpu", "ssd"), GIB)
    same = resolve({"kv_offloading_size": "1", "kv_offload": "cpu,ssd"}, {}).given
    assert same["kv_offload"].value == ("cpu", "ssd")


def test_tiers_switched_off_above_hide_the_size_below(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("kv_offloading_size: 1")
    settings = resolve({}, {"STRATAKV_KV_OFFLOAD": "none"}, str(path))
    assert not engine_config(settings.model, settings.engine_options).offload.enabled


@pytest.mark.parametrize(
    "flags",
    [
        {"kv_offloading_size": "1", "kv_offload_cpu_bytes": "1GiB"},
        {"num_blocks": "9", "num_gpu_blocks_override": "9"},
        {"log_stats": True, "disable_log_stats": True},
    ],
)
def test_two_spellings_in_one_layer(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^--\S+ and --\S+ are two spellings of one option"):
        resolve(flags, {})


def test_a_spelling_above_wins_over_the_other_below() -> None:
    given = resolve({"num_gpu_blocks_override": "9"}, {"STRATAKV_NUM_BLOCKS": "7"}).given
    assert given["num_blocks"].value == 9


def test_a_refused_value_is_named_by_the_alias_that_gave_it() -> None:
    settings = resolve({"num_gpu_blocks_override": "1"}, {})
    with pytest.raises(ConfigError) as refusal:
        engine_config(None, settings.engine_options)
    text = str(settings.explain(refusal.value))
    assert text.endswith("(--num-blocks comes from --num-gpu-blocks-override)")
