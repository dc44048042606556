# SPDX-License-Identifier: Apache-2.0
"""What one engine computed another one reads out of its slab: no cache server between.

All tokens are those of the same engine without offloading, greedy and seeded, in float64.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.client.process_client import ProcessClient
from stratakv.engine.llm import LLM
from stratakv.engine.request.sampling_params import SamplingParams

from .free_ports import free_ports
from .tiny_models import make_llama
from .two_engines import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    GREEDY,
    OUTPUT_TOKENS,
    SEEDED,
    ask,
    engines,
    from_remote,
    full_blocks,
    prompt,
    secured,
    tier,
    wait_for,
)

Plain = Callable[[Sequence[int], SamplingParams], list[int]]
PROMPT_TOKENS = 150
QUESTION_TOKENS = 5
SHARED_BLOCKS = full_blocks(PROMPT_TOKENS + OUTPUT_TOKENS - 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("peers"))


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Plain]:
    """What an engine without offloading and without a prefix cache answers."""
    with engines(model, {"enable_prefix_caching": False}) as (llm,):
        yield lambda text, params: ask(llm, text, params).token_ids


def serving(port: int, **options: Any) -> dict[str, Any]:
    """Of an engine that serves its slab, which has what it computed at once."""
    tiers = {"kv_offload": "cpu", "kv_offload_cpu_bytes": "2MiB", "kv_offload_load": "always"}
    return {**tiers, "kv_serve": f"127.0.0.1:{port}", **options}


def reading(*ports: int, scheme: str = "grpc", **options: Any) -> dict[str, Any]:
    """Of an engine that reads those at these ports."""
    tiers = {"kv_offload": "cpu", "kv_offload_cpu_bytes": "2MiB", "kv_offload_load": "always"}
    return {
        **tiers,
        "kv_peers": ",".join(f"{scheme}://127.0.0.1:{port}" for port in ports),
        **options,
    }


def wait_in_slab(llm: LLM, blocks: int) -> None:
    """Until the engine has copied so many blocks to its slab, since it was started."""
    wait_for(lambda: tier(llm, "cpu")["stored_blocks"] >= blocks, f"{blocks} blocks in the slab")


def continued(one: LLM, two: LLM, plain: Plain, seed: int, params: SamplingParams) -> None:
    """A prompt asked of one engine, and a question about it and its answer of the other."""
    text, stored = prompt(seed, PROMPT_TOKENS), tier(one, "cpu")["stored_blocks"]
    first = ask(one, text, params)
    assert first.token_ids == plain(text, params)
    wait_in_slab(one, stored + SHARED_BLOCKS)
    text = text + first.token_ids + prompt(seed + 1, QUESTION_TOKENS)
    second = ask(two, text, params)
    assert second.token_ids == plain(text, params)
    assert from_remote(second, "peer") == SHARED_BLOCKS * BLOCK_TOKENS


def test_two_engines_read_each_other(model: Path, plain: Plain) -> None:
    one_port, _, two_port, _ = free_ports(4)  # blocks go through the port after it
    both = (
        serving(one_port, **reading(two_port)),
        serving(two_port, **reading(one_port)),
    )
    with engines(model, *both) as (one, two):
        continued(one, two, plain, 1000, GREEDY)
        continued(two, one, plain, 1100, SEEDED)


def test_over_tls_with_a_token_and_the_model_in_another_process(
    model: Path, plain: Plain, tmp_path: Path
) -> None:
    flags, told = secured(tmp_path)
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    port, _ = free_ports(2)
    files = {f"kv_serve_{name[2:].replace('-', '_')}": path for name, path in given.items()}
    read = {name.replace("kv_offload_remote_", "kv_peers_"): value for name, value in told.items()}
    with engines(
        model,
        serving(port, distributed_executor_backend="mp", **files),
        reading(port, scheme="grpcs", **read),
    ) as (one, two):
        continued(one, two, plain, 2000, GREEDY)
        continued(one, two, plain, 2100, SEEDED)


def test_tenants_and_other_models_find_nothing(model: Path, plain: Plain, tmp_path: Path) -> None:
    port, _ = free_ports(2)
    other = make_llama(tmp_path, seed=5)
    secrets = ("a secret of one tenant", "a secret of another")
    text = prompt(3000, PROMPT_TOKENS)
    with engines(model, serving(port, tenant_secret=secrets[0])) as (one,):
        wanted = ask(one, text).token_ids
        wait_in_slab(one, full_blocks(PROMPT_TOKENS))
        with engines(model, reading(port, tenant_secret=secrets[1])) as (two,):
            answer = ask(two, text)
            assert answer.token_ids == wanted == plain(text, GREEDY)
            assert from_remote(answer, "peer") == 0
        with engines(other, reading(port, tenant_secret=secrets[0])) as (three,):
            answer = ask(three, text)
            assert from_remote(answer, "peer") == 0
            assert answer.token_ids != wanted


def test_slab_that_is_full_and_process_that_is_killed(model: Path, plain: Plain) -> None:
    """The engine goes on as ever, the other one computes what it does not get."""
    port, _ = free_ports(2)
    room = 24 * BLOCK_BYTES
    with engines(model, serving(port, kv_offload_cpu_bytes=max(room, 2**20)), reading(port)) as (
        one,
        two,
    ):
        killed = 0
        texts = [prompt(4000 + i, PROMPT_TOKENS) for i in range(12)]
        for number, text in enumerate(texts):
            wanted = plain(text, GREEDY)
            assert ask(one, text).token_ids == wanted
            if number % 4 == 2:
                killed += _kill_serving(one)
            assert ask(two, text).token_ids == wanted
        for text in texts[:4]:
            assert ask(two, text).token_ids == plain(text, GREEDY)
            assert ask(one, text).token_ids == plain(text, GREEDY)
        assert killed


def _kill_serving(llm: LLM) -> int:
    """Kill what serves the engine's slab; it may be away already. Other tests have such too."""
    killed = 0
    client = llm._client
    assert isinstance(client, ProcessClient)
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_serving = (
                b"stratakv.tiers.cache_server.slab_serving.slab_process"
                in (path / "cmdline").read_bytes()
            )
            if is_serving and _parent(int(path.name)) == client.pid:
                os.kill(int(path.name), signal.SIGKILL)
                killed += 1
        except OSError:
            pass  # it has ended meanwhile
    return killed


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
