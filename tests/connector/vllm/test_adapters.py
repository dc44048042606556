# SPDX-License-Identifier: Apache-2.0
"""StrataConnector and LoRA adapters, in the host made of vLLM's signatures. Its forward pass writes
bytes that follow from the adapter's content and compares those it finds, so that a block of another
content fails the test."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .adapter_files import make_adapter
from .fake_connector_host import ConnectorHost, host, newest, vllm_config
from .fake_request import Request
from .fake_scheduler import Vllm, token_bytes
from .test_connector import SLAB, prompt, push_out, stats_of, with_ssd
from .test_connector_parts import MODELS, blocks_for

__all__ = ["host", "newest"]

WHOLE = 20  # tokens of a prompt of 21, in whole blocks
WEIGHTS = "adapter_model.safetensors"


class AdaptedVllm(Vllm):
    """A vLLM that reads an adapter's files once for each id, or in each step with load_inplace.
    While it does not compare, it may compute behind bytes of another content, and what comes out of
    that is of neither."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.loaded: dict[int, bytes] = {}
        self.before_step: Callable[[], None] = lambda: None

    def _bytes_of(self, request: Request) -> np.ndarray[Any, Any]:
        lora = request.lora_request
        if lora is None:
            return token_bytes(request.all_token_ids)
        if lora.lora_int_id not in self.loaded or lora.load_inplace:
            path = Path(lora.lora_path) / WEIGHTS
            content = path.read_bytes() if path.exists() else b"from the Hub"
            self.loaded[lora.lora_int_id] = content
        content = self.loaded[lora.lora_int_id] + (b"" if self.compares else b"mixed")
        return token_bytes(request.all_token_ids, content)

    def _execute(self, *args: Any) -> Any:
        self.before_step()
        return super()._execute(*args)

    def forget(self) -> None:
        """Empty vLLM's own cache, as if other requests had pushed all out."""
        push_out(self)
        assert self.pool.reset_prefix_cache()


Make = Callable[..., AdaptedVllm]


@pytest.fixture
def make_vllm(newest: ConnectorHost) -> Iterator[Make]:
    made: list[AdaptedVllm] = []

    def make(settings: dict[str, Any] = SLAB) -> AdaptedVllm:
        made.append(AdaptedVllm(newest, settings))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def lora(number: int, path: Path | str, name: str = "ann", *, inplace: bool = False) -> Any:
    """Return what vLLM's LoRARequest has."""
    return types.SimpleNamespace(
        lora_name=name, name=name, lora_int_id=number, adapter_id=number,
        lora_path=str(path), path=str(path), load_inplace=inplace,
    )  # fmt: skip


def refused(vllm: Vllm) -> int:
    count: int = stats_of(vllm)["failures"].get("adapter", 0)
    return count


def test_what_is_read_of_the_host_is_there(host: ConnectorHost) -> None:
    assert "_block_hasher" in host.record["classes"]["Request"]["attributes"]
    assert "extra_keys" in host._fields("BlockStored")


@pytest.mark.parametrize("is_restarted", [False, True])
def test_keys_have_the_content_and_not_the_name(
    make_vllm: Make, tmp_path: Path, is_restarted: bool
) -> None:
    settings = with_ssd(tmp_path)
    vllm = make_vllm(settings)
    old = make_adapter(tmp_path / "old", 1)
    assert vllm.run("cold", prompt(1), lora=lora(1, old)).num_external == 0
    vllm.forget()
    if is_restarted:
        vllm.stop()
        vllm = make_vllm(settings)
    copy, other = make_adapter(tmp_path / "copy", 1), make_adapter(tmp_path / "other", 2)
    for number, (path, name, wanted) in enumerate(
        [
            (old, "ann", WHOLE),
            (copy, "ann", WHOLE),
            (copy, "bob", WHOLE),
            (other, "ann", 0),
            (other, "ann", WHOLE),
            (None, "", 0),
            (old, "ann", 0),
            (copy, "ann", WHOLE),
        ]
    ):
        if number == 6:
            make_adapter(old, 3)
        adapter = None if path is None else lora(10 + number, path, name)
        assert vllm.run(f"{number}", prompt(1), lora=adapter).num_external == wanted, number
        vllm.forget()
    assert refused(vllm) == 0
    assert not vllm.connector._scheduler.is_broken


@pytest.mark.parametrize("kind", ["on the Hub", "broken", "changed", "another path"])
def test_unknown_content_is_neither_stored_nor_loaded(
    make_vllm: Make, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    vllm = make_vllm()
    folder = make_adapter(tmp_path / "it", 1)
    adapter = lora(1, folder)
    if kind == "on the Hub":
        adapter = lora(1, "org/adapter")
    elif kind == "broken":
        (folder / "adapter_config.json").write_text("{")
    else:
        vllm.run("before", prompt(1), lora=adapter)
        vllm.forget()
        if kind == "changed":
            make_adapter(folder, 2)
        else:
            adapter = lora(1, make_adapter(tmp_path / "other", 2))
    stored = stats_of(vllm)["stored_blocks"]
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            request = vllm.run(f"{number}", prompt(1 + number // 2), lora=adapter)
            assert request.num_external == 0
            assert vllm.pool.reset_prefix_cache()
    assert stats_of(vllm)["stored_blocks"] == stored
    assert refused(vllm) == 3
    assert caplog.text.count("is computed without StrataKV") == 1
    # A new id is read anew; vLLM reads in each step what comes with load_inplace.
    if kind == "changed":
        for adapter in (lora(2, folder), lora(1, folder, inplace=True)):
            vllm.run(f"again {adapter.lora_int_id}", prompt(9), lora=adapter)
            vllm.forget()
        assert vllm.run("found", prompt(9), lora=adapter).num_external == WHOLE
    assert not vllm.connector._scheduler.is_broken


@pytest.mark.parametrize("is_disk", [False, True])
def test_files_that_change_beside_a_request(make_vllm: Make, tmp_path: Path, is_disk: bool) -> None:
    """The files change when a step has been scheduled that ends a block. vLLM may read them before
    or after, so no block of that id is stored any more, nor the blocks that it cached last."""
    vllm = make_vllm(with_ssd(tmp_path) if is_disk else SLAB)
    folder = make_adapter(tmp_path / "it", 1)
    adapter = lora(1, folder, inplace=True)
    request = vllm.add("long", prompt(1), max_tokens=15, lora=adapter)
    while request.num_computed_tokens < 23:
        vllm.step()

    def change() -> None:
        make_adapter(folder, 2)
        vllm.compares = False
        vllm.before_step = lambda: None

    vllm.before_step = change
    vllm.run_all()
    push_out(vllm)
    vllm.compares = True
    assert vllm.pool.reset_prefix_cache()
    for number, path in enumerate([folder, make_adapter(tmp_path / "copy", 1)]):
        tokens = request.all_token_ids
        found = vllm.run(f"{number}", tokens, lora=lora(2 + number, path)).num_external
        assert found == (WHOLE if number and is_disk else 0)
        vllm.forget()
    assert refused(vllm) == 0


def test_blocks_behind_a_stale_prefix_are_not_stored(make_vllm: Make, tmp_path: Path) -> None:
    """vLLM finds its blocks by name and path, so after a reload from one path it computes behind
    blocks of the old content."""
    vllm = make_vllm()
    folder = make_adapter(tmp_path / "it", 1)
    vllm.run("old", prompt(1), lora=lora(1, folder))
    make_adapter(folder, 2)
    vllm.compares = False
    longer = prompt(1) + prompt(2)[:15]
    assert vllm.run("mixed", longer, lora=lora(2, folder)).num_external == 0
    push_out(vllm)
    assert vllm.pool.reset_prefix_cache()
    vllm.compares = True
    assert vllm.run("new", longer, lora=lora(2, folder)).num_external == 0
    vllm.forget()
    assert vllm.run("again", longer, lora=lora(2, folder)).num_external == 36 - 36 % 4 - 4
    old = make_adapter(tmp_path / "old", 1)
    assert vllm.run("copy", prompt(1), lora=lora(3, old)).num_external == WHOLE


@pytest.mark.parametrize(
    "kind", ["full and windowed", "states and full", "halves, quarters and states"]
)
def test_several_cache_groups(newest: ConnectorHost, tmp_path: Path, kind: str) -> None:
    specs = MODELS[kind]
    num_blocks = 1 + sum(blocks_for(spec, 11) for spec in specs)
    vllm = AdaptedVllm(newest, SLAB | {"cpu_bytes": "16MiB"}, num_blocks, specs=specs)
    first, second = (make_adapter(tmp_path / f"{seed}", seed) for seed in (1, 2))
    base = vllm.run("base", prompt(1)).num_external
    for number, path in enumerate([first, second, first, second]):
        push_out(vllm)
        assert vllm.pool.reset_prefix_cache()
        found = vllm.run(f"{number}", prompt(1), lora=lora(number, path)).num_external
        assert (found > 0) == (number > 1)
    push_out(vllm)
    assert vllm.pool.reset_prefix_cache()
    assert vllm.run("again", prompt(1)).num_external > base == 0
    vllm.stop()


def test_events_have_name_and_fingerprint(newest: ConnectorHost, tmp_path: Path) -> None:
    from stratakv.connector.chunks.adapter_name import name_adapter
    from stratakv.connector.vllm.kv_connector.adapters import Adapters
    from stratakv.connector.vllm.kv_connector.events import TierEvents

    vllm = AdaptedVllm(newest, SLAB)
    role = vllm.connector._scheduler
    role._events = TierEvents(role._columns, 100)
    folder = make_adapter(tmp_path / "it", 1)
    request = vllm.run("it", prompt(1), lora=lora(7, folder))
    push_out(vllm)
    stored = [each for each in vllm.connector.take_events() if hasattr(each, "token_ids")]
    ours = [each for each in stored if each.lora_name == "ann"]
    fingerprint = name_adapter(str(folder)).fingerprint.hex()
    assert len(ours) == 5
    assert {each.lora_id for each in ours} == {7}
    assert all(each.extra_keys == [("ann", fingerprint)] for each in ours)
    # The names are those of vLLM's own events.
    assert {each.block_hashes[0] for each in ours} == {*request.block_hashes[:5]}
    assert all(each.extra_keys is None for each in stored if each.lora_name is None)
    assert Adapters().adapter_of(Request("none", prompt(1), 1)) is None
    vllm.stop()


def test_settings_of_vllm_that_change_adapters() -> None:
    from stratakv.connector.vllm.kv_connector.adapters import adapter_settings

    config = vllm_config(SLAB)
    assert adapter_settings(config) == ""
    texts = set()
    for dtype in ("torch.float16", "torch.bfloat16"):
        config.lora_config = types.SimpleNamespace(lora_dtype=dtype, target_modules=["b", "a"])
        texts.add(adapter_settings(config))
    assert len(texts) == 2 and "" not in texts
