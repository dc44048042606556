# SPDX-License-Identifier: Apache-2.0
"""Whole engines with adapters: PEFT's greedy tokens in float64, for batches in which every row may
have another adapter or none, wherever the blocks of a prompt come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stratakv.engine.config.lora_config import lora_modules
from stratakv.engine.core.client_calls.deferred import Deferred
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.models.lora.adapter_file import AdapterFile
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.request.core_messages import LoadAdapter
from stratakv.kernels.cpu.library import VARIABLE, Missing, cpu_library

from .leftovers import check_nothing_left, settle
from .peft_adapters import (
    ADAPTERS,
    AdapterFolders,
    adapters_of,
    check_greedy,
    with_one_bit_changed,
)
from .stepping import WAIT_SECONDS
from .test_exactness import Answer, ask, prompt, running_core

BLOCK = 8  # tokens, of `running_core`
BUDGET = 13  # so that chunks end in the middle of blocks
NUM_TOKENS = 8
BASES = list(dict.fromkeys(made.base for made in ADAPTERS.values()))
Wish = tuple[str, list[int]]  # the name of an adapter, or "", and a prompt


@contextmanager
def adapted_core(
    folders: AdapterFolders,
    base: str,
    modules: Mapping[str, Path] | None = None,
    max_slots: int = 8,
    **options: Any,
) -> Iterator[EngineCore]:
    """A core on a base with its adapters, or with `modules`."""
    given = folders.of_base(base) if modules is None else modules
    lora = {"modules": lora_modules("modules", dict(given)), "max_slots": max_slots}
    with running_core(folders.base(base), lora=lora, **options) as core:
        yield core


def wishes_of(base: str, lengths: Sequence[int] = (41, 7)) -> list[Wish]:
    """The same prompts for each adapter of a base and for the base itself, mixed."""
    names = ["", *adapters_of(base)]
    return [(name, prompt(length, length)) for length in lengths for name in names]


def ask_adapted(
    core: EngineCore, wishes: Sequence[Wish], tag: str, session: str = ""
) -> list[Answer]:
    return ask(
        core,
        [text for _, text in wishes],
        tag,
        adapters=[name for name, _ in wishes],
        num_tokens=NUM_TOKENS,
        session=session,
    )


def check_adapted(
    folders: AdapterFolders, base: str, core: EngineCore, wishes: Sequence[Wish], tag: str
) -> list[Answer]:
    """Ask, and check that the answers are PEFT's."""
    answers = ask_adapted(core, wishes, tag)
    for (name, text), answer in zip(wishes, answers, strict=True):
        adapter = folders.adapter(name) if name else None
        check_greedy(folders.base(base), adapter, text, answer.token_ids)
    return answers


def whole(num_tokens: int) -> int:
    """The tokens of such a prompt that a cache can have."""
    return (num_tokens - 1) // BLOCK * BLOCK


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Takes the compiled library away for a test."""

    def take_away() -> None:
        monkeypatch.setenv(VARIABLE, "none")
        cpu_library.cache_clear()
        assert isinstance(cpu_library(), Missing)

    yield take_away
    monkeypatch.undo()
    cpu_library.cache_clear()


@pytest.mark.parametrize("backend", ["auto", "gather", "kernels", "no library"])
@pytest.mark.parametrize("base", BASES)
def test_mixed_batches_in_odd_chunks_and_again_from_the_pool(
    base: str, backend: str, peft_folders: AdapterFolders, no_library: Callable[[], None]
) -> None:
    if backend == "no library":
        no_library()
        backend = "auto"
    wishes = wishes_of(base)
    with adapted_core(
        peft_folders,
        base,
        cache={"num_blocks": 900},
        scheduler={"max_num_batched_tokens": BUDGET},
        model_options={"attention_backend": backend},
    ) as core:
        first = check_adapted(peft_folders, base, core, wishes, "first")
        assert not any(sum(answer.cached.values()) for answer in first), "each has its own blocks"
        assert len({tuple(answer.token_ids) for answer in first}) == len(wishes)
        again = check_adapted(peft_folders, base, core, wishes[::-1], "again")
        assert [a.cached["pool"] for a in again] == [whole(len(text)) for _, text in wishes[::-1]]
        core.step()
        check_nothing_left(core)


def tight(folders: AdapterFolders, base: str, longest: int) -> dict[str, Any]:
    """Settings for a pool that holds one request of so many tokens."""
    num_pages = 0
    if load_model_spec(folders.base(base)).state is not None:
        with running_core(folders.base(base), cache={"num_blocks": 400}) as core:
            assert core._groups.state is not None
            num_pages = core._groups.state.num_pages
    return {
        "cache": {"num_blocks": 1 + -(-longest // BLOCK) + num_pages},
        "model_options": {"max_model_len": longest},
        "scheduler": {"max_num_batched_tokens": 40},
    }


@pytest.mark.parametrize(
    ("base", "backend"),
    [("qwen3", "auto"), ("qwen3_moe", "kernels"), ("qwen3_next-experts", "auto")],
)
def test_blocks_out_of_every_tier_and_under_other_names_after_a_restart(
    base: str, backend: str, peft_folders: AdapterFolders, tmp_path: Path
) -> None:
    wishes = wishes_of(base, (50, 60))
    options = tight(peft_folders, base, 60 + NUM_TOKENS)
    options["model_options"]["attention_backend"] = backend
    offload = {"tiers": ("cpu", "ssd"), "cpu_bytes": 16 * 2**20, "load": "always",
               "ssd_path": tmp_path / "ssd", "ssd_bytes": 64 * 2**20}  # fmt: skip
    with adapted_core(peft_folders, base, offload=offload, **options) as core:
        for turn in range(2):
            for number, wish in enumerate(wishes):
                tag = f"{turn}-{number}-"
                [answer] = check_adapted(peft_folders, base, core, [wish], tag)
                assert answer.cached.get("cpu", 0) == whole(len(wish[1])) * turn
                settle(core)
        check_nothing_left(core)
    renamed = {f"new-{name}": path for name, path in peft_folders.of_base(base).items()}
    options["cache"]["num_blocks"] = 900
    with adapted_core(peft_folders, base, renamed, offload=offload, **options) as core:
        new = [(name and f"new-{name}", text) for name, text in wishes]
        for (name, text), answer in zip(wishes, ask_adapted(core, new, "restart"), strict=True):
            adapter = peft_folders.adapter(name) if name else None
            check_greedy(peft_folders.base(base), adapter, text, answer.token_ids)
            assert answer.cached["ssd"] == whole(len(text))
        settle(core)
        check_nothing_left(core)


def test_adapters_that_differ_in_one_bit_share_nothing_and_equal_ones_all(
    peft_folders: AdapterFolders, tmp_path: Path
) -> None:
    one = peft_folders.adapter("plain")
    modules = {"one": one, "same": one, "near": with_one_bit_changed(one, tmp_path / "near")}
    spec, text = load_model_spec(peft_folders.base("qwen3")), prompt(1, 50)
    prints = {name: AdapterFile.read(path, spec, 8).fingerprint for name, path in modules.items()}
    assert prints["one"] == prints["same"] != prints["near"]
    offload = {"tiers": ("cpu",), "cpu_bytes": 2**24, "load": "always"}
    options = tight(peft_folders, "qwen3", 50 + NUM_TOKENS)
    with adapted_core(peft_folders, "qwen3", modules, offload=offload, **options) as core:
        for name, found in (("one", 0), ("near", 0), ("", 0), ("same", 1), ("near", 1), ("", 1)):
            [answer] = ask_adapted(core, [(name, text)], f"{name}{found}")
            assert sum(answer.cached.values()) == whole(50) * found, name
            settle(core)
            adapter = modules[name] if name else None
            check_greedy(peft_folders.base("qwen3"), adapter, text, answer.token_ids)
        assert core.call("stats", "")["connector"]["tiers"]["cpu"]["loaded_blocks"] >= 12


def test_a_name_that_is_loaded_again_finds_nothing_of_its_predecessor(
    peft_folders: AdapterFolders,
) -> None:
    text = prompt(1, 50)
    with adapted_core(peft_folders, "qwen3", {"adapter": peft_folders.adapter("plain")}) as core:
        for adapter, found in (("plain", 0), ("rslora", 0), ("plain", 1)):
            path = str(peft_folders.adapter(adapter))
            reload_adapter(core, LoadAdapter("adapter", path, replaces=True))
            [answer] = ask_adapted(core, [("adapter", text)], f"{adapter}{found}")
            assert answer.cached["pool"] == whole(50) * found
            base = peft_folders.base("qwen3")
            check_greedy(base, peft_folders.adapter(adapter), text, answer.token_ids)


def reload_adapter(core: EngineCore, message: LoadAdapter) -> None:
    deferred = core.call("load_adapter", msgspec.json.encode(message).decode())
    assert isinstance(deferred, Deferred)
    wait([deferred.future], WAIT_SECONDS)
    deferred.finish(deferred.future)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_change_no_token(method: str, peft_folders: AdapterFolders) -> None:
    """The draft model is the base, so that some of its drafts for adapters are right."""
    speculative: dict[str, Any] = {"method": method, "num_tokens": 3, "adaptive": False}
    if method == "ngram":
        speculative["prompt_lookup_min"] = 1
    else:
        speculative["model"] = peft_folders.base("qwen3")
    wishes = wishes_of("qwen3", (41, 20))
    with adapted_core(peft_folders, "qwen3", speculative=speculative) as core:
        for turn in range(2):
            check_adapted(peft_folders, "qwen3", core, wishes, f"{turn}-")
        assert core.scheduler.speculation is not None
        assert core.scheduler.speculation.stats()["num_drafts"] > 20
        core.step()
        check_nothing_left(core)


@pytest.mark.parametrize(("executor", "max_slots"), [("uni", 1), ("mp", 2)], ids=["one slot", "mp"])
def test_more_adapters_than_slots_take_turns(
    executor: str, max_slots: int, peft_folders: AdapterFolders
) -> None:
    wishes = wishes_of("qwen3")
    with adapted_core(peft_folders, "qwen3", None, max_slots, executor=executor) as core:
        for turn in range(2):
            check_adapted(peft_folders, "qwen3", core, wishes, f"{turn}-")


def test_preempted_requests_keep_their_adapters(peft_folders: AdapterFolders) -> None:
    # Two prompts of 47 tokens fit, and one of their answers does.
    options = tight(peft_folders, "qwen3", 47 + NUM_TOKENS)
    options |= {"cache": {"num_blocks": 14}, "scheduler": {"max_num_batched_tokens": 128}}
    with adapted_core(peft_folders, "qwen3", **options) as core:
        check_adapted(peft_folders, "qwen3", core, wishes_of("qwen3", (47, 46)), "r")
        assert core.scheduler.counts["preemptions"] > 0, "the pool was meant to be too small"


def test_turns_of_a_job_keep_their_blocks_for_their_adapter(peft_folders: AdapterFolders) -> None:
    base, adapter = peft_folders.base("qwen3"), peft_folders.adapter("plain")
    options = {"scheduler": {"policy": "continuum"}, "cache": {"num_blocks": 34}}
    text = prompt(5, 50)
    with adapted_core(peft_folders, "qwen3", **options) as core:
        [first] = ask_adapted(core, [("plain", text)], "first", session="job")
        check_greedy(base, adapter, text, first.token_ids)
        for number in range(4):  # the pool has no room for them and for blocks of others
            ask_adapted(core, [("rslora", prompt(50 + number, 90))], f"other{number}")
        longer = [*text, *first.token_ids, 7, 9]
        [other] = ask_adapted(core, [("", longer)], "other", session="job")
        [again] = ask_adapted(core, [("plain", longer)], "again", session="job")
        assert sum(other.cached.values()) == 0
        check_greedy(base, None, longer, other.token_ids)
        check_greedy(base, adapter, longer, again.token_ids)
        assert core.scheduler.counts["pins"] >= 2
