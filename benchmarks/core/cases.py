# SPDX-License-Identifier: Apache-2.0
"""The cases of `stratakv bench core`: the real block hasher, cache manager and scheduler at work,
with a worker's answers made up. Knows nothing of time."""

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
# Requests of the cycles: enough that the pool drops the blocks of each before it comes again.
REQUESTS = 24
POOL_REQUESTS = 8
SEED = 11
TOKEN = 7

ONE_GROUP: tuple[LayerAttention, ...] = (full(),)
TWO_GROUPS = (full(), full())
FULL_AND_WINDOW = (full(), window(512))

ROOT = Identity("benchmark", "", "bfloat16", "bfloat16", BLOCK_SIZE).root()


class WrongWork(RuntimeError):
    """A piece of work did not do what its figure would claim."""


@dataclass(frozen=True, slots=True)
class Case:
    """The work of a figure: `work` does `count` units, after `prepare`, which is not timed."""

    name: str
    unit: str
    count: int
    work: Callable[[], object]
    prepare: Callable[[], object] | None = None


def hash_cases(num_tokens: int) -> list[Case]:
    """The same tokens hashed in each form, and SHA-256 alone as the limit."""
    tokens = _tokens(np.random.default_rng(SEED), num_tokens)
    request = Request("hash", tokens, SamplingParams(max_tokens=1))
    ids: list[int] = tokens.tolist()
    count = num_tokens // BLOCK_SIZE
    # The bytes of all blocks and their parents in one piece, `times` over: a shorter run would
    # share its processor less often than the other cases do.
    times = 8
    raw = times * (request.all_token_ids.tobytes() + bytes(count * DIGEST_BYTES))

    def hashing(digests_of: Callable[[], list[bytes]]) -> Callable[[], None]:
        def work() -> None:
            named = len(digests_of())
            if named != count:
                raise WrongWork(f"{named} of {count} blocks were named")

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
    """Look up, allocate and free a request whose first half is cached, over and over.

    Each second half takes blocks that an older one left, so names are dropped and given all along.
    """
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
    """The cycle with nothing cached and a full pool: every block that is taken drops a name."""
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
    """Look-ups of 4,096 tokens that are cached, and of tokens that are not."""
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

    # The last block is never a hit: its last token must be computed to get its logits.
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
    """Steps of 256 requests that each get one token, with `waiting` others. The requests end after
    `max_steps` steps in all calls together."""
    decodes = Decodes(waiting, max_steps, attention=attention)

    def work() -> None:
        for _ in range(count):
            decodes.step()

    return Case(name, "steps/s", count, work)


def decode_lengths() -> list[int]:
    """Lengths of the prompts: they differ, so that as many requests begin a block in each step."""
    return [DECODE_PROMPT_TOKENS + i % BLOCK_SIZE for i in range(NUM_RUNNING)]


class Decodes:
    """A scheduler with NUM_RUNNING requests, as many as may run, all of them past their prompts."""

    def __init__(
        self,
        num_waiting: int,
        max_steps: int,
        *,
        attention: Sequence[LayerAttention] = ONE_GROUP,
    ) -> None:
        lengths = decode_lengths()
        # The step of the prompts gives a token too, and no request may come to its end.
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
        """Run one `schedule` and the update from a worker's made-up answer. Raises WrongWork."""
        scheduled = self.scheduler.schedule()
        outputs = self.scheduler.update_from_output(scheduled, self._sampled)
        done = (scheduled.total_num_scheduled_tokens, len(outputs), self.scheduler.num_running)
        if done != (num_tokens, NUM_RUNNING, NUM_RUNNING):
            raise WrongWork(f"tokens, outputs and running requests were {done}")


def run_through(manager: KVCacheManager, request: Request) -> int:
    """Take a request from look-up to free, with a step's calls in between; its cached tokens."""
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
    """A manager with `num_blocks` for each group, so that each drops blocks of the same age."""
    return KVCacheManager(
        num_blocks * len(attention) + 1,
        BLOCK_SIZE,
        PROMPT_TOKENS + BLOCK_SIZE,
        watermark=0.0,
        attention=attention,
    )
