# SPDX-License-Identifier: Apache-2.0
"""Two models have one name only where all their bytes are equal: checkpoints that differ in next to
nothing, below every place that makes a name."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from stratakv.connector.chunks.model_name import HostModel, name_model
from stratakv.engine import LLM
from stratakv.engine.api.chat_template import ChatTemplate
from stratakv.engine.cache.block_hash import make_block_hasher
from stratakv.engine.config.engine_options import EMBEDDED_MODEL
from stratakv.engine.core import engine_core
from stratakv.engine.models.checkpoint.fingerprint import ModelFiles
from stratakv.engine.models.checkpoint.generation_config import load_default_sampling
from stratakv.engine.models.checkpoint.weights import expected_tensors
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.request.request import Request
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.text.tokenizer import Tokenizer
from stratakv.tiers.block import Identity
from stratakv.tiers.identity.digest_cache import DigestCache
from stratakv.tiers.identity.file_state import FileState
from stratakv.tiers.settings.values import ConfigError

pytestmark = pytest.mark.regression

GIB = 1024**3
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "eos_token_id": 2, "bos_token_id": 1, "use_cache": True,
}  # fmt: skip
ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}  # fmt: skip
CONFIG_CHANGES: tuple[dict[str, Any], ...] = (
    {"rope_theta": 10001.0},
    {"rms_norm_eps": 1e-6},
    {"max_position_embeddings": 255},
    {"eos_token_id": 3},
    {"bos_token_id": None},
    {"tie_word_embeddings": True},
    {"use_cache": False},
    {"torch_dtype": "bfloat16"},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"unknown_to_us": 1},
)
# The published sizes, of which as many layers are taken as fit.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    },
    "Qwen2.5-0.5B": {
        "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896,
        "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True,
    },
    "Llama-3.2-1B": {
        "model_type": "llama", "vocab_size": 128_256, "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
    },
    "Mistral-7B": {
        "model_type": "mistral", "vocab_size": 32_768, "hidden_size": 4096,
        "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "sliding_window": None,
    },
}  # fmt: skip


class Remembering(DigestCache):
    """Remembers young files too, so that whatever changes has to be seen in a file's state."""

    def trusts(self, path: Path) -> bool:
        return True

    def takes(self, state: FileState, now_ns: int) -> bool:
        return True


class Names(NamedTuple):
    """All names that are made of one model directory."""

    engine: str  # the root of block names
    node: tuple[str, ...]  # what `GET /node` tells
    hosts: str  # below vLLM, in both forms, below LMCache and SGLang
    handed_over: tuple[str, ...]  # a prompt's, between nodes, for each form of block hashes


class Checkpoint:
    """A model directory with known places of its tensors."""

    def __init__(self, path: Path, config: dict[str, Any], cache: DigestCache) -> None:
        self.path, self._cache = path, cache
        path.mkdir()
        self.write_config(config)
        self.config = config
        spec = load_model_spec(path)
        start, header = 0, {}
        for name, shape in expected_tensors(spec).items():
            end = start + 2 * _count(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
            start = end
        head = json.dumps(header).encode()
        self.tensors = {
            name: (8 + len(head) + about["data_offsets"][0], about["shape"])
            for name, about in header.items()
        }
        self.weights = path / "model.safetensors"
        with self.weights.open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            file.truncate(8 + len(head) + start)  # a hole: zeros that take no room
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(EMBEDDED_MODEL / name, path)

    def write_config(self, config: dict[str, Any]) -> None:
        (self.path / "config.json").write_text(json.dumps(config))

    @contextmanager
    def with_bytes(self, place: int, content: bytes, *, quietly: bool = False) -> Iterator[None]:
        """Other bytes in the weights; `quietly`: with the file's times set back."""
        before = self._overwrite(place, content, quietly)
        try:
            yield
        finally:
            self._overwrite(place, before, quietly)

    @contextmanager
    def with_text(self, name: str, text: str) -> Iterator[None]:
        """Another text in a file."""
        before = (self.path / name).read_text()
        (self.path / name).write_text(text)
        try:
            yield
        finally:
            (self.path / name).write_text(before)

    def names(self) -> Names:
        """The names of what lies in the directory now."""
        files = ModelFiles.read(self.path, cache=self._cache)
        root = Identity(files.fingerprint, "", "bfloat16", "bfloat16", 16).root()
        tokenizer = Tokenizer.load(self.path)
        template = ChatTemplate.load(self.path, tokenizer)
        defaults = json.dumps(load_default_sampling(self.path))
        return Names(
            root.hex(),
            (files.fingerprint, tokenizer.digest, template.digest if template else "", defaults),
            name_model(HostModel(str(self.path)), cache=self._cache).text,
            tuple(
                Request(
                    "r", [1, 2, 3], SamplingParams(), block_hasher=make_block_hasher(root, 16, form)
                ).prompt_digest()
                for form in ("sha256", "sha256_cbor")
            ),
        )

    def _overwrite(self, place: int, content: bytes, quietly: bool) -> bytes:
        status = self.weights.stat()
        with self.weights.open("r+b") as file:
            file.seek(place)
            before = file.read(len(content))
            file.seek(place)
            file.write(content)
        if quietly:
            os.utime(self.weights, ns=(status.st_atime_ns, status.st_mtime_ns))
        return before


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def changed_weights(model: Checkpoint, rng: random.Random, count: int) -> Iterator[Any]:
    """So many places with other bytes: a whole tensor, a row of one, an element, the last bit of an
    element, half of them with the times set back."""
    tensors = sorted(model.tensors.items())
    rng.shuffle(tensors)
    made = set[tuple[int, bytes]]()
    while len(made) < count:
        name, (place, shape) = tensors[len(made) % len(tensors)]
        total, row = 2 * _count(shape), 2 * shape[-1]
        at, length = rng.choice(
            [
                (0, min(total, 1 << 20)),
                (row * rng.randrange(total // row), row),
                (2 * rng.randrange(total // 2), 2),
                (2 * rng.randrange(total // 2), 1),
            ]
        )
        content = b"\x01" if length == 1 else rng.randbytes(length)
        if (place + at, content) not in made:
            made.add((place + at, content))
            yield name, model.with_bytes(place + at, content, quietly=bool(len(made) % 2))


def check_distinct(seen: dict[str, str], names: Names, what: str) -> None:
    """None of the names has been seen before, of any model."""
    every = (names.engine, str(names.node), names.hosts, *names.handed_over)
    for name in every:
        assert name not in seen, f"{what} has a name of {seen[name]}"
        seen[name] = what


def test_w01_small_models_that_differ_in_next_to_nothing(
    tmp_path: Path, rng: random.Random, scale: str
) -> None:
    count = 2 if scale == "ci" else 75
    cache, seen = Remembering(tmp_path / "cache"), dict[str, str]()
    for kind, architecture in ARCHITECTURES.items():
        config = SHAPE | {"model_type": kind, "architectures": [architecture]}
        if kind == "llama":
            config["attention_bias"] = True
        model = Checkpoint(tmp_path / kind, config, cache)
        check_distinct(seen, model.names(), kind)
        for name, change in changed_weights(model, rng, count):
            with change:
                check_distinct(seen, model.names(), f"{kind} with another {name}")
        changes = rng.sample(CONFIG_CHANGES, 3 if scale == "ci" else len(CONFIG_CHANGES))
        for change in changes:
            with model.with_text("config.json", json.dumps(config | change)):
                check_distinct(seen, model.names(), f"{kind} with {change}")
    assert len(seen) >= 5 * 4 * (1 + count + len(changes))


def test_w01_biases_and_norms_each_by_itself(tmp_path: Path) -> None:
    """As they are trained alone; samples of a file passed them over."""
    config = SHAPE | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    model = Checkpoint(tmp_path / "model", config, Remembering(tmp_path / "cache"))
    small = [name for name, (_, shape) in model.tensors.items() if len(shape) == 1]
    assert {name.rpartition(".")[2] for name in small} == {"bias", "weight"}
    seen = dict[str, str]()
    for name in small:
        with model.with_bytes(model.tensors[name][0], b"\x01"):
            check_distinct(seen, model.names(), name)
    assert len(seen) == 5 * len(small) and len(small) == 2 * (3 + 2) + 1


def test_y01_texts_that_decide_tokens_are_told_to_routers(tmp_path: Path) -> None:
    """And rename no block, which is named by its token ids."""
    config = SHAPE | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    model = Checkpoint(tmp_path / "model", config, Remembering(tmp_path / "cache"))
    before = model.names()
    vocabulary = json.loads((model.path / "tokenizer.json").read_text())
    entries = vocabulary["model"]["vocab"]
    one, other = list(entries)[-2:]
    entries[one], entries[other] = entries[other], entries[one]
    settings = json.loads((model.path / "tokenizer_config.json").read_text())
    changes = {
        "tokenizer.json": json.dumps(vocabulary),
        "tokenizer_config.json": json.dumps(settings | {"chat_template": "{{ messages }}"}),
        "generation_config.json": '{"temperature": 0.25}',
    }
    nodes, hosts = {before.node}, {before.hosts}
    for name, text in changes.items():
        with model.with_text(name, text):
            after = model.names()
        assert (after.engine, after.handed_over) == (before.engine, before.handed_over)
        nodes.add(after.node)
        hosts.add(after.hosts)
    assert len(nodes) == 4
    assert len(hosts) == 4, "a host's model is the whole directory"


@pytest.mark.parametrize("name", PUBLISHED)
def test_w01_published_layouts(name: str, tmp_path: Path, rng: random.Random, scale: str) -> None:
    """As sparse files: a read of a hole costs no disk."""
    most, count = (32 * 1024**2, 2) if scale == "ci" else (2 * GIB, 12)
    config = SHAPE | PUBLISHED[name]
    config["architectures"] = [ARCHITECTURES[config["model_type"]]]
    if scale == "ci":
        config |= {"vocab_size": 512, "intermediate_size": 256}
    layer = (
        2
        * config["hidden_size"]
        * (
            3 * config["intermediate_size"]
            + 2
            * config["head_dim"]
            * (config["num_attention_heads"] + config["num_key_value_heads"])
        )
    )
    ends = 2 * config["hidden_size"] * config["vocab_size"]
    ends *= 1 if config["tie_word_embeddings"] else 2
    fitting = max(1, (most - ends) // (layer + 4 * 2 * config["hidden_size"]) - 1)
    config["num_hidden_layers"] = min(config["num_hidden_layers"], fitting)
    seen = dict[str, str]()
    model = Checkpoint(tmp_path / "model", config, Remembering(tmp_path / "cache"))
    assert model.weights.stat().st_size <= max(most, 96 * 1024**2)
    check_distinct(seen, model.names(), name)
    for tensor, change in changed_weights(model, rng, count):
        with change:
            check_distinct(seen, model.names(), tensor)


def edited_copy(model: Path, copy: Path) -> Path:
    """The model with the embeddings of twenty tokens trained on."""
    shutil.copytree(model, copy)
    weights = load_file(copy / "model.safetensors")
    rows = weights["model.embed_tokens.weight"]
    rows[100:120] += 3 * rows.std() * torch.randn(20, rows.shape[1])
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def answer(model: Path, **options: Any) -> Any:
    prompt = [100 + 7 * i % 20 for i in range(100)]
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    own = {"num_blocks": 30, "max_model_len": 200, "num_threads": 1, "dtype": "float64"}
    with LLM(model, **own, **options) as llm:
        [output] = llm.generate([prompt], sampling)
    return output


def test_w01_blocks_of_a_checkpoint_are_not_served_to_another(
    small_llama: Path, tmp_path: Path
) -> None:
    tiers = {
        "kv_offload": "cpu,ssd", "kv_offload_ssd_path": str(tmp_path / "ssd"),
        "kv_offload_cpu_bytes": "4MiB", "kv_offload_ssd_bytes": "16MiB",
        "kv_offload_load": "always",
    }  # fmt: skip
    copy = edited_copy(small_llama, tmp_path / "copy")
    right = answer(copy).token_ids
    first = answer(small_llama, **tiers)
    assert first.token_ids != right
    again = answer(small_llama, **tiers)
    assert again.cached_tokens_by_tier["ssd"] == 96
    other = answer(copy, **tiers)
    assert (other.token_ids, other.cached_tokens_by_tier["ssd"]) == (right, 0)


def test_w01_an_engine_whose_weights_cannot_be_hashed_does_not_start(
    small_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(DigestCache, "load_digest", lambda cache, *state: None)
    with pytest.raises(ConfigError, match=r"cannot be read \(Input/output error\), and the keys"):
        answer(small_llama, kv_offload="cpu", kv_offload_cpu_bytes="4MiB")


def test_w01_an_engine_whose_weights_change_while_it_starts_does_not_start(
    small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(small_llama, copy)
    load = engine_core.EngineCore._load_model

    def change_and_load(core: Any, num_blocks: int | None) -> Any:
        os.utime(copy / "model.safetensors", ns=(0, 0))
        return load(core, num_blocks)

    monkeypatch.setattr(engine_core.EngineCore, "_load_model", change_and_load)
    with pytest.raises(ConfigError, match="was changed while it was read; start again"):
        answer(copy)
