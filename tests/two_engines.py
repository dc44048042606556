# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own that share a cache server, and what is asked of them.

    with engines(model, remote(server), remote(server)) as (one, two):
        answer = ask(one, prompt)
        wait_shared(one, 10)                    ten blocks have come to the server
        ask(two, prompt + answer.token_ids)     finds them there

Every engine computes in float64 on one thread.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trustme

from stratakv.engine.llm import LLM
from stratakv.engine.offline.outputs import RequestOutput
from stratakv.engine.request.sampling_params import SamplingParams

from .tiers.cache_server.rig import WAIT_SECONDS, Client, token_of
from .tiny_models import VOCAB

BLOCK_TOKENS = 16
# Three layers, K and V, two heads of 8 numbers in float64.
BLOCK_BYTES = BLOCK_TOKENS * 3 * 2 * 2 * 8 * 8
MAX_MODEL_LEN = 384
OUTPUT_TOKENS = 24
GREEDY = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.9, seed=11, ignore_eos=True)


def remote(server: Client, **options: Any) -> dict[str, Any]:
    """The options of an engine with that server below a small slab. It loads whatever it finds,
    since a model as small as these is computed sooner than anything is loaded."""
    address = f"grpc{'' if server.tls is None else 's'}://127.0.0.1:{server.port}"
    given = {"kv_offload": f"cpu,{address}", "kv_offload_cpu_bytes": "2MiB"}
    return {**given, "kv_offload_load": "always", **options}


@contextmanager
def engines(model: Path, *options: dict[str, Any]) -> Iterator[list[LLM]]:
    """An engine for each of these, started side by side and attached to its server."""
    common: dict[str, Any] = {
        "dtype": "float64",
        "num_threads": 1,
        "block_size": BLOCK_TOKENS,
        "num_blocks": 120,
        "max_model_len": MAX_MODEL_LEN,
    }
    with ExitStack() as stack, ThreadPoolExecutor(len(options)) as starters:
        started = [
            starters.submit(LLM, model, in_process=False, **(common | each)) for each in options
        ]
        for future in started:
            if future.exception() is None:
                stack.enter_context(future.result())
        llms = [future.result() for future in started]
        for llm, each in zip(llms, options, strict=True):
            if "kv_peers" in each or "://" in each.get("kv_offload", ""):
                wait_for(partial(is_attached, llm), "an engine attached to its server")
        yield llms


def is_attached(llm: LLM) -> bool:
    """Whether the engine knows how much its servers hold, and the engines that it reads."""
    tiers = llm.stats()["connector"]["tiers"]
    return all(tiers[name]["capacity_bytes"] for name in ("remote", "peer") if name in tiers)


def ask(llm: LLM, prompt: Sequence[int], params: SamplingParams = GREEDY) -> RequestOutput:
    """One prompt and its answer, which is whole."""
    (answer,) = llm.generate([list(prompt)], params)
    assert answer.finish_reason == "length", answer.error
    return answer


def from_remote(answer: RequestOutput, name: str = "remote") -> int:
    """Tokens of the prompt that came from a cache server, or from the tier of that name."""
    return answer.cached_tokens_by_tier.get(name, 0)


def prompt(seed: int, length: int) -> list[int]:
    """Token ids."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def tier(llm: LLM, name: str = "remote") -> dict[str, Any]:
    """The counters of one tier of an engine."""
    found: dict[str, Any] = llm.stats()["connector"]["tiers"][name]
    return found


def wait_shared(llm: LLM, blocks: int) -> None:
    """Until the engine has brought so many blocks to its servers, since it was started."""
    wait_for(lambda: tier(llm)["stored_blocks"] >= blocks, f"{blocks} blocks at the server")


def wait_for(is_true: Any, what: str, seconds: float = WAIT_SECONDS) -> float:
    """Ask until it is true; the seconds that took."""
    began = time.monotonic()
    while not is_true():
        assert time.monotonic() - began < seconds, f"{what}: not within {seconds} s"
        time.sleep(0.01)
    return time.monotonic() - began


def full_blocks(num_tokens: int) -> int:
    """Blocks that are whole when this many tokens are computed."""
    return num_tokens // BLOCK_TOKENS


def secured(directory: Path) -> tuple[list[str], dict[str, str]]:
    """Flags of a server with TLS and a token, and what an engine is told of them."""
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    issued.private_key_pem.write_to_path(directory / "key.pem")
    with (directory / "cert.pem").open("wb") as chain:
        for part in issued.cert_chain_pems:
            chain.write(part.bytes())
    authority.cert_pem.write_to_path(directory / "ca.pem")
    (directory / "token").write_text(token_of("both") + "\n")
    (directory / "key.pem").chmod(0o600)
    (directory / "token").chmod(0o600)
    flags = ["--tls-cert", str(directory / "cert.pem"), "--tls-key", str(directory / "key.pem")]
    return [*flags, "--token-file", str(directory / "token")], {
        "kv_offload_remote_ca_file": str(directory / "ca.pem"),
        "kv_offload_remote_token_file": str(directory / "token"),
        "kv_offload_remote_server_name": "localhost",
    }
