# SPDX-License-Identifier: Apache-2.0
"""GET /node: what a node is, told to anybody, and read by a router."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest

from stratakv.engine.api.api_settings import ApiSettings
from stratakv.engine.router import node_identity as identity
from stratakv.engine.router.node_identity import Identity, find_difference, read_identity
from stratakv.tiers.block import Identity as BlockIdentity

from .conftest import MODEL_NAME, LiveServer

KEY = "a-key-of-clients"


@contextmanager
def node(model: Path, **settings: Any) -> Iterator[str]:
    """The URL of a server of its own."""
    live = LiveServer(model, ApiSettings(**settings))
    try:
        yield live.url
    finally:
        live.stop()


def told_by(url: str) -> Identity:
    answer = httpx.get(f"{url}/node", timeout=30, verify=False)
    assert answer.status_code == 200, answer.text
    found = read_identity(answer.content)
    assert found is not None
    return found


def test_the_router_understands_all_of_it(http: httpx.Client, server: LiveServer) -> None:
    answer = http.get("/node")
    found = read_identity(answer.content)
    assert found == {name: value for name, value in answer.json().items() if name != "object"}
    compared = {*identity._OF_ANSWERS, *identity._OF_BLOCKS}
    assert found is not None and found.keys() == compared | {"role", "tiers"}
    assert found["model"] == MODEL_NAME and found["kv_dtype"] == "float32"
    assert found["block_size"] == "16" and found["role"] == "both" and found["tiers"] == ""
    assert len(found["fingerprint"]) == len(found["tokenizer"]) == len(found["chat_template"]) == 64


def test_whatever_names_blocks_is_told(server: LiveServer) -> None:
    """A field that is added to the root of the chain has to be added here too."""
    names = {"model": "fingerprint"}
    of_root = {names.get(each.name, each.name) for each in fields(BlockIdentity)}
    assert of_root <= server.core.ready().identity.keys() & identity._OF_BLOCKS.keys() | {
        "fingerprint", "revision",
    }  # fmt: skip


def test_no_key_is_asked_for_and_none_is_told(model_path: Path) -> None:
    with node(model_path, api_key=KEY, tenant_header="x-tenant") as url:
        assert httpx.get(f"{url}/v1/models", verify=False).status_code == 401
        found = told_by(url)
        assert found["tenant_header"] == "x-tenant" and KEY not in str(found)
        assert httpx.post(f"{url}/node", verify=False).status_code == 405


def _change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def _other_word(model: Path) -> None:
    _change(model / "tokenizer.json", "</s>", "</S>")


def _other_template(model: Path) -> None:
    _change(model / "tokenizer_config.json", "add_generation_prompt", "not add_generation_prompt")


def _other_special_token(model: Path) -> None:
    _change(model / "tokenizer_config.json", '"bos_token": "<s>"', '"bos_token": "</s>"')


def _another_special_token(model: Path) -> None:
    _change(model / "tokenizer_config.json", '"bos_token": "', '"bos_token": "<<')


@pytest.mark.parametrize(
    ("change", "field"),
    [(_other_word, "tokenizer"), (_other_template, "chat_template"),
     (_other_special_token, "chat_template"), (_another_special_token, "tokenizer")],
)  # fmt: skip
def test_what_makes_other_prompts_is_another_node(
    server: LiveServer, model_path: Path, tmp_path: Path, change: Callable[[Path], None], field: str
) -> None:
    copy = Path(shutil.copytree(model_path, tmp_path / "copy"))
    with node(copy) as url:
        assert told_by(url) == told_by(server.url), "the same files elsewhere are the same node"
    change(copy)
    with node(copy) as url:
        difference = find_difference(told_by(url), told_by(server.url), with_blocks=False)
        assert difference is not None and difference.field == field
