# SPDX-License-Identifier: Apache-2.0
"""Adapters of every other kind are refused by name, and equal ones have one fingerprint."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key
from torch import Tensor

from stratakv.engine.models.checkpoint.json_fields import JsonFields
from stratakv.engine.models.lora import peft_config
from stratakv.engine.models.lora.adapter_file import WEIGHTS_FILE, AdapterFile
from stratakv.engine.models.lora.module_patterns import MOST_WAYS, PatternValues, compile_pattern
from stratakv.engine.models.lora.peft_config import parse_peft_config
from stratakv.engine.models.model_spec import ModelSpec
from stratakv.tiers.settings.values import ConfigError

from ..written_adapters import PREFIX, config_of, make_tensors, spec_of, write_adapter

MAX_RANK = 16
Q = f"{PREFIX}model.layers.0.self_attn.q_proj"
CHILD_SECONDS = 100.0
MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 40,
    "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12, "num_experts": 3,
    "num_experts_per_tok": 2, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def spec(tiny_model: Path) -> ModelSpec:
    return spec_of(tiny_model)


@pytest.fixture
def read(tmp_path: Path, spec: ModelSpec, tiny_model: Path) -> Callable[..., AdapterFile]:
    """Writes an adapter, with changes to its tensors and fields of its config, and reads it."""

    def read(change: Callable[[dict[str, Tensor]], object] | None = None, seed: int = 0,
             rank: int = 4, **fields: Any) -> AdapterFile:  # fmt: skip
        tensors = make_tensors(spec, seed, rank)
        if change is not None:
            change(tensors)
        write_adapter(tmp_path, tiny_model, rank=rank, tensors=tensors, **fields)
        return AdapterFile.read(tmp_path, spec, MAX_RANK)

    return read


def replace(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


def rename(old: str, new: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def spoil(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q}.lora_A.weight"][1, 2] = float("nan")


A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (rename(A, A.replace("layers.0", "layers.99")), "lacks lora_"),
        (lambda t: [t.update({n.replace("layers.0", "layers.9"): t.pop(n)}) for n in (A, B)],
         "none of this model"),
        (lambda t: t.pop(B), "lacks lora_B; copy the adapter again"),
        (lambda t: t.pop(A), "lacks lora_A"),
        (lambda t: t.update({A.replace("lora_A", "lora_A.default"): t[A].clone()}),
         "has lora_A twice"),
        (lambda t: t.update({n.removeprefix(PREFIX): t[n].clone() for n in (A, B)}), "twice"),
        (replace(A, torch.ones(4, 17)), "needs [4, "),
        (lambda t: t.update({A: t[A].T.contiguous()}),
         "has lora_A [32, 4] and this model needs [4, 32]"),
        (replace(A, torch.ones(17, 4)), "has lora_A [17, 4] and this model needs [4, 32]"),
        (replace(B, torch.ones(9, 4)), "lora_B [9, 4] and this model needs"),
        (replace(B, torch.ones(16, 3)), "lora_B [16, 3]"),
        (replace(A, torch.ones(4, 4, 1)), "[4, 4, 1]; two dimensions"),
        (replace(A, torch.ones(0, 16)), "[0, 16]"),
        (replace(A, torch.ones(4, 16, dtype=torch.int64)), "torch.int64"),
        (replace(A, torch.ones(4, 16).to(torch.float8_e4m3fn)), "float8"),
        (spoil, "numbers in lora_A that are not finite"),
        (replace(f"{PREFIX}lm_head.weight", torch.ones(2)), "which is no matrix of LoRA"),
        (replace(f"{Q}.lora_magnitude_vector", torch.ones(2)), "which is DoRA"),
        (replace(f"{Q}.bias", torch.ones(2)), "which is a bias"),
        (replace(f"{PREFIX}model.embed_tokens.lora_embedding_A", torch.ones(2)), "embedding"),
        (replace(f"{PREFIX}model.embed_tokens.base_layer.weight", torch.ones(2)), "whole weights"),
        (lambda t: t.update({f"{PREFIX}lm_head.lora_{h}.weight": torch.ones(1, 1) for h in "AB"}),
         "not adapted here"),
        (lambda t: t.clear(), "holds no matrices"),
    ],
)  # fmt: skip
def test_matrices_that_are_none_of_this_model_are_refused(
    read: Callable[..., AdapterFile], change: Any, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        read(change)
    assert said in str(raised.value)
    assert str(tmp_path / WEIGHTS_FILE) in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"use_dora": True}, "use_dora is set, and adapters with DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"bias": 3}, "bias must be a string"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1, 2]}, "aLoRA"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"use_qalora": True}, "QALoRA"),
        *[({"init_lora_weights": each}, "weights were changed with it")
          for each in ("pissa", "pissa_niter_16", "olora", "corda", "loftq")],
        ({"init_lora_weights": "wild"}, "init_lora_weights must be"),
        ({"new_arithmetic": {"x": 1}}, "new_arithmetic"),
        ({"peft_type": "IA3"}, "peft_type must be LORA"),
        ({"r": 8}, "has rank 4, and "),
        ({"r": 0}, "r must be a whole number from 1"),
        ({"r": True}, "r must be"),
        ({"r": 10**400}, "r must be"),
        ({"rank_pattern": {"q_proj": 2}}, "has rank 4, and "),
        ({"rank_pattern": []}, "rank_pattern must be an object"),
        ({"alpha_pattern": {"q_proj": "8"}}, "q_proj must be a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number from"),
        ({"lora_alpha": float("inf")}, "lora_alpha must be"),
        ({"lora_alpha": 10**400}, "lora_alpha must be"),
        ({"use_rslora": "yes"}, "use_rslora must be true or false"),
        ({"target_parameters": "experts"}, "target_parameters must be a list"),
        ({"rank_pattern": {f"m{i}": 4 for i in range(10_001)}}, "at most 10000"),
        ({"alpha_pattern": {f".*{i}.*": 4 for i in range(9)}}, "together more than"),
        ({"alpha_pattern": {"(a+)+$": 4}}, "may take for ever"),
        ({"alpha_pattern": {"(": 4}}, "no regular expression"),
        ({"alpha_pattern": {"a)|(b": 4}}, "no regular expression"),
        ({"alpha_pattern": {"x" * 513: 4}}, "longer than 512"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value)[:40],
)  # fmt: skip
def test_other_methods_are_refused_by_their_field(
    read: Callable[..., AdapterFile], fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        read(**fields)
    assert said in str(raised.value)


@pytest.mark.parametrize("fields", [
    {"new_arithmetic": None}, {"use_dora": False}, {"modules_to_save": None}, {"bias": "none"},
    {"init_lora_weights": None}, {"init_lora_weights": "gaussian"}, {"lora_dropout": 0.3},
    {"layers_to_transform": [0, 1]}, {"eva_config": {"rho": 2.0}}, {"rank_pattern": {}},
], ids=str)  # fmt: skip
def test_fields_without_effect_are_read_over(
    read: Callable[..., AdapterFile], fields: dict[str, Any]
) -> None:
    assert read(**fields).fingerprint == read().fingerprint


def test_the_rank_has_a_limit(read: Callable[..., AdapterFile]) -> None:
    assert read(rank=MAX_RANK).rank == MAX_RANK
    with pytest.raises(ConfigError, match="has rank 17 and --max-lora-rank is 16; raise that"):
        read(rank=MAX_RANK + 1)


def test_patterns_are_those_of_peft() -> None:
    """A pattern means the end of a name from a dot on, and the first of several counts."""
    names = ["model.layers.0.self_attn.q_proj", "model.layers.10.self_attn.q_proj",
             "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.xq_proj"]  # fmt: skip
    patterns = {"^model.layers.0.self_attn.q_proj": 1, r"layers\.1\d\..*": 2, "q_proj": 3,
                r"layers\.(0|1)\.mlp\.(up|down)_proj": 5}  # fmt: skip
    found = parse_peft_config(
        JsonFields(config_of(9, rank_pattern=patterns, alpha_pattern={"q_proj": 18}), "c.json")
    )
    assert [found.strength_of(name) for name in names] == [
        (1, 18.0), (2, 9.0), (5, 18 / 5), (9, 2.0)
    ]  # fmt: skip
    rooted = parse_peft_config(JsonFields(config_of(9, use_rslora=True), "c.json"))
    assert rooted.strength_of("a").scale == 6.0


_PARTS = ["a", "b", "a.b", "b.a", "ab", "aa", "a.a.b", "a.b.a", "axb", "1.b"]
_KEYS = [
    *_PARTS,
    "a.",
    ".b",
    ".",
    "..",
    "^a",
    "a$",
    "a|b",
    "[ab]",
    ".*b",
    "(a.b|b)",
    r"\d\.b",
    "a?",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(_KEYS), unique=True),
       st.lists(st.sampled_from(_PARTS), min_size=1, max_size=3).map(".".join))  # fmt: skip
def test_the_pattern_that_counts_is_the_one_of_peft(keys: list[str], module: str) -> None:
    values = PatternValues[str]()
    for key in keys:
        values.add(key, key)
    found = values.value_of(module, "none of them")
    expected = get_pattern_key(keys, module)
    assert found == expected if expected in keys else found == "none of them"


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_patterns_and_modules_together_have_a_limit(
    read: Callable[..., AdapterFile], monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """A thousand plain names are looked up together, by their length and their dots."""
    num_modules = len(read().modules)
    names = {f"model.layers.{i}.self_attn.q_proj": 4 for i in range(1000)} | {"x.*": 4}
    monkeypatch.setattr(peft_config, "MOST_TRIES", (3 + 129) * num_modules)
    assert len(read(**{field: names}).modules) == num_modules
    with pytest.raises(ConfigError, match=f"{field} has patterns with 133 ways to match, times "):
        read(**{field: names | {"y": 4}})


HOSTILE = [
    "(a+)+$", "(.*a){20}", "((a*)*)*", "(a|a)*b", "(a|aa)+$", ".*.*.*.*=", "(a?){30}a{30}",
    "((){100}){100}", "(?:){1000000000}", "(a{1,50}){1,50}", "(?=(a+)+)b", r"(a)\1*", "(?>a+)b",
    "(([a-z]+)+_?)*", "a*" * 30, "(((a{65535}){65535}){65535}|.*){9}", "(" * 60 + "a" + ")*" * 60,
]  # fmt: skip


@pytest.mark.parametrize("pattern", HOSTILE, ids=lambda each: each[:20])
def test_patterns_that_may_take_for_ever_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"which may take for ever|not matched here|repet"):
        compile_pattern(pattern)


_TRIED = """
import random, sys
from stratakv.engine.models.lora.module_patterns import compile_pattern
rng = random.Random(int(sys.argv[1]))
parts = ["a", "b", ".", "[ab]", "(", ")", "*", "+", "?", "|", "{2}", "{1,3}", "{3,}", "*?", r"\\d"]
num_taken = 0
while num_taken < 1000:
    text = "".join(rng.choices(parts, k=rng.randint(1, 14)))
    try:
        found, _ = compile_pattern(text)
    except ValueError:
        continue
    num_taken += 1
    for name in ("a" * 128, "ab" * 63 + "!", ("a" * 15 + ".") * 8 + "!"):
        found.match(name)
print("done")
"""


def test_patterns_that_are_taken_match_in_time(seed: int) -> None:
    """A child matches the patterns: it would hang if the ways through a pattern were miscounted."""
    made = subprocess.run([sys.executable, "-c", _TRIED, str(seed)], capture_output=True,
                          text=True, timeout=CHILD_SECONDS, check=True)  # fmt: skip
    assert made.stdout.strip() == "done"


@pytest.mark.parametrize(("pattern", "num_ways"), [
    ("q_proj", 1), (r"\d+", 128), (".*", 129), (".*.*", 129 * 129), ("a{2,4}", 3), ("(ab?|c)d", 3),
    ("(a|bc){2}", 4), ("(a|bc){1,2}", 6), ("(?:ab)?", 2),
])  # fmt: skip
def test_the_ways_through_a_pattern_are_counted(pattern: str, num_ways: int) -> None:
    assert compile_pattern(pattern)[1] == num_ways <= MOST_WAYS


def flip(tensors: dict[str, Tensor]) -> None:
    tensors[A].view(torch.uint8)[0, 0] ^= 1


def test_a_fingerprint_has_all_that_changes_tokens_and_nothing_else(
    read: Callable[..., AdapterFile], tmp_path: Path, spec: ModelSpec, tiny_model: Path
) -> None:
    plain = read(target_modules=["q_proj", "down_proj"]).fingerprint
    elsewhere = write_adapter(
        tmp_path / "other name", tiny_model, target_modules=["down_proj", "q_proj"],
        base_model_name_or_path="/home/trainer", peft_version="0.1",
    )  # fmt: skip
    assert AdapterFile.read(elsewhere, spec, 64).fingerprint == plain
    bare = {name.removeprefix(PREFIX): each for name, each in make_tensors(spec).items()}
    short = write_adapter(tmp_path / "bare", tiny_model, tensors=bare)
    assert AdapterFile.read(short, spec, MAX_RANK).fingerprint == plain
    others = [
        read(flip), read(seed=1), read(lora_alpha=9), read(use_rslora=True),
        read(alpha_pattern={"layers.1.mlp.down_proj": 3}),
        read(lambda t: t.update({A: t[A].double(), B: t[B].double()})),
        read(lambda t: (t.pop(A), t.pop(B))),
    ]  # fmt: skip
    assert len({plain, *(each.fingerprint for each in others)}) == 1 + len(others)
    # A rank above that of the config, told by a pattern.
    assert read(alpha_pattern={"q_proj": 8}).fingerprint == plain


def test_experts_of_older_writers_are_turned(tmp_path: Path) -> None:
    """Older writers took the axes of a tensor of experts the other way round."""
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    spec = spec_of(tmp_path)
    generator = torch.Generator().manual_seed(0)
    count, rank, hidden, size = 3, 2, 16, 12
    name = f"{PREFIX}model.layers.0.mlp.experts"
    for num_ins, num_outs in ((size, hidden), (hidden, size)):
        tensors = {
            f"{name}.lora_A.weight": torch.randn(count * rank, num_ins, generator=generator),
            f"{name}.lora_B.weight": torch.randn(num_outs, count * rank, generator=generator),
        }
        folder = write_adapter(
            tmp_path / str(num_ins), tmp_path, tensors=tensors, rank=rank,
            target_parameters=["mlp.experts.down_proj"],
        )  # fmt: skip
        found = AdapterFile.read(folder, spec, MAX_RANK)
        ((named, module),) = found.modules.items()
        assert named.endswith("mlp.experts.down_proj")
        assert module.ins.shape == (count, rank, size)
        assert module.outs.shape == (count, hidden, rank)
        by_expert = tensors[f"{name}.lora_A.weight"].view(count, rank, num_ins)
        by_rank = tensors[f"{name}.lora_B.weight"].view(num_outs, rank, count)
        for expert in range(count):
            product = by_rank[:, :, expert] @ by_expert[expert]
            wanted = product if num_ins == size else product.T
            assert torch.allclose(module.outs[expert] @ module.ins[expert], wanted, atol=1e-5)
    tensors[f"{name}.lora_A.weight"] = torch.ones(7, hidden)
    write_adapter(tmp_path / "bad", tmp_path, tensors=tensors, rank=rank)
    with pytest.raises(ConfigError, match="for 3 experts this model needs"):
        AdapterFile.read(tmp_path / "bad", spec, MAX_RANK)


def header(fields: object, num_bytes: int = 0) -> bytes:
    text = json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


@pytest.mark.parametrize("data", [
    b"", b"\0" * 7, struct.pack("<Q", 2**63), struct.pack("<Q", 100) + b"{", header([1]),
    header({A: {"dtype": "F32", "shape": [4, 16], "data_offsets": [0, 256]}}, 255),
    header({A: {"dtype": "F32", "shape": [4, 16], "data_offsets": [0, 256]}}, 257),
    header({A: {"dtype": "F32", "shape": [2**62, 16], "data_offsets": [0, 256]}}, 256),
    header({A: {"dtype": "F32", "shape": [-4, 16], "data_offsets": [0, 256]}}, 256),
    header({A: {"dtype": "F32", "shape": [4, 16], "data_offsets": [256, 0]}}, 256),
    header({A: {"dtype": "F99", "shape": [4, 16], "data_offsets": [0, 256]}}, 256),
    header({A: {"dtype": "F4", "shape": [4, 16], "data_offsets": [0, 32]}}, 32),
    header({A: {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, 4),
    b"PK\3\4 a zip",
], ids=lambda data: repr(data)[:40])  # fmt: skip
def test_files_that_lie_are_refused(tmp_path: Path, spec: ModelSpec, data: bytes) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(config_of()))
    (tmp_path / WEIGHTS_FILE).write_bytes(data)
    with pytest.raises(ConfigError, match=WEIGHTS_FILE):
        AdapterFile.read(tmp_path, spec, MAX_RANK)


def test_files_that_are_cut_missing_or_others_are_refused(
    tmp_path: Path, spec: ModelSpec, tiny_model: Path, read: Callable[..., AdapterFile]
) -> None:
    read()
    config, weights = tmp_path / "adapter_config.json", tmp_path / WEIGHTS_FILE
    whole = weights.read_bytes()

    def refuses(said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            AdapterFile.read(tmp_path, spec, MAX_RANK)

    for length in (3, 9, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:length])
        refuses("not a whole safetensors file")
    weights.unlink()
    refuses("is missing; give the folder in which PEFT saved")
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    refuses("is a pickle, which may run code")
    weights.mkdir()
    refuses(WEIGHTS_FILE)
    for text, said in (
        ("{", "not valid JSON"), ("[]", "must hold a JSON object"),
        ("[" * 100_000, "not valid JSON"), (" " * 2**20 + "{}", "at most"),
    ):  # fmt: skip
        config.write_text(text)
        refuses(said)
    config.write_bytes(b"\xff\xfe{")
    refuses("not valid JSON")
    config.unlink()
    refuses("adapter_config.json is missing; give the folder in which PEFT saved the adapter")
    os.mkfifo(config)
    refuses("is no ordinary file; copy the file itself there")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner,
                                                                max_size=3),
    max_leaves=5,
)  # fmt: skip
_PATTERNS = st.dictionaries(
    st.text("ab.*+?()[]{}|\\^$0,1", max_size=9), st.integers(-1, 9) | _JSON, max_size=3
)
_FIELDS = st.fixed_dictionaries(
    {"peft_type": st.just("LORA"), "r": st.integers(1, 8) | _JSON},
    optional={
        "lora_alpha": _JSON, "rank_pattern": _PATTERNS | _JSON, "alpha_pattern": _PATTERNS,
        "init_lora_weights": _JSON, "bias": _JSON, "use_rslora": _JSON, "use_dora": _JSON,
        "target_parameters": _JSON, "unknown": _JSON, "target_modules": _JSON,
    },
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(_FIELDS)
def test_configs_of_any_kind_are_read_or_refused(fields: dict[str, Any]) -> None:
    try:
        found = parse_peft_config(JsonFields(json.loads(json.dumps(fields)), "c.json"))
    except ConfigError:
        return
    for name in ("model.layers.0.self_attn.q_proj", "a" * 60):
        strength = found.strength_of(name)
        assert strength.rank >= 1
        assert abs(strength.scale) <= 1e6


_SHAPES = st.lists(st.integers(-1, 70) | st.integers(), max_size=3)
_ENTRIES = st.fixed_dictionaries({
    "dtype": st.sampled_from(["F32", "F16", "BF16", "F64", "I8", "BOOL", "F8_E4M3", "U64", "C64"]),
    "shape": st.just([4, 16]) | _SHAPES,
    "data_offsets": st.lists(st.integers(0, 300), max_size=3) | st.just([0, 256]),
})  # fmt: skip


@settings(max_examples=150, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(st.dictionaries(st.sampled_from([A, B, "__metadata__"]) | st.text(max_size=5),
                       _ENTRIES | _JSON, max_size=3), st.integers(0, 300))  # fmt: skip
def test_headers_of_any_kind_are_refused(
    tmp_path: Path, spec: ModelSpec, fields: dict[str, Any], num_bytes: int
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(config_of()))
    (tmp_path / WEIGHTS_FILE).write_bytes(header(fields, num_bytes))
    with pytest.raises(ConfigError):
        AdapterFile.read(tmp_path, spec, MAX_RANK)


def test_every_single_byte_counts_or_is_refused(
    tmp_path: Path, spec: ModelSpec, tiny_model: Path, seed: int
) -> None:
    """A byte of a file changes the fingerprint, or the file cannot be read."""
    tensors = {name: each.half() for name, each in make_tensors(spec, rank=1).items()}
    write_adapter(tmp_path, tiny_model, rank=1, tensors=tensors)
    whole = (tmp_path / WEIGHTS_FILE).read_bytes()
    plain = AdapterFile.read(tmp_path, spec, MAX_RANK).fingerprint
    first = 8 + struct.unpack("<Q", whole[:8])[0]
    for place in [*range(0, first, 37), *range(first, len(whole), 11)]:
        damaged = bytearray(whole)
        damaged[place] ^= 1
        (tmp_path / WEIGHTS_FILE).write_bytes(damaged)
        try:
            found = AdapterFile.read(tmp_path, spec, MAX_RANK)
        except ConfigError:
            assert place < first or whole[place] != damaged[place]
        else:
            assert found.fingerprint != plain, place
