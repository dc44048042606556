# SPDX-License-Identifier: Apache-2.0
"""An EAGLE head changes how many steps an answer takes, and none of its tokens; and each byte of a
block with a name is a function of that name, whichever way it was computed. A head that says what
the model says has no draft rejected, as long as it is given the right hidden states."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from stratakv.connector.page_keys import pages_of
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.core.setup.model_check import check_model
from stratakv.engine.request.beam_params import BeamSearchParams
from stratakv.engine.request.core_messages import share_prompt
from stratakv.engine.request.request import Request, unpack_token_ids
from stratakv.engine.scheduler.speculation import Speculation
from stratakv.tiers.settings.values import ConfigError

from ...eagle_heads import CIRCLE, make_counting_head, make_counting_model, make_eagle
from ...tiny_models import load_reference, make_llama
from .conftest import VOCAB, config_of, finish, prompt_of, request, run
from .drafting_cores import KINDS, asked_of, core_with, make_kind
from .test_beams import search
from .test_beams import told as beams_told
from .test_speculation import requests, told


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_kind(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def head(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_eagle(tmp_path_factory.mktemp("head"), model)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), vocab_size=VOCAB)


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_counting_model(tmp_path_factory.mktemp("counting"))


@pytest.fixture(scope="module", params=["token", "hidden"])
def counting_head(
    request: pytest.FixtureRequest, counting: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return make_counting_head(tmp_path_factory.mktemp("head"), counting, by=request.param)


def figures_of(core: EngineCore) -> dict[str, Any]:
    assert core.scheduler.speculation is not None
    return dict(core.scheduler.speculation.stats())


def pages_by_key(core: EngineCore) -> dict[bytes, np.ndarray[Any, Any]]:
    """The numbers of all blocks of the pool that have a key, in the places that are in use."""
    runner = core.executor.runner  # type: ignore[attr-defined]
    groups, pool = runner.groups, runner.pool.tensor.numpy()
    draft = runner.pool.pages_of_draft(groups).tensor.shape[1]
    used = np.zeros((len(groups), *pool.shape[1:]), bool)
    for place in groups.places():
        used[place.group, place.in_page] = True
    for place in groups.draft.places:
        used[place.group].reshape(draft, -1)[place.in_page] = True
    cached = pages_of(core.scheduler.manager.pool.resident())
    return {key: pool[each][used[key[-2]]] for each, key, _ in cached}


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Any]:
    with core_with(model, None) as core:
        return told(run(core, *asked_of("")))


@pytest.fixture(scope="module")
def known(model: Path, head: Path, expected: dict[str, Any]) -> dict[bytes, Any]:
    """The pages of all answers, computed as prompts, in one piece each."""
    with core_with(model, head, max_num_batched_tokens=128) as core:
        for asked in asked_of(""):
            whole = unpack_token_ids(asked.prompt_token_ids) + expected[asked.request_id][0]
            run(core, request(asked.request_id, whole, max_tokens=1))
        return pages_by_key(core)


def check_pages(core: EngineCore, known: dict[bytes, Any], at_least: int) -> None:
    """The cached blocks hold what those hold that were computed as prompts."""
    found = pages_by_key(core)
    common = found.keys() & known.keys()
    assert len(common) >= at_least, (len(common), len(found), len(known))
    for name in common:
        np.testing.assert_allclose(found[name], known[name], atol=1e-9)


@pytest.mark.parametrize("options", [
    {"depth": 2, "async_scheduling": True, "max_num_batched_tokens": 11},
    {"attention_backend": "gather", "max_num_seqs": 2},
    {"attention_backend": "kernels", "depth": 2}, {"num_blocks": 14, "max_model_len": 80},
], ids=str)  # fmt: skip
def test_answers_and_blocks_are_those_without_drafts(
    model: Path, head: Path, expected: dict[str, Any], known: dict[bytes, Any],
    options: dict[str, Any],
) -> None:  # fmt: skip
    """The prompts are computed first, and then found in the pool with what was answered."""
    with core_with(model, head, **options) as core:
        for tag in ("", "again"):
            found = told(run(core, *asked_of(tag)))
            assert {name.removeprefix(tag): each for name, each in found.items()} == expected
        check_pages(core, known, 4 if "num_blocks" in options else 12)
        assert figures_of(core)["num_draft_tokens"] > 60


def test_kernel_blocks_and_several_layers(llama: Path, tmp_path: Path, seed: int) -> None:
    head = make_eagle(tmp_path, llama, num_hidden_layers=2, num_key_value_heads=1, head_dim=8,
                      has_bias=True)  # fmt: skip
    asked = requests(random.Random(seed), 12)
    options = {"max_num_seqs": 5, "max_model_len": 160, "num_blocks": 60}
    with core_with(llama, None, **options) as core:
        expected = told(run(core, *asked))
    with core_with(llama, head, kernel_block_size=4, **options) as core:
        assert told(run(core, *asked)) == expected
        assert figures_of(core)["num_draft_tokens"] > 60


def test_blocks_that_a_tier_brings(
    model: Path, head: Path, expected: dict[str, Any], known: dict[bytes, Any]
) -> None:
    tiers = {"kv_offload": "cpu", "kv_offload_cpu_bytes": "8MiB", "kv_offload_load": "always"}
    with core_with(model, head, num_blocks=14, max_model_len=80, **tiers) as core:
        loaded = 0
        for turn in range(2):
            for asked in asked_of(f"{turn} "):
                found = run(core, asked)
                assert told(found)[asked.request_id] == expected[asked.request_id[2:]]
                loaded += found[asked.request_id].cached_tokens_by_tier.get("cpu", 0)
            check_pages(core, known, 2)
        assert loaded >= 64


@pytest.mark.parametrize("options", [
    {}, {"max_num_batched_tokens": 11}, {"num_blocks": 14, "max_model_len": 96},
    {"depth": 2, "async_scheduling": True, "dtype": "bfloat16"},
    {"dtype": "float32", "attention_backend": "kernels"},
    {"kv_offload": "cpu", "kv_offload_cpu_bytes": "8MiB", "kv_offload_load": "always",
     "num_blocks": 14, "max_model_len": 96},
], ids=str)  # fmt: skip
def test_a_head_that_knows_the_model_has_no_draft_rejected(
    counting: Path, counting_head: Path, options: dict[str, Any]
) -> None:
    """Not of prompts, not behind blocks that are found or loaded, not behind preemptions."""
    prompts = [[7, 3, 50], [*range(20, 36)], [*range(20, 36), 90, 80], [*range(20, 44)]]
    with core_with(counting, counting_head, **options) as core:
        for turn in range(2):
            asked = [request(f"{turn} {i}", p, max_tokens=40) for i, p in enumerate(prompts)]
            for name, (token_ids, *_) in told(run(core, *asked)).items():
                first = prompts[int(name[-1])][-1] + 1
                assert token_ids == [(first + i) % CIRCLE for i in range(40)]
        figures = figures_of(core)
        assert figures["num_accepted_tokens"] == figures["num_draft_tokens"] >= 100, figures


def test_blocks_with_accepted_drafts_are_those_of_a_prompt(
    counting: Path, counting_head: Path
) -> None:
    """K and V that were computed of the head's own states are computed again of the model's."""
    with core_with(counting, counting_head) as core:
        said = run(core, request("a", [5, 6, 7], max_tokens=60))["a"].new_token_ids
        figures, pages = figures_of(core), pages_by_key(core)
    assert figures["num_accepted_tokens"] >= 40
    with core_with(counting, counting_head) as core:
        run(core, request("a", [5, 6, 7, *said], max_tokens=1))
        check_pages(core, pages, 7)


def test_accepted_drafts_are_counted_by_their_places(counting: Path, tmp_path: Path) -> None:
    head = make_counting_head(tmp_path, counting, by="hidden")
    with core_with(counting, head) as core:
        run(core, request("a", [5, 6, 7], max_tokens=1 + 4 * 6))
        figures = figures_of(core)
    assert figures["num_drafts"] == 4
    assert list(core.scheduler.speculation.accepted_at) == [4] * 5  # type: ignore[union-attr]


def test_a_head_reads_the_hidden_state_of_the_token_before(counting: Path, tmp_path: Path) -> None:
    """Rows that are given another state have all drafts rejected: the first says the last token."""
    head = make_counting_head(tmp_path, counting, by="hidden")
    file = head / "model.safetensors"
    tensors = load_file(file)
    tensors["fc.weight"] = torch.cat((torch.zeros(CIRCLE, CIRCLE), torch.eye(CIRCLE)), 1)
    save_file(tensors, file)
    with core_with(counting, head) as core:
        found = run(core, request("a", [5, 6, 7], max_tokens=20))["a"].new_token_ids
        assert found == list(range(8, 28))
        figures = figures_of(core)
    assert figures["num_accepted_tokens"] == 0 < figures["num_draft_tokens"]


def test_forks_share_the_hidden_states_of_their_prompt(counting: Path, tmp_path: Path) -> None:
    head = make_counting_head(tmp_path, counting, by="hidden")
    prompt = [*range(30, 51)]
    asked = [request(str(i), prompt, max_tokens=20) for i in range(3)]
    with core_with(counting, head) as core:
        share_prompt(asked)
        found = told(finish(core, core.add(asked[0]), len(asked)))
        assert core.scheduler.counts["forks"] == 2
        figures = figures_of(core)
    assert all(each[0] == list(range(51, 71)) for each in found.values())
    assert figures["num_accepted_tokens"] == figures["num_draft_tokens"] >= 40


def test_an_answer_that_no_drafts_are_wanted_of_is_computed_all_the_same(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are those of a prompt, whatever was in the pool before."""
    most_drafts_of = Speculation.most_drafts_of

    def few(speculation: Speculation, request: Request) -> int:
        return 0 if request.num_tokens > 20 else most_drafts_of(speculation, request)

    head, prompt = make_eagle(tmp_path, llama), prompt_of(13)
    with monkeypatch.context() as patched:
        patched.setattr(Speculation, "most_drafts_of", few)
        with core_with(llama, head, max_num_batched_tokens=11) as core:
            said = run(core, request("a", prompt, max_tokens=90))["a"].new_token_ids
            found = pages_by_key(core)
    with core_with(llama, head, max_num_batched_tokens=128) as core:
        run(core, request("a", prompt + said, max_tokens=1))
        check_pages(core, found, 12)


def test_blocks_that_beams_have_begun_for_each_other(llama: Path, tmp_path: Path) -> None:
    """A beam goes on in the blocks of one that has ended, the last of which is not full."""
    head, prompt = make_eagle(tmp_path, llama), prompt_of(13)
    params = BeamSearchParams(beam_width=3, max_tokens=25, ignore_eos=True)
    with core_with(llama, head) as core:
        found = beams_told(core, search("a", prompt, params), count=3)
        pages = pages_by_key(core)
    with core_with(llama, head, max_num_batched_tokens=128) as core:
        for name, output in found.items():
            run(core, request(name, prompt + output.new_token_ids, max_tokens=1))
        check_pages(core, pages, 4)


@pytest.mark.parametrize(("name", "config", "words"), [
    ("hidden", {"hidden_size": 32}, r"is for a model of 32 numbers of a hidden state .*has 48"),
    ("vocab", {"vocab_size": 300}, r"is for a model of 300 tokens \(vocab_size\), .* has 257"),
    ("third", {"architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE-3 head, .* EAGLE-1 heads"),
    ("wide", {"draft_vocab_size": 32000}, "is an EAGLE-3 head"),
    ("typed", {"model_type": "eagle3"}, "is an EAGLE-3 head"),
    ("kind", {"architectures": ["MedusaModel"], "model_type": "medusa"},
     r"architectures must be EagleLlamaForCausalLM, LlamaForCausalLMEagle or LlamaForCausalLM "),
    ("quantised", {"quantization_config": {"bits": 4}}, "quantization_config must be absent"),
])  # fmt: skip
def test_a_head_of_another_shape_is_refused(
    llama: Path, tmp_path: Path, name: str, config: dict[str, Any], words: str
) -> None:
    head = make_eagle(tmp_path / name, llama)
    fields = json.loads((head / "config.json").read_text()) | config
    (head / "config.json").write_text(json.dumps(fields))
    options = {"speculative_model": str(head), "speculative_method": "eagle"}
    with pytest.raises(ConfigError, match=words):
        check_model(config_of(llama, **options))
    with pytest.raises(ConfigError, match=words):
        EngineCore(config_of(llama, **options))


@pytest.mark.parametrize(("change", "words"), [
    ({"fc.weight": None}, "lacks the tensor 'fc.weight', so it is no EAGLE head"),
    ({"fc.weight": torch.zeros(48, 144)}, r"is an EAGLE-3 head: its 'fc.weight' of \[48, 144\]"),
    ({"fc.weight": torch.zeros(48, 95)}, r"fc.weight must have shape \[48, 96\] .*not \[48, 95\]"),
    ({"fc.weight": torch.zeros(48, 96, dtype=torch.int8)}, "must be one of F64, .* not I8"),
    ({"layers.0.mlp.up_proj.weight": None}, "lacks the tensor .*mlp.up_proj.weight"),
    ({"layers.0.input_layernorm.weight": torch.ones(48)}, "holds the tensor .*input_layernorm"),
], ids=lambda given: str(given)[:40])  # fmt: skip
def test_weights_that_are_no_head_are_refused(
    llama: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    head = make_eagle(tmp_path, llama)
    stored = load_file(head / "model.safetensors") | change
    file = head / "model.safetensors"
    save_file({name: each for name, each in stored.items() if each is not None}, file)
    options = {"speculative_model": str(head)}
    with pytest.raises(ConfigError, match=words):
        check_model(config_of(llama, **options))
    with pytest.raises(ConfigError, match=words):
        EngineCore(config_of(llama, **options))


@pytest.mark.parametrize(("config", "method"), [
    ({}, None), ({"architectures": ["LlamaForCausalLMEagle"], "model_type": "llama"}, None),
    ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "eagle"),
])  # fmt: skip
def test_a_head_is_known_by_its_config_or_by_the_method(
    llama: Path, tmp_path: Path, config: dict[str, Any], method: str | None
) -> None:
    """Its embedding and its output matrix, where it brings them, are left alone."""
    head = make_eagle(tmp_path, llama, **config)
    file = head / "model.safetensors"
    copies = dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), torch.zeros(VOCAB, 48))
    save_file(load_file(file) | {name: each.clone() for name, each in copies.items()}, file)
    options = {} if method is None else {"speculative_method": method}
    given = config_of(llama, speculative_model=str(head), **options)
    assert given.speculative.method == "eagle"
    check_model(given)
    with core_with(llama, head, **options) as core:
        run(core, request("a", prompt_of(9), max_tokens=20))
        assert figures_of(core)["num_draft_tokens"] > 0


def test_a_shape_that_lies_in_an_object_of_its_own(llama: Path, tmp_path: Path) -> None:
    head = make_eagle(tmp_path, llama)
    fields = json.loads((head / "config.json").read_text())
    outer = {"architectures": ["EAGLEModel"], "model_type": "eagle", "model": fields}
    (head / "config.json").write_text(json.dumps(outer))
    check_model(config_of(llama, speculative_model=str(head)))


def test_methods_that_do_not_fit_the_model_that_is_named(llama: Path, tmp_path: Path) -> None:
    head = make_eagle(tmp_path / "head", llama)
    for draft, method, words in (
        (head, "draft_model", "is an EAGLE head, no whole model; give --speculative-method eagle"),
        (llama, "eagle", "lacks the tensor 'fc.weight', so it is no EAGLE head"),
    ):
        given = config_of(llama, speculative_model=str(draft), speculative_method=method)
        with pytest.raises(ConfigError, match=words):
            check_model(given)
        with pytest.raises(ConfigError, match=words):
            EngineCore(given)
    with pytest.raises(ConfigError, match="--speculative-method eagle and no draft model"):
        config_of(llama, speculative_method="eagle")


def test_an_engine_finds_no_blocks_of_one_with_another_head(llama: Path, tmp_path: Path) -> None:
    heads = [None, *[make_eagle(tmp_path / str(seed), llama, seed) for seed in range(2)]]
    names = set()
    for head in heads:
        with core_with(llama, head) as core:
            names.add(core.ready().identity["fingerprint"])
    assert len(names) == len(heads)


def test_slots_behind_the_context_of_the_head_hold_zeros(llama: Path, tmp_path: Path) -> None:
    head = make_eagle(tmp_path, llama, max_position_embeddings=40)
    with core_with(llama, head, max_num_batched_tokens=16) as core:
        runner = core.executor.runner  # type: ignore[attr-defined]
        pages = runner.pool.pages_of_draft(runner.groups)
        pages.tensor[1:] = 1e9
        core.add(request("a", prompt_of(70), max_tokens=20))
        while core.scheduler.requests["a"].num_tokens < 85:
            core.step()
        blocks = runner.batch.tables[0].array[0, :10].astype(np.int64)
        kept = pages.tensor[blocks, pages.places[0].in_page]
        assert not kept[0, :, 0].any() and not kept[5:].any()
        assert kept[0, :, 1:].any(-1).all() and kept[1:5].any(-1).all()
        assert kept.abs().max() < 1e6
        finish(core, [], 1)
        assert figures_of(core)["num_draft_tokens"] == 0


def test_numbers_are_those_of_the_formula(llama: Path, tmp_path: Path) -> None:
    """Slot i holds K and V of (token i, hidden state i - 1), slot 0 zeros; drafts are what the
    layer and the model's output matrix say of the last slot."""
    head = make_eagle(tmp_path, llama, has_bias=True)
    prompt = prompt_of(24)
    with core_with(llama, head, max_num_batched_tokens=64) as core:
        runner = core.executor.runner  # type: ignore[attr-defined]
        core.add(request("a", prompt, max_tokens=20))
        drafts: list[int] = []
        while not drafts:
            core.step()
            asked = core.scheduler.requests["a"]
            drafts = list(asked.draft_token_ids)
        tokens = [*prompt, asked.output_token_ids[0]]
        pages = runner.pool.pages_of_draft(runner.groups)
        blocks = runner.batch.tables[0].array[0, :3].astype(np.int64)
        kept = pages.tensor[blocks, pages.places[0].in_page].clone()
        finish(core, [], 1)
    with torch.inference_mode():
        reference = load_reference(llama)
        states = reference.model(torch.tensor([prompt])).last_hidden_state[0]
        embedded = reference.model.embed_tokens(torch.tensor(tokens))
        said, keys, values = eagle_formula(head, embedded[1:], states)
        expected = int((said @ reference.lm_head.weight.T).argmax())
    k, v = (kept[:, part].reshape(24, 2, 16) for part in (0, 1))
    assert not k[0].any() and not v[0].any()
    torch.testing.assert_close(k[1:], keys[:23], atol=1e-5, rtol=0)  # its norms are of float32
    torch.testing.assert_close(v[1:], values[:23], atol=1e-5, rtol=0)  # its norms are of float32
    assert drafts[0] == expected


def eagle_formula(
    head: Path, embedded: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The hidden state of the last pair, and K and V `[pairs, heads, 16]` of all, whose positions
    begin at 1."""
    w = {name: each.double() for name, each in load_file(head / "model.safetensors").items()}
    layer = {name.removeprefix("layers.0."): each for name, each in w.items()}
    x = torch.cat((embedded, states), 1) @ w["fc.weight"].T + w["fc.bias"]
    count = len(x)
    angles = torch.arange(1, count + 1, dtype=torch.float32)[:, None] * (
        1.0 / 10000.0 ** (torch.arange(0, 16, 2).float() / 16)
    )
    cos, sin = angles.cos().double()[:, None], angles.sin().double()[:, None]

    def turned(y: torch.Tensor) -> torch.Tensor:
        a, b = y[..., :8], y[..., 8:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    q = turned((x @ layer["self_attn.q_proj.weight"].T).view(count, 4, 16))
    k = turned((x @ layer["self_attn.k_proj.weight"].T).view(count, 2, 16))
    v = (x @ layer["self_attn.v_proj.weight"].T).view(count, 2, 16)
    mixed = []
    for each in range(4):
        scores = torch.cat((torch.zeros(1).double(), k[:, each // 2] @ q[-1, each] / 4.0))
        mixed.append(scores.softmax(0)[1:] @ v[:, each // 2])
    y = x[-1] + torch.cat(mixed) @ layer["self_attn.o_proj.weight"].T
    normed = y * (y.square().mean() + 1e-6).rsqrt() * layer["post_attention_layernorm.weight"]
    gate = torch.nn.functional.silu(normed @ layer["mlp.gate_proj.weight"].T)
    inner = gate * (normed @ layer["mlp.up_proj.weight"].T)
    return y + inner @ layer["mlp.down_proj.weight"].T, k, v
