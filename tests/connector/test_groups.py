# SPDX-License-Identifier: Apache-2.0
"""Two cache groups over real tiers: a scheduler, a pool of bytes, and a model that writes down what
each slot of each group holds and checks all that it attends to."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from stratakv.connector.build import build_offload
from stratakv.connector.costs.economics import Choice
from stratakv.connector.messages import MatchKind, Part
from stratakv.connector.parts import FirstSeen, Parts
from stratakv.engine.cache.block_hash import make_block_hasher
from stratakv.engine.cache.kv_cache_manager import KVCacheManager
from stratakv.engine.config.engine_config import SchedulerConfig
from stratakv.engine.models.layer_attention import LayerAttention, full
from stratakv.engine.request.request import Request
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from stratakv.engine.scheduler.scheduler import Scheduler
from stratakv.tiers.block import BlockLayout, pack_key
from stratakv.tiers.tier_settings import CpuSettings, SsdSettings, TierSettings

SIZE = 4
LAYOUT = BlockLayout(1, SIZE, 1, 8, "float32")
WAIT_SECONDS = 20.0
HASHER = make_block_hasher(b"g" * 32, SIZE)


def states(tokens: list[int]) -> list[int]:
    """A number for each position that depends on all tokens up to it."""
    numbers, state = [], 17
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
        numbers.append(state)
    return numbers


def seen_by(attention: Sequence[LayerAttention]) -> list[FirstSeen | None]:
    """What `Parts` takes of groups that attend so."""
    return [None if kind.is_full else kind.first_seen for kind in attention]


class Engine:
    """A scheduler and both sides of a connector, for models of several groups."""

    def __init__(
        self,
        num_groups: int,
        num_blocks: int,
        slots: int,
        choice: Choice,
        ssd: Path | None,
        attention: Sequence[LayerAttention] = (),
    ) -> None:
        self.attention = tuple(attention) or (full(),) * num_groups
        self.side, self.worker = build_offload(
            LAYOUT,
            TierSettings(
                cpu=CpuSettings(capacity_bytes=slots * LAYOUT.slot_bytes, populate_threads=1),
                ssd=SsdSettings(path=ssd, capacity_bytes=16 * 1024**2, io_threads=1),
                load=choice.value,
            ),
            namespace=b"test",
            parts=Parts(SIZE, seen_by(self.attention)),
        )
        self.num_groups = num_groups
        self.manager = KVCacheManager(
            num_blocks, SIZE, 200, attention=self.attention, watermark=0.0, most_step_tokens=24
        )
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=3),
            self.manager,
            eos_token_ids=frozenset(),
            connector=self.side,
        )
        self.pool = torch.full((num_blocks, 1, 2, SIZE, 1, 8), -1.0)
        self.worker.register_pool(self.pool)
        self.woken = threading.Event()
        self.side.set_wakeup(self.woken.set)
        self.parts: set[Part] = set()
        self.kinds: set[MatchKind] = set()
        self.num_checked = 0

    def run(self, name: str, prompt: list[int], max_tokens: int = 1) -> Request:
        params = SamplingParams(max_tokens=max_tokens)
        request = Request(name, prompt, params, block_hasher=HASHER)
        self.scheduler.add_request(request)
        self.run_all()
        return request

    def run_all(self) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while self.scheduler.requests:
            while not self.scheduler.has_runnable_work():
                assert time.monotonic() < deadline
                self.woken.wait(0.02)
                self.woken.clear()
            self.step()

    def let_the_disk_keep_up(self) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        self.step()
        while self.side._hierarchy._write_backs.in_flight:
            assert time.monotonic() < deadline
            self.woken.wait(0.02)
            self.woken.clear()
            self.step()

    def step(self) -> None:
        output = self.scheduler.schedule()
        meta = output.connector_meta
        assert meta is not None
        jobs = [*meta.stores, *meta.ahead, *meta.loads]
        self.parts.update(job.part for job in jobs)
        self.worker.start_step(meta)
        self.worker.wait_before_forward()
        sampled = {name: [self.forward(output, name)] for name in output.num_scheduled_tokens}
        result = ModelRunnerOutput(
            {name: ids for name, ids in sampled.items() if ids != [-1]},
            connector_output=self.worker.poll(),
        )
        self.scheduler.update_from_output(output, result)

    def forward(self, output: SchedulerOutput, name: str) -> int:
        """Write a request's new slots, then check all of them. The next token, or -1."""
        request = self.scheduler.requests[name]
        tokens = [int(token) for token in request.all_token_ids]
        end = self.scheduler._in_flight[-1].entries
        (stop,) = [entry.end for entry in end if entry.request is request]
        count = output.num_scheduled_tokens[name]
        wanted = states(tokens)[:stop]
        for group, table in enumerate(self.manager.get_block_ids(name)):
            for position in range(stop - count, stop):
                slot = self.pool[table[position // SIZE], 0, :, position % SIZE]
                slot.fill_(wanted[position] + group / 4)
            for position in range(self.attention[group].first_seen(stop - count), stop):
                state = wanted[position]
                slot = self.pool[table[position // SIZE], 0, :, position % SIZE]
                assert torch.all(slot == state + group / 4), (name, group, position)
                self.num_checked += 1
        return wanted[-1] % 50 if stop == len(tokens) else -1

    def close(self) -> None:
        self.worker.shutdown()
        self.side.update_from_worker(self.worker.poll())
        self.side.shutdown(WAIT_SECONDS)


@pytest.fixture(params=[Choice.LOAD, Choice.OVERLAP], ids=["blocking", "overlapped"])
def choice(request: pytest.FixtureRequest) -> Choice:
    return Choice(request.param)


@pytest.fixture(params=[1, 2, 3])
def engine(request: pytest.FixtureRequest, choice: Choice) -> Iterator[Engine]:
    num_groups = request.param
    made = Engine(num_groups, 1 + 14 * num_groups, 100 * num_groups, choice, None)
    yield made
    made.close()


PROMPT = list(range(1, 34))  # eight full blocks and a token


def test_blocks_of_all_groups_go_out_and_come_back(engine: Engine) -> None:
    engine.run("first", PROMPT)
    engine.run("other", list(range(100, 150)))  # evicts all of them
    again = engine.run("again", PROMPT)
    groups = range(engine.num_groups)
    assert engine.parts == {Part(group) for group in groups}
    stats = engine.side.stats()
    loaded = again.cached_tokens_by_tier["cpu"]
    assert stats["tokens_loaded"] == {"cpu": loaded}
    assert loaded > 0
    num_blocks = loaded // SIZE
    assert stats["load_bytes"] == num_blocks * LAYOUT.page_bytes * engine.num_groups
    assert stats["failures"] == {}


@pytest.mark.parametrize("which", [0, -1])
def test_a_hit_needs_the_blocks_of_every_group(engine: Engine, which: int) -> None:
    """The fourth block of one group is lost: three are loaded of each."""
    group = range(engine.num_groups)[which]
    first = engine.run("first", PROMPT)
    engine.run("other", list(range(100, 150)))
    hierarchy = engine.side._hierarchy
    hierarchy.forget_blocks([pack_key(first.block_hashes[3], group)])
    match = engine.side.get_matched_tokens(Request("asks", PROMPT, SamplingParams(),
                                                   block_hasher=HASHER), 0)  # fmt: skip
    assert match.tokens == 3 * SIZE
    again = engine.run("again", PROMPT)
    assert again.num_cached_tokens <= 3 * SIZE


def test_blocks_of_all_groups_come_from_a_disk(tmp_path: Path) -> None:
    """The slab holds only what is on its way."""
    engine = Engine(2, 1 + 28, 40, Choice.LOAD, tmp_path)
    rng = random.Random(5)
    prompts = [[rng.randrange(50) for _ in range(rng.randrange(20, 50))] for _ in range(6)]
    for turn in range(4):
        for number, prompt in enumerate(prompts):
            engine.run(f"{turn}-{number}", prompt, max_tokens=3)
            engine.let_the_disk_keep_up()
    stats = engine.side.stats()
    engine.close()
    loaded = stats["tokens_loaded"]
    assert isinstance(loaded, dict) and loaded.get("ssd", 0) > 0
    assert engine.parts == {Part(0), Part(1)}


@pytest.mark.parametrize("trial", range(10))
def test_random_prompts_with_shared_heads(choice: Choice, trial: int) -> None:
    """Lack of slots, lack of blocks, evictions and preemptions: never a wrong byte."""
    rng = random.Random(trial)
    groups = rng.choice([2, 3])
    engine = Engine(groups, 1 + groups * rng.choice([14, 20]), rng.choice([6, 60]), choice, None)
    heads = [[rng.randrange(50) for _ in range(20)] for _ in range(3)]
    for number in range(25):
        prompt = rng.choice(heads)[: rng.randrange(1, 21)] + [number] * rng.randrange(1, 20)
        params = SamplingParams(max_tokens=rng.randrange(1, 9))
        engine.scheduler.add_request(Request(f"r{number}", prompt, params, block_hasher=HASHER))
        if rng.random() < 0.5:
            engine.run_all()
    engine.run_all()
    engine.close()
    assert engine.manager.pool.is_idle
    assert engine.num_checked
