# SPDX-License-Identifier: Apache-2.0
"""One random life of a whole engine core: drawn from a seed, lived, and looked through at its end.

A life has ages: between two of them the engine is shut down and started again on the same SSD. What
must not be left inside the engine is looked for by `leftovers.py`. Where the model runner lives in
another process, that one may lie or be killed in the first age; then the age ends there.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stratakv.engine.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from stratakv.engine.config.speculative_config import (
    DRAFT_MODEL,
    EAGLE,
    OF_MODELS,
    SpeculativeConfig,
)
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.core.executor import ExecutorDied, InProcessExecutor
from stratakv.engine.core.worker_process.process_executor import ProcessExecutor
from stratakv.engine.request.core_messages import AddRequest, TokenOutput, share_prompt
from stratakv.engine.request.logprobs import PositionLogprobs, PromptLogprobs
from stratakv.engine.request.request import pack_token_ids
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.scheduler.output import SchedulerOutput
from stratakv.tiers.base import StoreTier
from stratakv.tiers.ssd.store import SsdStore

from .checked_logprobs import check_logprobs
from .faulty_parts import MODEL_FAULT, FaultyStore, Mischief, damage, faulty_forward, patch_tiers
from .faulty_worker import LIES
from .leftovers import check_nothing_left, check_references, is_busy
from .offload_config import offload_config
from .other_process import OtherProcess
from .random_wishes import World, draw_params
from .recorder import Recorder
from .stepping import Driver
from .threads import check_threads

MAX_MODEL_LEN = 128
AGE_SECONDS = 60.0
# Two indexes and the small files of an SSD store that holds a few blocks.
SSD_BASE_BYTES = 2 * 67 * 4096 + 128 * 1024
NAN_FAULT = "were not finite"

STORE_FAULTS = {"lookup fails": 0.05, "lookup lies": 0.1, "busy": 0.1, "refuses": 0.05,
                "load misses": 0.1, "future fails": 0.1, "late": 0.3}  # fmt: skip
COPY_FAULTS = {"slow copy": 0.3, "copy fails": 0.1}
MODEL_FAULTS = {"forward raises": 0.01, "logits are NaN": 0.01}
KILLED = "killed from outside"
ENDS = LIES | {KILLED: "ended with exit status -9"}


@dataclass
class Asked:
    """One request and everything it got."""

    prompt: tuple[int, ...]
    params: SamplingParams
    expected: list[int]
    salt: str
    skips: bool
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    last: TokenOutput | None = None
    spoilt: bool = False
    known_before: list[tuple[int, ...]] = field(default_factory=list)  # of its salt, since cleared


class Life:
    """Drawn from `seed`, lived by `live`. What goes wrong is raised as an AssertionError.

    `other` has the model runner, None: this process. `end` is how it ends, one of ENDS; `has_died`
    says whether it came to that. `overlaps`: each step is made and begun while the one before is
    computed, and there is one age.
    """

    def __init__(
        self,
        world: World,
        seed: int,
        path: Path,
        other: OtherProcess | None = None,
        end: str = "",
        *,
        num_groups: int = 1,
        overlaps: bool = False,
    ) -> None:
        self._world = world
        self._seed = seed
        self._other = other
        self._end = end
        self._num_groups = num_groups
        self.has_died = False
        # Drawn apart, so that a seed leads the life that it led before.
        self._apart = random.Random(f"apart {seed}")
        self._depth, self._runs_ahead = self._apart.choice([(1, False), (2, False), (2, True)])
        method = self._apart.choice(["none", "ngram", "suffix", DRAFT_MODEL])
        # Drawn apart from these, for the same reason.
        if method == DRAFT_MODEL and random.Random(f"head {seed}").random() < 0.5:
            method = EAGLE
        if method in OF_MODELS and world.has_states:
            method = "ngram"
        self._has_draft = method in OF_MODELS
        draft = {DRAFT_MODEL: world.model, EAGLE: world.head}.get(method)
        self._speculative = SpeculativeConfig(
            method=method,
            model=draft,
            num_tokens=self._apart.choice([1, 3, 8]),
            prompt_lookup_min=1,
            adaptive=self._apart.random() < 0.3,
        )
        self._overlaps = overlaps
        if overlaps:
            self._depth, self._runs_ahead = 2, True
        self._rng = rng = random.Random(seed)
        self._path = path
        rates: dict[str, float] = {}
        for faults in (STORE_FAULTS, COPY_FAULTS, MODEL_FAULTS):
            if rng.random() < 0.5:
                rates |= faults
        self._rates = rates
        self._mischief = Mischief(seed, rates)
        self._has_nans = "logits are NaN" in rates
        self._late_seconds = rng.choice([0.005, 0.1])
        self._read_seconds = rng.choice([0.03, 5.0])
        self._tiers = rng.choice([(), ("cpu",), ("cpu", "ssd"), ("cpu", "ssd"), ("cpu", "ssd")])
        self._block_size = rng.choice([1, 2, 4, 8, 16])
        self._block_hash = rng.choice(["sha256", "sha256", "sha256_cbor"])
        self._abort_rate = rng.choice([0.0, 0.02, 0.1])
        self._cut_rate = rng.choice([0.0, 0.0, 0.01])
        self._salts = rng.choice([("",), ("", "a", "b")])
        # The fewer there are, the more often is a block asked for again.
        self._prompts = rng.sample(world.prompts, rng.choice([3, 6, 20]))
        self._number = 0
        # By salt, what blocks may hold the K and V of.
        self._known: dict[str, list[tuple[int, ...]]] = {salt: [] for salt in self._salts}
        self._wake = threading.Event()
        self.core: EngineCore

    def live(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From the first start to the last shutdown."""
        patch_tiers(monkeypatch, self._mischief, self._make_store, self._read_seconds)
        ages = self._rng.choice([1, 2, 3]) if "ssd" in self._tiers else 1
        if self._overlaps:
            ages = 1
        for age in range(ages):
            if age:
                damage(self._path / "blocks", self._rng)
            before = frozenset(threading.enumerate())
            if self._other is not None:
                lie = self._end if self._end in LIES and not age else ""
                lie_at = self._apart.randint(1, 30)
                self._other.patch(monkeypatch, self._seed + age, self._rates, lie, lie_at)
            try:
                self._start()
            except ExecutorDied as error:
                self._note_death(error)
            else:
                self._live_age()
            check_threads(before)
            if self._other is not None:
                self._other.check_gone()

    def _live_age(self) -> None:
        """Until its engine is shut down, or cannot go on."""
        try:
            self._arm()
            self._age()
        except ExecutorDied as error:
            self._note_death(error)
            self._check_dead()
        finally:
            self.core.shutdown(self._rng.choice([0.0, 20.0, 20.0]))
        self._check_books()

    def _note_death(self, error: ExecutorDied) -> None:
        """It ends as it was to end, and once."""
        assert self._end, "the worker was to live"
        assert ENDS[self._end] in str(error), error
        assert not self.has_died
        self.has_died = True

    def _check_dead(self) -> None:
        """The engine has no other end; its clients are told so once, instead of what is lost."""
        assert self.core.has_work(), "whoever waits for a step hears why there is none"
        with pytest.raises(ExecutorDied):
            self.core.executor.poll_copies()
        for name in self._open():
            asked = self._asked[name]
            asked.spoilt = True
            asked.last = TokenOutput(name, [], finish_reason="abort")
        self._check_answers()

    def _check_books(self) -> None:
        """After the shutdown: every request has ended once, every step came back once, and nobody
        was told a token that does not count."""
        core = self.core
        self._recorder.check_keys(core.scheduler)
        self._recorder.check_all_ended(core.scheduler)
        assert len(set(self._landed)) == len(self._landed), "a step came back twice"
        made = {step.step_id for step in self._recorder.steps}
        # One that the worker could not be told of does not come back. There may be two: what the
        # worker had answered before is delivered between them.
        assert len(made - set(self._landed)) <= 2 * self.has_died
        assert made >= set(self._landed)
        told = sum(len(asked.token_ids) for asked in self._asked.values())
        assert told == core.scheduler.counts["generated_tokens"]
        # Blocks that a load was writing to when there was no more time stay held.
        assert not (core.scheduler.requests or core.scheduler._states.running)

    def _make_store(self, *args: Any, **kwargs: Any) -> StoreTier:
        return FaultyStore(SsdStore(*args, **kwargs), self._mischief, self._late_seconds)

    def _start(self) -> None:
        self._recorder = Recorder(self._block_size)
        self.core = EngineCore(
            self._config(), max_steps_in_flight=self._depth, observer=self._recorder
        )
        self._wake.clear()
        self.core.set_wakeup(self._wake.set)
        self._landed: list[int] = []
        self._note_landings()
        self._asked: dict[str, Asked] = {}
        self._driver = Driver(
            self.core.scheduler,
            lambda: self._take(self.core.step()),
            self._wake,
            seconds=AGE_SECONDS,
            longest_sleep=0.05,
            has_work=self.core.has_work,
        )

    def _arm(self) -> None:
        """From now on the model may fail."""
        executor = self.core.executor
        if isinstance(executor, InProcessExecutor):
            model = executor.runner.model
            model.forward = faulty_forward(model.forward, self._mischief)  # type: ignore[method-assign]
        else:
            assert self._other is not None
            self._other.arm(self.core)

    def _note_landings(self) -> None:
        scheduler: Any = self.core.scheduler

        def noting(land: Any) -> Any:
            def landed(step: SchedulerOutput, *rest: Any) -> list[TokenOutput]:
                self._landed.append(step.step_id)
                outputs: list[TokenOutput] = land(step, *rest)
                return outputs

            return landed

        for name in ("update_from_output", "fail_step", "give_up_step"):
            setattr(scheduler, name, noting(getattr(scheduler, name)))

    def _config(self) -> EngineConfig:
        rng = self._rng
        size, has_states = self._block_size, self._world.has_states
        num_seqs = rng.randint(1, 6)
        chunked = rng.random() < 0.8
        budget = num_seqs + rng.choice([0, 1, 5, 30, 150]) if chunked else MAX_MODEL_LEN + 3
        config = EngineConfig(
            model=ModelConfig(self._world.model, "tiny", dtype="float64",
                              max_model_len=MAX_MODEL_LEN,
                              # By the compiled kernels where there are some, and without.
                              attention_backend="auto" if self._seed % 4 else "gather"),
            cache=CacheConfig(
                block_size=size,
                # From just enough for one request to plenty for all.
                num_blocks=1 + MAX_MODEL_LEN // size + self._world.state_pages(size)
                + rng.choice([0, 0, 1, 5, 40]),
                state_checkpoint_interval=size * self._apart.choice([0, 1, 3]),
                watermark=rng.choice([0.0, 0.01, 0.2]),
                block_hash=self._block_hash,
                num_groups=self._num_groups,
            ),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=budget,
                max_num_seqs=num_seqs,
                long_prefill_token_threshold=rng.choice([0, 0, 7]) if chunked else 0,
                enable_chunked_prefill=chunked,
                max_waiting_requests=rng.choice([3, 4096, 4096, 4096]),
                admit_below=rng.choice([0.1, 0.8, 0.8]),
                preempt_above=rng.choice([0.8, 0.95, 1.0]),
            ),
            offload=offload_config(
                tiers=self._tiers,
                load=rng.choice(["auto", "always", "always" if has_states else "both"]),
                ssd_path=self._path,
                io_threads=2,
            ),
            speculative=self._speculative,
            num_threads=1,
            executor="uni" if self._other is None else "mp",
            async_scheduling=self._runs_ahead,
        )  # fmt: skip
        # Below what an operator may ask for, so that everything is evicted all the time.
        slot_bytes = 4096 * -(-size * 1024 * (1 + self._has_draft) // 4096)
        slots = MAX_MODEL_LEN // size
        for part, wanted in (
            (
                config.offload.cpu,
                slot_bytes * rng.choice([1, slots // 2, slots, 8 * slots, 8 * slots]),
            ),
            (
                config.offload.ssd,
                SSD_BASE_BYTES + (slot_bytes + 4096) * rng.choice([3, slots, 8 * slots]),
            ),
        ):
            object.__setattr__(part, "capacity_bytes", max(wanted, slot_bytes))
        return config

    def _age(self) -> None:
        """Ask, abort, forget and step until all has been answered, or until the plug is pulled."""
        rng = self._rng
        to_ask = rng.randint(2, 20)
        pace = rng.choice([0.05, 0.3, 1.0])
        while to_ask or self._open():
            if to_ask and (rng.random() < pace or not self._open()):
                self._ask()
                to_ask -= 1
            if rng.random() < self._abort_rate:
                self._abort()
            if rng.random() < (0.02 if self._open() else 0.2):
                self._forget()
            if rng.random() < self._cut_rate:
                return
            if self._end == KILLED and not self.has_died and self._apart.random() < 0.05:
                self._kill()
            self._driver.turn()
            if rng.random() < 0.2:
                check_references(self.core)
                self._recorder.check_keys(self.core.scheduler)
        self._driver.run(
            lambda: not self.core.steps.in_flight
        )  # what they say is told the worker next
        self._driver.calm_down(partial(is_busy, self.core))
        self._check_answers()
        check_nothing_left(self.core, None if self._other is None else self._other.look(self.core))

    def _kill(self) -> None:
        executor = self.core.executor
        assert isinstance(executor, ProcessExecutor)
        if executor.is_alive:
            os.kill(executor.pid, signal.SIGKILL)

    def _open(self) -> list[str]:
        return [name for name, asked in self._asked.items() if asked.last is None]

    def _ask(self) -> None:
        rng = self._rng
        prompt = rng.choice(self._prompts)
        params, expected = draw_params(self._world, prompt, rng)
        asked = Asked(prompt, params, expected, rng.choice(self._salts), rng.random() < 0.1)
        # A name may come back once its bearer is gone.
        name = f"r{self._number if rng.random() < 0.8 else rng.randint(0, 2)}"
        if name in self._asked or name in self.core.scheduler._states.requests:
            name = f"n{self._number}"
        self._number += 1
        self._asked[name] = asked
        self._known[asked.salt].append((*prompt, *expected))
        family = [
            AddRequest(
                name,
                pack_token_ids(prompt),
                params,
                cache_salt=asked.salt,
                skip_reading_prefix_cache=asked.skips,
            )
        ]
        for number in range(self._apart.choice([0] * 8 + [1, 3])):
            own, answer = draw_params(self._world, prompt, self._apart)
            fork = f"{name}-fork{number}"
            if fork in self._asked or fork in self.core.scheduler._states.requests:
                continue
            self._asked[fork] = Asked(prompt, own, answer, asked.salt, asked.skips)
            self._known[asked.salt].append((*prompt, *answer))
            family.append(msgspec.structs.replace(family[0], request_id=fork, sampling_params=own))
        share_prompt(family)
        self._take(self.core.add(family[0]))

    def _abort(self) -> None:
        names = self._open()
        if self._rng.random() < 0.5:  # those that are being loaded
            loading = {each.request_id for each in self.core.scheduler._states.loads.blocking}
            names = [name for name in names if name in loading]
        for name in names:
            if self._rng.random() < 0.5:
                self.core.abort_requests([name])
                self._asked[name].spoilt = True
                self._asked[name].last = TokenOutput(name, [], finish_reason="abort")

    def _forget(self) -> None:
        scope = self._rng.choice(["pool", "all"])
        idle = self.core.scheduler.manager.pool.is_idle
        try:
            self.core.call("reset_prefix_cache", scope)
        except ValueError:
            assert not idle
            return
        assert idle
        if scope == "all" or not self._tiers:
            waiting = [self._asked[name] for name in self._open()]
            for asked in waiting:  # it may have run, and been preempted, before
                asked.known_before += self._known[asked.salt]
            for salt in self._known:
                self._known[salt] = [(*a.prompt, *a.expected) for a in waiting if a.salt == salt]

    def _take(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            asked = self._asked[output.request_id]
            assert asked.last is None, f"{output} after {asked.last}"
            if output.num_cached_tokens is not None:
                self._check_cached(asked, output)
            asked.token_ids += output.new_token_ids
            asked.logprobs += output.logprobs or ()
            if output.prompt_logprobs is not None:
                assert asked.token_ids == output.new_token_ids, "they come with the first token"
                asked.prompt_logprobs = output.prompt_logprobs
            if output.finish_reason is not None:
                asked.last = output
                asked.spoilt |= output.finish_reason == "error"

    def _check_cached(self, asked: Asked, output: TokenOutput) -> None:
        """No more was found than requests of the same salt have brought."""
        cached = output.num_cached_tokens or 0
        assert cached == sum((output.cached_tokens_by_tier or {}).values())
        if "fork" in output.request_id and cached == len(asked.prompt):
            return  # computed with that of another answer
        skips = asked.skips or asked.params.prompt_logprobs is not None
        assert not (skips and cached)
        mine = (*asked.prompt, *asked.expected)
        others = list(self._known[asked.salt])
        others.remove(mine)
        others += asked.known_before
        longest = max((common_length(asked.prompt, other) for other in others), default=0)
        longest = min(longest, len(asked.prompt) - 1) // self._block_size * self._block_size
        assert cached <= longest, f"{cached} tokens cached, where {longest} can be"

    def _check_answers(self) -> None:
        for name, asked in self._asked.items():
            last = asked.last
            assert last is not None
            if asked.spoilt:
                assert asked.token_ids == asked.expected[: len(asked.token_ids)], name
                assert last.finish_reason != "error" or expected_fault(last), last
            else:
                assert asked.token_ids == asked.expected, name
                assert last.finish_reason in ("stop", "length"), last
            check_logprobs(
                self._world.model,
                asked.prompt,
                asked.token_ids,
                asked.params,
                asked.logprobs,
                asked.prompt_logprobs,
                # A fault may hit one position of a prompt and spare the one that is sampled.
                prompt_may_lack_numbers=self._has_nans,
            )


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading items are equal."""
    length = min(len(first), len(second))
    return next((i for i in range(length) if first[i] != second[i]), length)


def expected_fault(output: TokenOutput) -> bool:
    """Whether an error is one that was asked for."""
    words = (MODEL_FAULT, NAN_FAULT, "requests are waiting")
    return any(word in (output.error or "") for word in words)
