# SPDX-License-Identifier: Apache-2.0
"""What one engine computed another one goes on with: two processes, and a cache server between.

All tokens are those of the same engine without offloading, greedy and seeded, in float64.
"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from stratakv.engine.llm import LLM
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.proto.v1 import cache_service_pb2 as messages
from stratakv.tiers.cache_server.access.tenants import token_digest

from .free_ports import free_ports
from .tiers.cache_server.rig import ServerProcess, server_process, token_of
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
    remote,
    secured,
    tier,
    wait_shared,
)

Plain = Callable[[Sequence[int], SamplingParams], list[int]]
ROOM = ("--cpu-bytes", "16MiB")
TENANTS = ("ann", "bob", "ann")
PROMPT_TOKENS = 150
QUESTION_TOKENS = 5
# Of a prompt and its answer: the last token is never computed, since nothing follows it.
SHARED_BLOCKS = full_blocks(PROMPT_TOKENS + OUTPUT_TOKENS - 1)
# Of the same prompt asked again: its last token is always computed.
FOUND_TOKENS = full_blocks(PROMPT_TOKENS - 1) * BLOCK_TOKENS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Plain]:
    """What an engine without offloading and without a prefix cache answers."""
    with engines(model, {"enable_prefix_caching": False}) as (llm,):
        yield lambda text, params: ask(llm, text, params).token_ids


def continued(one: LLM, two: LLM, plain: Plain, seed: int, params: SamplingParams) -> None:
    """A prompt asked of one engine, and a question about it and its answer of the other."""
    text = prompt(seed, PROMPT_TOKENS)
    stored = tier(one)["stored_blocks"]
    first = ask(one, text, params)
    assert first.token_ids == plain(text, params)
    wait_shared(one, stored + SHARED_BLOCKS)
    text = text + first.token_ids + prompt(seed + 1, QUESTION_TOKENS)
    second = ask(two, text, params)
    assert second.token_ids == plain(text, params)
    assert from_remote(second) == SHARED_BLOCKS * BLOCK_TOKENS
    assert second.num_cached_tokens == SHARED_BLOCKS * BLOCK_TOKENS
    # What it has itself now it does not ask for again.
    third = ask(two, text, params)
    assert third.token_ids == second.token_ids
    assert from_remote(third) == 0


def both_ways(one: LLM, two: LLM, plain: Plain, seed: int) -> None:
    continued(one, two, plain, seed, GREEDY)
    continued(two, one, plain, seed + 100, SEEDED)


class MeteredServer(ServerProcess):
    """One that is asked for its metrics."""

    def __init__(self, *flags: str) -> None:
        (self.metrics_port,) = free_ports(1)
        super().__init__("--metrics-port", str(self.metrics_port), *flags)

    def metric(self, name: str) -> float:
        """The sum over labels of one metric."""
        address = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(address, timeout=5) as response:
            text = response.read().decode()
        rows = re.findall(rf"^stratakv_cache:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, rows))


@contextmanager
def sharing(
    model: Path, *flags: str, cpu_bytes: int = 16 * 2**20, tls: Path | None = None, **options: Any
) -> Iterator[tuple[MeteredServer, LLM, LLM]]:
    """A server with these flags, and two engines with these options."""
    server = MeteredServer("--cpu-bytes", str(cpu_bytes), *flags)
    if tls is not None:
        server.tls = grpc.ssl_channel_credentials((tls / "ca.pem").read_bytes())
        server.host = "localhost"
    try:
        server.start()
        both = remote(server, **options)
        with engines(model, both, both) as (one, two):
            yield server, one, two
    finally:
        server.close()


def test_through_memory(model: Path, plain: Plain) -> None:
    with sharing(model) as (server, one, two):
        both_ways(one, two, plain, 1000)
        assert server.metric("memory_connections") > 0
        assert server.metric("data_connections") == 0


def test_through_sockets_with_tls_and_a_token(model: Path, plain: Plain, tmp_path: Path) -> None:
    flags, told = secured(tmp_path)
    with sharing(model, *flags, "--no-shared-memory", tls=tmp_path, **told) as (server, one, two):
        both_ways(one, two, plain, 2000)
        assert server.metric("data_connections") > 0
        assert server.metric("stream_sent_bytes_total") == 0


def test_through_gRPC_streams(model: Path, plain: Plain) -> None:  # noqa: N802 - its name
    with sharing(model, "--no-data-connections", "--no-shared-memory") as (server, one, two):
        both_ways(one, two, plain, 3000)
        assert server.metric("stream_sent_bytes_total") > 0


def test_from_the_disk_of_a_server_whose_memory_is_small(
    model: Path, plain: Plain, tmp_path: Path
) -> None:
    """Twelve prompts, where the server's memory holds six."""
    disk = ("--ssd-path", str(tmp_path / "blocks"), "--ssd-bytes", "16MiB")
    with sharing(model, *disk, cpu_bytes=64 * BLOCK_BYTES) as (server, one, two):
        texts = [prompt(seed, PROMPT_TOKENS) for seed in range(4000, 4012)]
        for number, text in enumerate(texts, 1):
            ask(one, text)
            wait_shared(one, number * SHARED_BLOCKS)
        found = []
        for text in texts:
            answer = ask(two, text)
            assert answer.token_ids == plain(text, GREEDY)
            found.append(from_remote(answer))
        assert found == [FOUND_TOKENS] * len(texts)
        memory, below = server.stub().stats(messages.StatsRequest(), timeout=5).tiers
        assert (memory.name, below.name) == ("cpu", "ssd")
        assert below.loaded_blocks >= len(texts) // 2 * full_blocks(PROMPT_TOKENS)


def test_two_tenants_share_nothing(model: Path, plain: Plain, tmp_path: Path) -> None:
    """And the third engine, which has the first one's token, all of it."""
    tenants = tmp_path / "tenants.toml"
    tables = []
    for name in ("ann", "bob"):
        (tmp_path / name).write_text(token_of(name))
        (tmp_path / name).chmod(0o600)
        digest = token_digest(token_of(name)).hex()
        tables.append(
            f'[[tenant]]\nname = "{name}"\ntoken_sha256 = "{digest}"\ncpu_bytes = "8MiB"\n'
        )
    tenants.write_text("\n".join(tables))
    with server_process(*ROOM, "--tenants", str(tenants)) as server:
        tokens = [{"kv_offload_remote_token_file": str(tmp_path / name)} for name in TENANTS]
        with engines(model, *(remote(server, **token) for token in tokens)) as (ann, bob, other):
            share_nothing(ann, bob, other, plain)


def test_two_secrets_share_nothing_even_in_one_tenant(model: Path, plain: Plain) -> None:
    secrets = [{"tenant_secret": f"the secret of {name}, long enough"} for name in TENANTS]
    with (
        server_process(*ROOM) as server,
        engines(model, *(remote(server, **secret) for secret in secrets)) as (ann, bob, other),
    ):
        share_nothing(ann, bob, other, plain)


def share_nothing(ann: LLM, bob: LLM, other_ann: LLM, plain: Plain) -> None:
    """Bob finds nothing of Ann's, whose other engine finds everything."""
    text = prompt(5000, PROMPT_TOKENS)
    expected = plain(text, GREEDY)
    assert ask(ann, text).token_ids == expected
    wait_shared(ann, SHARED_BLOCKS)
    found = ask(bob, text)
    assert found.token_ids == expected
    assert found.num_cached_tokens == 0
    wait_shared(bob, SHARED_BLOCKS)  # he can reach the server, and his blocks are new to it
    found = ask(other_ann, text)
    assert found.token_ids == expected
    assert from_remote(found) == FOUND_TOKENS


def test_a_burst_of_prompts_of_both_engines(model: Path, plain: Plain) -> None:
    """Prompts with one beginning, asked of both at once, in an order of each one's own."""
    with sharing(model) as (_, one, two):
        for burst in range(3):
            root = prompt(6000 + 10 * burst, 128)
            texts = [root + prompt(6001 + 10 * burst + number, 40) for number in range(8)]
            stored = tier(one)["stored_blocks"]
            ask(one, texts[0])
            wait_shared(one, stored + 8)
            with ThreadPoolExecutor(2) as askers:
                both = [
                    askers.submit(llm.generate, order, GREEDY)
                    for llm, order in ((one, texts), (two, texts[::-1]))
                ]
            answers = both[0].result(), both[1].result()[::-1]
            for text, *pair in zip(texts, *answers, strict=True):
                assert [answer.token_ids for answer in pair] == [plain(text, GREEDY)] * 2
            if loaded := sum(from_remote(a) for a in answers[1]):
                break
            # A look-up has a tenth of a second, which a machine with other things to do can miss.
        assert loaded >= 128
