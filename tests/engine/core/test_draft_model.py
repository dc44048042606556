# SPDX-License-Identifier: Apache-2.0
"""A draft model changes how many steps an answer takes, and none of its tokens. One that is the
model itself proposes what the model says, as long as its K and V are those of the tokens before:
then no draft is ever rejected, whatever brought them."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.core.setup.model_check import find_draft
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.request.core_messages import share_prompt
from stratakv.engine.request.request import Request
from stratakv.engine.scheduler.speculation import Speculation
from stratakv.tiers.settings.values import ConfigError

from ...tiny_models import make_llama
from .conftest import VOCAB, config_of, finish, prompt_of, request, run
from .drafting_cores import KINDS, asked_of, core_with, make_kind
from .test_eagle import pages_by_key
from .test_speculation import requests, told

LARGE = {"num_key_value_heads": 3, "head_dim": 32}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_kind(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Any]:
    with core_with(model, None) as core:
        return told(run(core, *asked_of("")))


def check(core: EngineCore, expected: dict[str, Any], tag: str = "") -> None:
    found = told(run(core, *asked_of(tag)))
    assert {name.removeprefix(tag): each for name, each in found.items()} == expected


def check_drafts(core: EngineCore, at_least: int) -> None:
    assert core.scheduler.speculation is not None
    figures = core.scheduler.speculation.stats()
    assert figures["num_accepted_tokens"] == figures["num_draft_tokens"] >= at_least, figures


@pytest.mark.parametrize("options", [
    {"depth": 2, "async_scheduling": True}, {"max_num_batched_tokens": 11},
    {"attention_backend": "gather"}, {"attention_backend": "kernels", "depth": 2},
    {"kernel_block_size": 4}, {"max_num_seqs": 2}, {"num_blocks": 14, "max_model_len": 80},
], ids=str)  # fmt: skip
def test_no_draft_of_the_model_itself_is_rejected(
    model: Path, expected: dict[str, Any], options: dict[str, Any]
) -> None:
    """The prompts are computed first, and then found in the pool with what was answered."""
    with core_with(model, model, **options) as core:
        check(core, expected)
        check(core, expected, "again")
        check_drafts(core, 60)


def test_nor_behind_blocks_that_a_tier_brings(model: Path, expected: dict[str, Any]) -> None:
    tiers = {"kv_offload": "cpu", "kv_offload_cpu_bytes": "8MiB", "kv_offload_load": "always"}
    with core_with(model, model, num_blocks=14, max_model_len=80, **tiers) as core:
        loaded = 0
        for turn in range(2):
            for asked in asked_of(f"{turn} "):
                found = run(core, asked)
                assert told(found)[asked.request_id] == expected[asked.request_id[2:]]
                loaded += found[asked.request_id].cached_tokens_by_tier.get("cpu", 0)
        assert loaded >= 64
        check_drafts(core, 60)


def test_nor_of_requests_that_share_their_blocks(model: Path, expected: dict[str, Any]) -> None:
    """The requests answer one prompt, each with other words."""
    prompt = prompt_of(37)
    asked = [
        request(str(i), prompt, max_tokens=20, logit_bias=dict.fromkeys(range(i, VOCAB, 4), 90.0))
        for i in range(4)
    ]
    with core_with(model, None) as core:
        alone = told(run(core, *asked))
    with core_with(model, model) as core:
        share_prompt(asked)
        assert told(finish(core, core.add(asked[0]), len(asked))) == alone
        assert core.scheduler.counts["forks"] == 3
        figures = core.scheduler.speculation.stats()  # type: ignore[union-attr]
        assert figures["num_draft_tokens"] > 60  # it does not know which words are allowed


def test_an_answer_that_no_drafts_are_wanted_of_is_left_and_caught_up_with(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model's part of its blocks holds zeros, and nothing that was there before."""
    most_drafts_of = Speculation.most_drafts_of

    def few(speculation: Speculation, request: Request) -> int:
        is_left = 20 < request.num_tokens < 75
        return 0 if is_left else most_drafts_of(speculation, request)

    monkeypatch.setattr(Speculation, "most_drafts_of", few)
    prompt, said = prompt_of(13), []
    with core_with(tiny_model, None) as core:
        expected = run(core, request("a", prompt, max_tokens=90))["a"].new_token_ids
    with core_with(tiny_model, tiny_model, max_num_batched_tokens=11) as core:
        runner = core.executor.runner  # type: ignore[attr-defined]
        pages = runner.pool.pages_of_draft(runner.groups)
        pages.tensor[1:] = float("nan")
        core.add(request("a", prompt, max_tokens=90))
        num_left = 0
        while core.scheduler.requests:
            [asked] = core.scheduler.requests.values()
            if asked.num_tokens == 74:
                left = runner.batch.tables[0].array[0, 4:9].astype(int)
                for group, place in pages.places:
                    assert group == 0
                    num_left += int(not pages.tensor[left, place].any())
            said += [token for output in core.step() for token in output.new_token_ids]
        check_drafts(core, 10)
        assert num_left == len(pages.places)
    assert said == expected


@pytest.mark.parametrize("options", [
    {}, {"depth": 2, "async_scheduling": True, "max_num_batched_tokens": 11},
    {"kernel_block_size": 4},
], ids=str)  # fmt: skip
def test_beyond_the_context_of_the_draft_model_a_block_keeps_nothing_of_another_text(
    model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """The cached blocks are those of an engine that has had no other text, byte for byte."""
    draft = make_llama(tmp_path, seed=5, vocab_size=VOCAB, max_position_embeddings=44)
    asked = request("own", prompt_of(120, 9), max_tokens=7)
    others = [request(f"{i}", prompt_of(43, i), max_tokens=1, cache_salt="other") for i in range(6)]
    options = {"max_model_len": 160, "num_blocks": 22, **options}
    found = []
    for before in ([], others):
        with core_with(model, draft, **options) as core:
            runner = core.executor.runner  # type: ignore[attr-defined]
            pages = runner.pool.pages_of_draft(runner.groups).tensor
            run(core, *before)
            assert pages[1:].flatten(1).any(1).sum() >= (20 if before else 0)
            run(core, asked)
            found.append(pages_by_key(core))
    new, reused = found
    common = new.keys() & reused.keys()
    assert len(common) >= 12
    assert all(new[name].tobytes() == reused[name].tobytes() for name in common)


@pytest.mark.parametrize(("model", "shape", "backend"), [
    ("full", {"num_key_value_heads": 1}, "kernels"),
    ("full", {"max_position_embeddings": 40}, "auto"),
    ("full", {"num_hidden_layers": 1, "head_dim": 8}, "gather"), ("full", LARGE, "auto"),
    ("windows", {"head_dim": 8}, "auto"), ("both", {"num_key_value_heads": 1}, "auto"),
    ("both", LARGE, "auto"),
], ids=str, indirect=["model"])  # fmt: skip
def test_a_model_of_any_shape_may_propose(
    model: Path, tmp_path: Path, shape: dict[str, Any], backend: str, seed: int
) -> None:
    draft = make_llama(tmp_path, seed=5, **{"vocab_size": VOCAB, **shape})
    if shape is LARGE and load_model_spec(model).architecture == "Qwen2ForCausalLM":
        with pytest.raises(ConfigError, match="layer of the draft model takes 12288 bytes"):
            EngineCore(config_of(model, speculative_model=str(draft)))
        return
    asked = requests(random.Random(seed), 12)
    options = {"max_num_seqs": 5, "max_model_len": 160, "num_blocks": 60}
    with core_with(model, None, **options) as core:
        expected = told(run(core, *asked))
    with core_with(model, draft, **options, attention_backend=backend) as core:
        assert told(run(core, *asked)) == expected
        figures = core.scheduler.speculation.stats()  # type: ignore[union-attr]
        assert figures["num_draft_tokens"] > 100


def test_tokens_that_only_one_of_the_models_has(tiny_model: Path, tmp_path: Path) -> None:
    """Rows of a vocabulary that no text uses, which a client can name all the same."""
    paths = []
    for size in (VOCAB, VOCAB + 7):
        paths.append(make_llama(tmp_path / str(size), seed=5, vocab_size=size))
        shutil.copy(tiny_model / "tokenizer.json", paths[-1])
    asked = [request(str(i), [*prompt_of(9, i), VOCAB + i - 1], max_tokens=12) for i in range(4)]
    for model, draft in (paths, paths[::-1]):
        fitting = asked if model == paths[1] else asked[:1]
        with core_with(model, None) as core:
            expected = told(run(core, *fitting))
        with core_with(model, draft) as core:
            assert told(run(core, *fitting)) == expected


def test_an_engine_finds_no_blocks_of_one_with_another_draft_model(
    tiny_model: Path, tmp_path: Path
) -> None:
    drafts = [None, tiny_model, make_llama(tmp_path, vocab_size=VOCAB)]
    names = set()
    for draft in drafts:
        with core_with(tiny_model, draft) as core:
            names.add(core.ready().identity["fingerprint"])
    assert len(names) == len(drafts)


def test_other_vocabularies_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    bare = make_llama(tmp_path / "bare", vocab_size=VOCAB)
    smaller = make_llama(tmp_path / "smaller", vocab_size=VOCAB - 1)
    with pytest.raises(ConfigError, match=r"smaller has another vocabulary .*256 tokens against"):
        find_draft(config_of(bare, speculative_model=str(smaller)), load_model_spec(bare))
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    words = json.loads((other / "tokenizer.json").read_text())
    ids = words["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (other / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(ConfigError, match=r"another vocabulary .*the id of 'a' is"):
        find_draft(config_of(tiny_model, speculative_model=str(other)), load_model_spec(tiny_model))
    for path in (tiny_model, bare):
        found = find_draft(config_of(path, speculative_model=str(bare)), load_model_spec(path))
        assert found is not None and found.path == bare


@pytest.mark.parametrize(("given", "words"), [
    ({"speculative_method": "draft_model"}, "no draft model do not go together"),
    ({"speculative_method": "ngram", "speculative_model": "."}, "do not go together"),
    ({"speculative_model": "/nowhere"}, "/nowhere"),
    ({"speculative_model": ".", "prompt_lookup_min": 2}, "a draft model proposes"),
])  # fmt: skip
def test_settings_that_contradict_each_other(
    tiny_model: Path, given: dict[str, Any], words: str
) -> None:
    if given.get("speculative_model") == ".":
        given = given | {"speculative_model": str(tiny_model)}
    with pytest.raises(ConfigError, match=words):
        config_of(tiny_model, **given)
