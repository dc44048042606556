# SPDX-License-Identifier: Apache-2.0
"""The cases of `stratakv bench core`: the real block hasher, cache manager and scheduler run, with
a worker's answers made up. This module does no timing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from ...engine.cache.block_hash import make_block_hasher
from ...engine.cache.kv_cache_manager import KVCacheManager
from ...engine.config.engine_config import SchedulerConfig
from ...engine.models.layer_attention import LayerAttention, full, window
from ...engine.request.request import BlockHasher, Request, TokenArray
from ...engine.request.sampling_params import SamplingParams
from ...engine.scheduler.output import ModelRunnerOutput
from ...engine.scheduler.scheduler import Scheduler
from ...tiers.block import DIGEST_BYTES, Identity
from .hash_peers import pickle_sha256_chain

BLOCK_SIZE = 16
PROMPT_TOKENS = 4096
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_SIZE
HALF = PROMPT_TOKENS // 2
VOCABULARY = 128_000
NUM_RUNNING = 256
NUM_WAITING = 4096
DECODE_PROMPT_TOKENS = 512
# Requests of the cycles: so many that the pool evicts a request's blocks before it comes again.
REQUESTS = 24
POOL_REQUESTS = 8
SEED = 11
TOKEN = 7

ONE_GROUP: tuple[LayerAttention, ...] = (full(),)
TWO_GROUPS = (full(), full())
FULL_AND_WINDOW = (full(), window(512))

ROOT = Identity("benchmark", "", "bfloat16", "bfloat16", BLOCK_SIZE).root()


class WrongWork(RuntimeError):
    """Measured work had a wrong result, so its time means nothing."""


@dataclass(frozen=True, slots=True)
class Case:
    """The work of a figure: `work` does `count` units after `prepare`, which is not timed."""

    name: str
    unit: str
    count: int
    work: Callable[[], object]
    prepare: Callable[[], object] | None = None


def hash_cases(num_tokens: int) -> list[Case]:
    """Cases that hash the same tokens in each form, and SHA-256 alone as the limit."""
    tokens = _tokens(np.random.default_rng(SEED), num_tokens)
    request = Request("hash", tokens, SamplingParams(max_tokens=1))
    ids: list[int] = tokens.tolist()
    count = num_tokens // BLOCK_SIZE
    # The bytes of all blocks and their parents, `times` over: a shorter run would share its
    # processor with other programs less often than the other cases do.
    times = 8
    raw = times * (request.all_token_ids.tobytes() + bytes(count * DIGEST_BYTES))

    def hashing(digests_of: Callable[[], list[bytes]]) -> Callable[[], None]:
        def work() -> None:
            hashed = len(digests_of())
            if hashed != count:
                raise WrongWork(f"{hashed} of {count} blocks were hashed")

        return work

    def ours(algorithm: str) -> Callable[[], list[bytes]]:
        hasher = make_block_hasher(ROOT, BLOCK_SIZE, algorithm)
        return lambda: hasher.digests(request)

    return [
        Case("hash", "tokens/s", num_tokens, hashing(ours("sha256"))),
        Case("hash_pickle_sha256", "tokens/s", num_tokens,
             hashing(lambda: pickle_sha256_chain(ROOT, ids, BLOCK_SIZE))),
        Case("hash_sha256_cbor", "tokens/s", num_tokens, hashing(ours("sha256_cbor"))),
        Case("sha256_alone", "tokens/s", times * num_tokens, lambda: hashlib.sha256(raw).digest()),
    ]  # fmt: skip


def cycle_case(
    count: int,
    name: str = "cycles_half_cached",
    attention: Sequence[LayerAttention] = ONE_GROUP,
    num_tokens: int = PROMPT_TOKENS,
) -> Case:
    """Look up, allocate and free a request whose first half is cached, again and again. Each second
    half takes blocks that an older request left, so that block hashes are dropped and given all the
    time."""
    rng = np.random.default_rng(SEED)
    half = num_tokens // 2
    prefix = _tokens(rng, half)
    requests = cycle(
        [prompt(f"r{i}", np.concatenate((prefix, _tokens(rng, half)))) for i in range(REQUESTS)]
    )
    manager = _manager(POOL_REQUESTS * num_tokens // BLOCK_SIZE, attention)
    run_through(manager, next(requests))

    def work() -> None:
        for _ in range(count):
            cached = run_through(manager, next(requests))
            if cached != half:
                raise WrongWork(f"{cached} tokens were found, not {half}")

    return Case(name, "cycles/s", count, work)


def evicting_case(count: int) -> Case:
    """A cycle with nothing cached and a full pool: each block that is taken evicts a cached
    block."""
    rng = np.random.default_rng(SEED)
    requests = cycle([prompt(f"r{i}", _tokens(rng, PROMPT_TOKENS)) for i in range(REQUESTS)])
    manager = _manager(POOL_REQUESTS * PROMPT_BLOCKS)
    for _ in range(POOL_REQUESTS):
        run_through(manager, next(requests))

    def work() -> None:
        before = manager.pool.num_evicted
        for _ in range(count):
            run_through(manager, next(requests))
        evicted = manager.pool.num_evicted - before
        if evicted != count * PROMPT_BLOCKS:
            raise WrongWork(f"{evicted} blocks were evicted, not {count * PROMPT_BLOCKS}")

    return Case("cycles_evicting", "cycles/s", count, work)


def look_up_cases(count: int) -> list[Case]:
    """Look-ups of 4,096 cached tokens, and of 4,096 tokens that are not cached."""
    rng = np.random.default_rng(SEED)
    manager = _manager(2 * PROMPT_BLOCKS)
    known = prompt("known", _tokens(rng, PROMPT_TOKENS))
    unknown = prompt("unknown", _tokens(rng, PROMPT_TOKENS))
    run_through(manager, known)

    def looking(request: Request, expected: int) -> Callable[[], None]:
        def work() -> None:
            for _ in range(count):
                _, found = manager.get_computed_blocks(request)
                if found != expected:
                    raise WrongWork(f"{found} tokens were found, not {expected}")

        return work

    # The last block is never a hit: the logits need the last token to be computed.
    return [
        Case("look_up_hit", "look-ups/s", count, looking(known, PROMPT_TOKENS - BLOCK_SIZE)),
        Case("look_up_miss", "look-ups/s", count, looking(unknown, 0)),
    ]


def step_case(
    name: str,
    count: int,
    waiting: int,
    max_steps: int,
    *,
    attention: Sequence[LayerAttention] = ONE_GROUP,
) -> Case:
    """Steps of 256 requests that each get one token, while `waiting` other requests wait. A request
    ends after `max_steps` steps, counted over all calls."""
    decodes = Decodes(waiting, max_steps, attention=attention)

    def work() -> None:
        for _ in range(count):
            decodes.step()

    return Case(name, "steps/s", count, work)


def decode_lengths() -> list[int]:
    """Different lengths of the prompts, so that each step has equally many requests that begin a
    block."""
    return [DECODE_PROMPT_TOKENS + i % BLOCK_SIZE for i in range(NUM_RUNNING)]


class Decodes:
    """A scheduler with NUM_RUNNING running requests, its maximum, whose prompts are computed."""

    def __init__(
        self,
        num_waiting: int,
        max_steps: int,
        *,
        attention: Sequence[LayerAttention] = ONE_GROUP,
    ) -> None:
        lengths = decode_lengths()
        # The step of the prompts gives a token too, and no request may end.
        max_tokens = max_steps + 2
        longest = max(lengths) + max_tokens
        manager = KVCacheManager(
            NUM_RUNNING * -(-longest // BLOCK_SIZE) * 2 * len(attention),
            BLOCK_SIZE,
            longest,
            attention=attention,
        )
        config = SchedulerConfig(
            max_num_batched_tokens=sum(lengths),
            max_num_seqs=NUM_RUNNING,
            max_waiting_requests=NUM_RUNNING + num_waiting,
        )
        self.scheduler = Scheduler(config, manager, eos_token_ids=frozenset())
        rng = np.random.default_rng(SEED)
        hasher = _hasher()
        params = SamplingParams(max_tokens=max_tokens)
        lengths += [DECODE_PROMPT_TOKENS] * num_waiting
        for i, length in enumerate(lengths):
            tokens = _tokens(rng, length)
            self.scheduler.add_request(Request(f"r{i}", tokens, params, block_hasher=hasher))
        self._sampled = ModelRunnerOutput({f"r{i}": [TOKEN] for i in range(NUM_RUNNING)})
        self.step(sum(lengths[:NUM_RUNNING]))

    def step(self, num_tokens: int = NUM_RUNNING) -> None:
        """Run `schedule` and the update from a worker's made-up answer. Raises WrongWork."""
        scheduled = self.scheduler.schedule()
        outputs = self.scheduler.update_from_output(scheduled, self._sampled)
        done = (scheduled.total_num_scheduled_tokens, len(outputs), self.scheduler.num_running)
        if done != (num_tokens, NUM_RUNNING, NUM_RUNNING):
            raise WrongWork(f"tokens, outputs and running requests were {done}")


def run_through(manager: KVCacheManager, request: Request) -> int:
    """Look up, allocate, commit and free a request as a step does; return its cached tokens."""
    hits, num_cached = manager.get_computed_blocks(request)
    added = manager.allocate_slots(request, request.num_tokens - num_cached, num_cached, hits)
    if added is None:
        raise WrongWork("the pool had no room")
    manager.pool.take_evicted()
    manager.pool.commit_step()
    manager.free(request)
    return num_cached


def prompt(name: str, tokens: Sequence[int] | TokenArray) -> Request:
    return Request(name, tokens, SamplingParams(max_tokens=1), block_hasher=_hasher())


def _hasher() -> BlockHasher:
    return make_block_hasher(ROOT, BLOCK_SIZE)


def _tokens(rng: np.random.Generator, count: int) -> TokenArray:
    return rng.integers(0, VOCABULARY, count, np.int32)


def _manager(num_blocks: int, attention: Sequence[LayerAttention] = ONE_GROUP) -> KVCacheManager:
    """A manager with `num_blocks` blocks for each group, so that all groups evict equally old
    blocks."""
    return KVCacheManager(
        num_blocks * len(attention) + 1,
        BLOCK_SIZE,
        PROMPT_TOKENS + BLOCK_SIZE,
        watermark=0.0,
        attention=attention,
    )
