# SPDX-License-Identifier: Apache-2.0
"""The cases of `stratakv bench cluster`; `command.py` defines the figures.

A case raises WrongWork if blocks do not come from the place that the case requires, or if two
answers to a prompt differ."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.config.engine_options import EMBEDDED_MODEL
from ...tiers.settings.values import ConfigError
from ..harness.comparison import WrongWork
from ..harness.load_client import StreamedAnswer, ask
from ..harness.report import percentile
from ..harness.served import HOST
from .link import LINK_HOST, Link
from .nodes import (
    COMPLETIONS,
    HAND_OVER,
    TICKETS,
    Node,
    body_of,
    open_cache,
    open_router,
    pinned,
)

MIB = 2**20
BLOCK_TOKENS = 16
# Two tokens, because a ticket may contain the first, but the second needs the prompt's blocks.
OUTPUT_TOKENS = 2
# A model with random weights, much KV and little computation, so that the time of a hand-over
# through a link depends only on bytes.
WIDE_MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096,
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 32,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128,
    "max_position_embeddings": 4096, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 0,
    "torch_dtype": "float32",
}  # fmt: skip
WIDE_TOKEN_BYTES = 2 * 32 * 4 * 128 * 4


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a run."""

    pairs: int
    prompt_tokens: int = 3600
    wide_tokens: int = 1536
    chunk_tokens: int = 256  # tokens per step of the node that sends blocks chunk by chunk
    wire_bits: float = 2e9  # per second
    arrival_seconds: float = 12.0
    chats_per_second: float = 2.5
    longs_per_second: float = 0.8
    chat_tokens: tuple[int, int] = (96, 64)  # tokens of prompt and answer
    long_answer_tokens: int = 8
    step_tokens: int = 512  # the token limit per step in `take_itl`
    slab_mib: int = 256  # of each prefill node; the cache server has twice as much


FULL = Scale(pairs=9)
QUICK = Scale(pairs=1, prompt_tokens=1200, wide_tokens=640, arrival_seconds=2.0, slab_mib=64)


@dataclass(slots=True)
class Pairs:
    """The seconds of both sides of a ratio, one entry per pair, and other values by name."""

    ours: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    seen: dict[str, list[float]] = field(default_factory=dict)

    def see(self, **values: float) -> None:
        """Add values of the current pair that are not part of its ratio."""
        for name, value in values.items():
            self.seen.setdefault(name, []).append(value)

    def take(self, count: int, ours: Callable[[int], float], other: Callable[[int], float]) -> None:
        """Measure `count` pairs after one uncounted pair. The side that runs first alternates."""
        for number in range(count + 1):
            turns = [(ours, self.ours), (other, self.others)]
            for run, taken in reversed(turns) if number % 2 else turns:
                taken.append(run(number))
        for taken in (self.ours, self.others, *self.seen.values()):
            del taken[0]


class Prompts:
    """Random prompts by number, equal in every run, and the first answer to each prompt, to which
    all later answers must be equal."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._answers: dict[int, list[int]] = {}

    def prompt(self, number: int) -> list[int]:
        return random_prompt(random.Random(f"{self._num_tokens} {number}"), self._num_tokens)

    def check(self, number: int, token_ids: list[int]) -> None:
        told = self._answers.setdefault(number, token_ids)
        if not token_ids or told != token_ids:
            raise WrongWork(f"one prompt was given the tokens {told} and {token_ids}")


def random_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(5, 4000) for _ in range(num_tokens)]


_COMPUTED = ("vllm:prompt_tokens_by_source_total", '"local_compute"')
_PREFILL_LEG = ("stratakv_router_leg_seconds_sum", 'leg="prefill"')
_LOADED = ("stratakv:tier_loaded_bytes_total", 'tier="remote"')
_STORED = ("stratakv:tier_stored_bytes_total", 'tier="remote"')
_HANDED = ("stratakv:handed_over_total",)
_INCOMPLETE = ("stratakv:handed_over_incomplete_total",)


class Watch:
    """The increases of some counters of a node since the creation of the Watch."""

    def __init__(self, node: Node, *figures: tuple[str, ...]) -> None:
        self._node, self._figures = node, figures
        self._before = [node.figure(*names) for names in figures]

    def moved(self) -> list[float]:
        now = [self._node.figure(*names) for names in self._figures]
        return [later - before for later, before in zip(now, self._before, strict=True)]


def _check_handed(moved: Sequence[float], prompts: int = 1) -> None:
    handed, incomplete = moved
    if (handed, incomplete) != (prompts, 0):
        raise WrongWork(
            f"the prefill node has handed over {handed:g} prompts and not {prompts}, "
            f"{incomplete:g} of them without all blocks"
        )


def _check_loaded(answer: StreamedAnswer, computed: float) -> None:
    """Raise WrongWork if a decode node computed any token of the prompt."""
    if computed or answer.cached_tokens != answer.prompt_tokens:
        raise WrongWork(
            f"the decode node computed {computed:g} of {answer.prompt_tokens} tokens and found "
            f"{answer.cached_by_tier}"
        )


class Wish(NamedTuple):
    """A node to be started: flags, model, and the processor core to which it is pinned, if any."""

    words: Sequence[str]
    model: Path = EMBEDDED_MODEL
    core: int | None = None


def start(stack: ExitStack, scratch: Path, *wishes: Wish) -> list[Node]:
    """Start all nodes at the same time. Raises ServerFailed."""
    common = ["--dtype", "float32", "--block-size", str(BLOCK_TOKENS), "--num-threads", "1"]

    def one(wish: Wish) -> Node:
        with pinned(wish.core):
            node = Node(["serve", str(wish.model), *common, *wish.words], scratch)
        return stack.enter_context(node)

    with ThreadPoolExecutor(len(wishes)) as threads:
        return list(threads.map(one, wishes))


def hand_over(node: Node, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Send a prompt to a prefill node. Return the seconds until its answer, which acknowledges the
    hand-over, and the request to send to the decode node. Raises WrongWork."""
    whole = {name: value for name, value in body.items() if name != "stream_options"}
    watch = Watch(node, _HANDED, _INCOMPLETE)
    began = time.perf_counter()
    answer = node.post(whole | {"stream": False, "max_tokens": 1} | HAND_OVER)
    seconds = time.perf_counter() - began
    _check_handed(watch.moved())
    if answer.get(TICKETS) is None:
        raise WrongWork("the prefill node gave no ticket")
    return seconds, body | {TICKETS: answer[TICKETS]}


def second_token(answer: StreamedAnswer) -> float:
    """Return the seconds to the second token, or to the first event if it has two tokens."""
    return answer.event_seconds[min(1, len(answer.event_seconds) - 1)]


def take_handover(scale: Scale, scratch: Path, stack: ExitStack) -> Pairs:
    """Measure pairs: a prompt through router, prefill node, cache server and decode node, and the
    same prompt on the decode node alone."""
    cache = stack.enter_context(open_cache(2 * scale.slab_mib * MIB))
    flags = (*cache.flags(HOST, f"{scale.slab_mib}MiB"), "--num-blocks", "600", "--role")
    roles = (Wish((*flags, "prefill")), Wish((*flags, "decode")))
    prefill, decode = start(stack, scratch, *roles)
    router = stack.enter_context(open_router([prefill], [decode], scratch))
    prompts, pairs = Prompts(scale.prompt_tokens), Pairs()

    def split(number: int) -> float:
        prompt = prompts.prompt(number)
        source = Watch(prefill, _COMPUTED, _HANDED, _INCOMPLETE)
        target, legs = Watch(decode, _COMPUTED), Watch(router, _PREFILL_LEG)
        answer = router.stream(body_of(prompt, OUTPUT_TOKENS))
        [leg], [there], [here, *handed] = legs.moved(), target.moved(), source.moved()
        _check_handed(handed)
        _check_loaded(answer, there)
        if here + there < len(prompt):
            raise WrongWork(f"{here + there:g} of {len(prompt)} tokens were computed")
        prompts.check(number, answer.token_ids)
        whole = second_token(answer)
        pairs.see(
            prefill_leg_seconds=leg, first_token_seconds=answer.first_token_seconds,
            whole_seconds=whole, computed_once=(here + there) / len(prompt),
        )  # fmt: skip
        for node in (prefill, decode):
            node.settle()
        return whole - leg

    def alone(number: int) -> float:
        prompt, target = prompts.prompt(number), Watch(decode, _COMPUTED)
        answer = decode.stream(body_of(prompt, OUTPUT_TOKENS))
        if target.moved() != [len(prompt)]:
            raise WrongWork("the decode node found a prompt that it was to compute")
        prompts.check(number, answer.token_ids)
        decode.settle()
        return answer.first_token_seconds

    pairs.take(scale.pairs, split, alone)
    return pairs


def take_wire(scale: Scale, scratch: Path, stack: ExitStack) -> Pairs:
    """Measure pairs: a hand-over, and as many bare bytes, through the same link."""
    model = scratch / "wide"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(WIDE_MODEL))
    cache = stack.enter_context(open_cache(1024 * MIB))
    link = stack.enter_context(Link(cache, scratch, scale.wire_bits))
    flags = ("--load-format", "dummy", "--num-blocks", "200", "--role")
    prefill, decode = start(
        stack, scratch,
        *(Wish((*cache.flags(host, "384MiB"), *flags, role), model)
          for host, role in ((HOST, "prefill"), (LINK_HOST, "decode"))),
    )  # fmt: skip
    prompts, pairs = Prompts(scale.wide_tokens), Pairs()
    num_bytes = WIDE_TOKEN_BYTES * scale.wide_tokens

    def bare(_number: int) -> float:
        seconds = link.bare_seconds(num_bytes)
        pairs.see(link_reached=8 * num_bytes / seconds / scale.wire_bits)
        return seconds

    def through(number: int) -> float:
        seconds, body = hand_over(prefill, body_of(prompts.prompt(number), OUTPUT_TOKENS))
        target = Watch(decode, _COMPUTED, _LOADED)
        answer = decode.stream(body)
        computed, loaded = target.moved()
        _check_loaded(answer, computed)
        if loaded < num_bytes:
            raise WrongWork(f"{loaded:g} bytes came through the link, not {num_bytes}")
        pairs.see(prefill_seconds=seconds, loaded_bytes=loaded)
        for node in (prefill, decode):
            node.settle()
        return second_token(answer)

    pairs.take(scale.pairs, bare, through)
    return pairs


def take_push(scale: Scale, scratch: Path, stack: ExitStack) -> Pairs:
    """Measure pairs: a prompt computed in one step, whose blocks are sent at the end, and the same
    prompt computed and sent in chunks."""
    cache = stack.enter_context(open_cache(512 * MIB))
    link = stack.enter_context(Link(cache, scratch))
    flags = (*cache.flags(LINK_HOST, "256MiB"), "--role", "prefill", "--num-blocks", "600")
    steps = (scale.chunk_tokens, -(-scale.prompt_tokens // BLOCK_TOKENS) * BLOCK_TOKENS)
    wishes = [Wish((*flags, "--max-num-batched-tokens", str(step))) for step in steps]
    by_chunk, at_end = start(stack, scratch, *wishes)
    prompts, pairs = Prompts(scale.prompt_tokens), Pairs()

    def take(node: Node, number: int) -> tuple[float, float]:
        watch = Watch(node, _STORED)
        seconds, _ = hand_over(node, body_of(prompts.prompt(number), 1))
        node.settle()
        return seconds, watch.moved()[0]

    # The first runs, without a rate limit, measure the seconds of the prefill and the bytes.
    free = [take(by_chunk, -number) for number in range(1, 4)]
    prefill_seconds, num_bytes = sorted(free)[1]
    link.set_rate(8 * num_bytes / prefill_seconds)

    def timed(node: Node, number: int) -> float:
        seconds, sent = take(node, number)
        if sent != num_bytes:
            raise WrongWork(f"{sent:g} bytes were sent of one prompt, {num_bytes:g} of another")
        return seconds

    pairs.take(scale.pairs, lambda n: timed(at_end, n), lambda n: timed(by_chunk, n))
    bare = link.bare_seconds(int(num_bytes))
    pairs.see(link_bits=link.bits_per_second, prefill_seconds=prefill_seconds, bare_seconds=bare)
    return pairs


class Arrival(NamedTuple):
    """A request, and the time at which it arrives."""

    at_seconds: float
    prompt: list[int]
    answer_tokens: int


def make_arrivals(scale: Scale, seed: int) -> list[Arrival]:
    """Return arrivals of chats and of long prompts, two Poisson processes of at least one
    arrival."""
    rng = random.Random(f"arrivals {seed}")
    chats = (scale.chats_per_second, *scale.chat_tokens)
    longs = (scale.longs_per_second, scale.prompt_tokens, scale.long_answer_tokens)
    found = []
    for per_second, prompt_tokens, answer_tokens in (chats, longs):
        at = min(rng.expovariate(per_second), scale.arrival_seconds / 2)
        while at < scale.arrival_seconds:
            found.append(Arrival(at, random_prompt(rng, prompt_tokens), answer_tokens))
            at += rng.expovariate(per_second)
    return sorted(found)


async def replay(port: int, arrivals: Sequence[Arrival]) -> list[StreamedAnswer]:
    """Send all requests at their times of arrival; return the answers in the order of `arrivals`.
    Raises RequestFailed."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def one(arrival: Arrival) -> StreamedAnswer:
        await asyncio.sleep(max(0.0, began + arrival.at_seconds - loop.time()))
        body = body_of(arrival.prompt, arrival.answer_tokens)
        return await ask(HOST, port, COMPLETIONS, body, 300.0)

    return await asyncio.gather(*map(one, arrivals))


def take_itl(scale: Scale, scratch: Path, stack: ExitStack) -> Pairs:
    """Measure pairs: the same arrivals at a prefill and a decode node, and at two nodes that each
    prefill and decode."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise ConfigError("inter-token times take two cores; leave itl out of --cases")
    cache = stack.enter_context(open_cache(512 * MIB))
    common = ("--num-blocks", "1200", "--max-num-batched-tokens", str(scale.step_tokens))
    tiers = (*common, *cache.flags(HOST, "512MiB"), "--role")
    wishes = [Wish(common, core=core) for core in cores]
    for core, role in zip(cores, ("prefill", "decode"), strict=True):
        wishes.append(Wish((*tiers, role), core=core))
    *mixed, prefill, decode = start(stack, scratch, *wishes)
    together = stack.enter_context(open_router([], mixed, scratch))
    apart = stack.enter_context(open_router([prefill], [decode], scratch))
    pairs = Pairs()
    answers: dict[int, list[list[int]]] = {}

    def take(router: Node, side: str, number: int) -> float:
        arrivals = make_arrivals(scale, number)
        longs = sum(len(each.prompt) == scale.prompt_tokens for each in arrivals)
        watch = Watch(prefill, _HANDED, _INCOMPLETE)
        done = asyncio.run(replay(router.port, arrivals))
        _check_handed(watch.moved(), longs if router is apart else 0)
        made = [answer.token_ids for answer in done]
        if answers.setdefault(number, made) != made:
            raise WrongWork("equal prompts were given other tokens by two nodes that do both")
        gaps = list(chain.from_iterable(answer.gaps_seconds for answer in done))
        firsts = [answer.first_token_seconds for answer in done]
        pairs.see(**{
            f"{side}_requests": len(done), f"{side}_median_seconds": percentile(gaps, 50),
            f"{side}_first_token_p99_seconds": percentile(firsts, 99),
        })  # fmt: skip
        for each in (prefill, decode):
            each.settle()
        return percentile(gaps, 99)

    pairs.take(scale.pairs, lambda n: take(apart, "split", n), lambda n: take(together, "mixed", n))
    return pairs
