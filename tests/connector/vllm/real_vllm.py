# SPDX-License-Identifier: Apache-2.0
"""What the tests with a real vLLM share: when they run, the models, what vLLM says without us, an
engine for each of the two forms, and the steps that both forms go through.

They need an environment with vLLM's CPU build, whose Python STRATAKV_VLLM_PYTHON names; `make
test-vllm` and docs/vllm.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from stratakv.tiers.cache_server.access.tenants import token_digest

from ...tiers.cache_server.rig import ServerProcess, server_process, token_of
from .vllm_engine import (
    ANSWER_SECONDS,
    KV_HEADS,
    PYTHON,
    VllmEngine,
    extra_config,
    make_hybrid_model,
    make_model,
    make_prompts,
    make_windowed_model,
)

needs_vllm = [
    pytest.mark.skipif(not PYTHON, reason="STRATAKV_VLLM_PYTHON names no Python with vLLM"),
    pytest.mark.timeout(3600),
]

WHOLE = 288  # of 300 tokens: nine blocks; vLLM has 39, and six prompts take 60
# A hybrid's blocks have 544 tokens, so many that attention's page has room for a state. vLLM has 13
# of them, and a prompt of HYBRID_TOKENS leaves five: four of attention, and the state behind them.
HYBRID = {
    "dtype": "bfloat16",
    "max_model_len": 4096,
    "max_num_batched_tokens": 4096,
    "num_gpu_blocks_override": 14,
}
HYBRID_TOKENS, HYBRID_WHOLE, HYBRID_BLOCKS = 2200, 2176, 5
HYBRID_BLOCK_BYTES = 2 * 544 * 2 * KV_HEADS * 64 * 2  # as many in a state's two layers
# A region that holds one prompt and a half, so that everything else comes from below it.
REGION_CHUNKS = 14
CONNECTOR_PROCESS = Path(__file__).with_name("connector_process.py")

Tokens = list[list[int]]


class SpecEngine(VllmEngine):
    """With StrataSpec, below vLLM's own offloading."""

    def __init__(self, model: Path, folder: Path, **settings: Any) -> None:
        arguments = settings.pop("arguments", {})
        region = extra_config(settings.pop("region_chunks", REGION_CHUNKS), **settings)
        super().__init__(model, folder, region | arguments.pop("more", {}), **arguments)


class ConnectorEngine(VllmEngine):
    """With StrataConnector."""

    def __init__(self, model: Path, folder: Path, **settings: Any) -> None:
        arguments = settings.pop("arguments", {})
        transfer = {
            "kv_connector": "StrataConnector",
            "kv_connector_module_path": "stratakv.connector.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"stratakv": settings},
        }
        super().__init__(
            model, folder, process=CONNECTOR_PROCESS, kv_transfer_config=transfer, **arguments
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def windowed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_windowed_model(tmp_path_factory.mktemp("model") / "windowed")


@pytest.fixture(scope="module")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hybrid_model(tmp_path_factory.mktemp("model") / "hybrid")


@pytest.fixture(scope="module")
def hybrid_prompts() -> Tokens:
    return make_prompts(4, HYBRID_TOKENS)


@pytest.fixture(scope="module")
def hybrid_expected(
    hybrid_model: Path, hybrid_prompts: Tokens, tmp_path_factory: pytest.TempPathFactory
) -> Tokens:
    return computed(hybrid_model, hybrid_prompts, tmp_path_factory.mktemp("alone"), **HYBRID)


@pytest.fixture(scope="module")
def prompts() -> Tokens:
    return make_prompts(6)


@pytest.fixture(scope="module")
def expected(model: Path, prompts: Tokens, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    """What vLLM computes without us."""
    return computed(model, prompts, tmp_path_factory.mktemp("alone"))


def computed(model: Path, prompts: Tokens, folder: Path, **arguments: Any) -> Tokens:
    """The same, of any model; nothing of a prompt is left when it comes again."""
    with VllmEngine(model, folder, **arguments) as engine:
        tokens, cached = engine.generate(prompts)
        assert engine.generate(prompts) == (tokens, [0] * len(prompts))
    assert cached == [0] * len(prompts)
    assert len({tuple(each) for each in tokens}) == len(prompts)
    return tokens


def on_disk(folder: Path, **more: Any) -> dict[str, Any]:
    """Settings with a small slab and an SSD tier that takes everything."""
    return {
        "cpu_bytes": "1MiB", "ssd_path": str(folder / "ssd"), "ssd_bytes": "32MiB",
        "ssd_admission": "all", "load": "always", **more,
    }  # fmt: skip


def wait_for_disk(engine: VllmEngine, blocks: int) -> None:
    """Until so many are on the disk, as a scrape of vLLM shows it; steps bring it figures."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while engine.do({"metrics": True}).get("stratakv:tier_blocks:ssd", 0) < blocks:
        assert time.monotonic() < deadline
        engine.generate([[7, 8, 9]])


def wait_for_tier(engine: VllmEngine, tier: str, blocks: int) -> None:
    """The same of any tier of an engine in one process, by its own counters."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while engine.do({"stats": True})["tiers"][tier]["blocks"] < blocks:
        assert time.monotonic() < deadline
        engine.generate([[7, 8, 9]])


def flip_bits_on_disk(folder: Path) -> None:
    """One of every page but the first."""
    blocks = folder / "ssd" / "blocks"
    content = bytearray(blocks.read_bytes())
    for place in range(4096 + 100, len(content), 4096):
        content[place] ^= 1
    blocks.write_bytes(content)


def rejected_on_disk(engine: VllmEngine) -> int:
    """Blocks of the disk that were damaged."""
    return sum(engine.do({"stats": True})["tiers"]["ssd"]["rejected"].values())


def check_broken_ssd(
    make: Callable[..., VllmEngine],
    settings: dict[str, Any],
    faults: str,
    prompts: Tokens,
    expected: Tokens,
) -> None:
    """Fill the disk, start again with faults in it: every request is answered, with the tokens that
    vLLM computes alone."""
    with make(**settings) as engine:
        engine.generate(prompts)
    with make(**settings, faults=faults) as engine:
        for _ in range(2):
            assert engine.generate(prompts)[0] == expected
        assert engine.generate(prompts, together=True)[0] == expected


def check_tenants(
    engine_of: type[VllmEngine], model: Path, folder: Path, prompts: Tokens, expected: Tokens
) -> None:
    """Through a cache server over TLS: what one vLLM has computed another one of its tenant loads,
    another tenant does not find, and another model neither. Without the server all is computed."""
    with secured_server(folder) as (server, settings_of):
        with engine_of(model, folder, **settings_of("ann")) as engine:
            assert engine.generate(prompts) == (expected, [0] * 6)
            assert engine.do({"idle": 30})["idle"]
            engine.kill()  # what it has stored is at the server
        own = {"arguments": {"in_one_process": False}}
        with engine_of(model, folder, **settings_of("ann"), **own) as engine:
            assert engine.generate(prompts) == (expected, [WHOLE] * 6)
        with engine_of(model, folder, **settings_of("bob")) as engine:
            assert engine.generate(prompts[:2]) == (expected[:2], [0, 0])
        other = make_model(folder / "other", seed=7)
        with engine_of(other, folder, **settings_of("ann")) as engine:
            assert engine.generate(prompts[:2])[1] == [0, 0]  # of the same shape, and never mixed
            server.kill()
            assert engine.generate(make_prompts(2, seed=3))[1] == [0, 0]


@contextmanager
def secured_server(
    folder: Path,
) -> Iterator[tuple[ServerProcess, Callable[[str], dict[str, Any]]]]:
    """A cache server with TLS and two tenants, ann and bob, and the settings of each."""
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    tables = []
    for name in ("ann", "bob"):
        (folder / name).write_text(token_of(name))
        digest = token_digest(token_of(name)).hex()
        tables.append(
            f'[[tenant]]\nname = "{name}"\ntoken_sha256 = "{digest}"\ncpu_bytes = "16MiB"\n'
        )
    (folder / "tenants.toml").write_text("\n".join(tables))
    for name in ("key.pem", "ann", "bob"):
        (folder / name).chmod(0o600)
    flags = ["--cpu-bytes", "32MiB", "--tenants", str(folder / "tenants.toml")]
    flags += ["--tls-cert", str(folder / "cert.pem"), "--tls-key", str(folder / "key.pem")]
    with server_process(*flags, start=False) as server:
        server.host = "localhost"
        server.tls = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
        server.start()
        yield (
            server,
            lambda name: {
                "cpu_bytes": "8MiB",
                "servers": [f"grpcs://localhost:{server.port}"],
                "remote_ca_file": str(folder / "ca.pem"),
                "remote_token_file": str(folder / name),
                "load": "always",
            },
        )


def check_refused(engine: VllmEngine, words: str) -> None:
    """It has not started, and says why."""
    assert engine.refused is not None
    assert any(words in each for each in engine.refused), engine.refused


@pytest.fixture
def make_spec(model: Path, tmp_path: Path) -> Callable[..., VllmEngine]:
    """An engine of the first form, for a test."""
    return lambda **settings: SpecEngine(model, tmp_path, **settings)


@pytest.fixture
def make_connector(model: Path, tmp_path: Path) -> Callable[..., VllmEngine]:
    """The same of the second form."""
    return lambda **settings: ConnectorEngine(model, tmp_path, **settings)
