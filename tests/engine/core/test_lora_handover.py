# SPDX-License-Identifier: Apache-2.0
"""Hand-overs of prompts with adapters: the second core has the adapter's bytes under another name.
The blocks pass through a real cache server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.request.core_messages import RequestExtras

from ...peft_adapters import AdapterFolders, check_greedy
from ...test_exactness import prompt
from ...tiers.cache_server.rig import ServerProcess, server_process
from .conftest import config_of, request, run
from .test_handover import computed_tokens, prefilled

MakeNode = Callable[[str, dict[str, Path]], EngineCore]


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with server_process("--cpu-bytes", "32MiB") as server:
        yield server


@pytest.fixture
def make_node(
    peft_folders: AdapterFolders, server: ServerProcess, patient_clients: None
) -> Iterator[MakeNode]:
    cores: list[EngineCore] = []

    def make(role: str, adapters: dict[str, Path]) -> EngineCore:
        config = config_of(
            peft_folders.base("qwen3"),
            role=role,
            lora_modules=adapters,
            kv_offload=f"cpu,grpc://127.0.0.1:{server.port}",
            kv_offload_cpu_bytes="1MiB",
            kv_offload_load="always",
            require_tiers=True,
        )
        cores.append(EngineCore(config))
        return cores[-1]

    yield make
    for core in cores:
        core.shutdown(5.0)


def test_equal_adapters_go_on_with_each_others_prompts_and_others_do_not(
    make_node: MakeNode, peft_folders: AdapterFolders
) -> None:
    plain, other = peft_folders.adapter("plain"), peft_folders.adapter("rslora")
    one = make_node("prefill", {"here": plain})
    two = make_node("decode", {"there": plain, "here": other})
    text, base = prompt(1, 43), peft_folders.base("qwen3")
    ticket = prefilled(one, text, extras=RequestExtras(adapter="here")).ticket
    assert ticket is not None and ticket.num_tokens == len(text)
    for name, adapter, computed in (
        ("there", plain, 5), ("here", other, len(text) + 5), ("", None, len(text) + 5),
    ):  # fmt: skip
        before = computed_tokens(two)
        extras = RequestExtras(adapter=name, ticket=ticket)
        answer = run(two, request(f"d{name}", text, extras=extras))[f"d{name}"]
        check_greedy(base, adapter, text, answer.new_token_ids)
        assert computed_tokens(two) - before == computed, name
