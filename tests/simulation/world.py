# SPDX-License-Identifier: Apache-2.0
"""One simulated life of an engine with its tiers, drawn from a seed and lived in virtual time.

Requests that share beginnings come, are aborted, preempted and parked; some are forked from others
and share their blocks, and in some lives they have draft tokens. Copies are refused, break and get
stuck; stores are slow, hang, fail and forget, each for a while, and now and then all at
once, to come back one by one. Steps fail in the worker, caches are forgotten. After every step the
books must balance; in the end everybody has been answered rightly and nothing is left.

    World(seed).live()  →  the hash of all that happened, the same for the same seed
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Sequence

from stratakv.connector.connector_context import ConnectorContext
from stratakv.connector.copy_signal import CopySignal
from stratakv.connector.costs.economics import Choice
from stratakv.connector.device.base import DeviceError
from stratakv.connector.offload_scheduler import CLOSE_SECONDS, OffloadScheduler
from stratakv.connector.offload_worker import OffloadWorker
from stratakv.connector.parts import Parts as KeyParts
from stratakv.connector.request_offload import Stage
from stratakv.engine.config.engine_config import SchedulerConfig
from stratakv.engine.models.layer_attention import LayerAttention, chunk, full, window
from stratakv.engine.request.request import Request
from stratakv.engine.scheduler.exchange import LOAD_FAILED
from stratakv.engine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from stratakv.engine.scheduler.speculation import Speculation
from stratakv.tiers.admission import make_filter
from stratakv.tiers.hierarchy.hierarchy import Hierarchy
from stratakv.tiers.hierarchy.hierarchy_options import HierarchyOptions
from stratakv.tiers.hierarchy.writes import STALL_SECONDS
from stratakv.tiers.policies.known_policies import POLICIES, policy_factory

from ..engine.scheduler.conftest import SIZE, reference
from ..engine.scheduler.test_random_lives import check_invariants
from ..stepping import Driver
from .books import check_breakers, check_writes
from .clock import VirtualClock, VirtualEvent, virtual_time
from .device import COPY_SECONDS, SimDevice
from .small_slab import small_slab
from .store import MODES, SimStore
from .tiny_engine import (
    LAYOUT,
    EngineParts,
    InjectedFault,
    Slots,
    TinyEngine,
    check_nothing_left,
    is_busy,
    shut_down,
)

MAX_MODEL_LEN = 48
# Of a copy that takes longer than several steps.
SLOW_COPY_SECONDS = 0.05
# Cache groups of half of the lives; some share blocks, some forget.
PLANS: list[tuple[LayerAttention, ...]] = [
    (full(), full()),
    (window(5), window(5)),
    (full(), window(6)),
    (window(9), full(), chunk(8)),
    (full(), full(), window(3), window(3)),
]
# Of virtual time, for a request that meets every deadline there is.
LIFE_SECONDS = 600.0
SHUTDOWN_SECONDS = 30.0
RECOVERY_SECONDS = 2.0
MAX_STEPS = 20_000
# Beside stores that take nothing: until they are given up, and what their closing may take.
MOST_SHUTDOWN_SECONDS = STALL_SECONDS + CLOSE_SECONDS + 2.0


class World:
    """Drawn from `seed`; `live` raises AssertionError for what must not happen. `show` is given
    every line of the trace."""

    def __init__(self, seed: int, show: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.clock = VirtualClock()
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._barred: set[str] = set()  # requests whose load has failed
        self._trace = hashlib.sha256()
        self._show = show
        self._faulty = rng.random() < 0.8
        self._steps_fail = self._faulty
        self._fails_with_load = rng.random() < 0.2
        self._pass_seconds = rng.choice([0.0005, 0.003])
        self._token_seconds = rng.choice([1e-6, 1e-4, 1e-2])  # what the engine says of its prefill
        # By name: the prompt, the tokens of the answer at most, and the seed that tells it apart.
        self._prompts: dict[str, tuple[list[int], int, int | None]] = {}
        self._spoilt: set[str] = set()
        # Drawn apart, so that half of all seeds lead the lives that they led before.
        self._harm = random.Random(f"harm {seed}")
        self._harm_rates = dict.fromkeys(("nan", "copies", "batch"), 0.0)
        if self._faulty and self._harm.random() < 0.5:
            for kind in self._harm_rates:
                self._harm_rates[kind] = self._harm.choice([0.0, 0.02, 0.1])
        # Drawn apart too, for the same reason.
        groups = random.Random(f"groups {seed}")
        self._attention = groups.choice(PLANS) if groups.random() < 0.5 else (full(),)
        # And these; by this word the pinned seeds lead the lives that they led before.
        self._more = more = random.Random(f"checked {seed}")
        is_plain = more.random() < 0.5
        self._fork_rate = 0.0 if is_plain else more.choice([0.0, 0.1, 0.4])
        self._most_drafts = 0 if is_plain else more.choice([0, 1, 3, 6])
        self._calm_at = 0.0  # what is to befall the stores has befallen them
        self._woken = VirtualEvent(self.clock)
        size = MAX_MODEL_LEN - 1
        self._documents = [
            [rng.randint(1, 49) for _ in range(size)] for _ in range(rng.randint(2, 6))
        ]

    def live(self) -> str:
        """From start to shutdown; the hash of the trace."""
        with virtual_time(self.clock, self.rng):
            self._build()
            try:
                self._live()
                self._end()
            finally:
                self.slab.close()
        return self._trace.hexdigest()

    def note(self, *what: object) -> None:
        """One line of the trace."""
        line = f"{self.clock.now:.6f} {what}"
        self._trace.update(line.encode())
        if self._show:
            self._show(line)

    def _choose_filter(self) -> str:
        # Drawn in two parts, the later one apart, so that seeds still mean what they meant before
        # there was a fourth filter.
        name = self.rng.choice(["all", "reuse", "doorkeeper"])
        if name == "all":
            name = random.Random(f"filter {self.seed}").choice(["all", "while-used"])
        return name

    def _build(self) -> None:
        rng, clock = self.rng, self.clock
        spare = rng.choice([0, 1, 4, 20])
        num_slots = rng.choice([2, 8, 16, 40, 100])
        policy = rng.choice(sorted(POLICIES))
        self.slab = small_slab(LAYOUT, num_slots, policy_factory(policy)(num_slots))
        self.stores = [
            SimStore(
                name, LAYOUT, rng.choice([4, 500]), clock, rng,
                self._may_hold, self.wrong, is_shared=name == "net",
            )
            for name in ["ssd", "net"][: rng.choice([0, 1, 1, 2])]
        ]  # fmt: skip
        admission = self._choose_filter()
        signal = CopySignal()
        hierarchy = Hierarchy(
            self.slab,
            self.stores,
            wakeup=signal.wake,
            options=HierarchyOptions(
                watermark=rng.choice([0.25, 1.0]),
                read_seconds=rng.choice([0.05, 5.0]),
                write_seconds=rng.choice([0.05, 15.0]),
                inclusive=rng.random() < 0.6,
                admission=make_filter(admission, 100),
            ),
        )
        fault_rate = rng.choice([0.0, 0.02, 0.2]) if self._faulty else 0.0
        self.device = SimDevice(
            clock, rng, fault_rate,
            copy_seconds=self._harm.choice([COPY_SECONDS, SLOW_COPY_SECONDS]),
            refuses=lambda: self._is_harmed("copies"),
        )  # fmt: skip
        self.device.register_slab(self.slab)
        choice = rng.choice([Choice.AUTO, *Choice])
        seen = [None if kind.is_full else kind.first_seen for kind in self._attention]
        side = OffloadScheduler(
            ConnectorContext(hierarchy, KeyParts(SIZE, seen), signal, choice=choice)
        )
        side.set_wakeup(self._woken.set)
        max_wait_seconds = rng.choice([0.02, 30.0])
        worker = OffloadWorker(self.device, signal.note_ended, store_wait_seconds=max_wait_seconds)
        config = self._config()
        step_tokens = config.most_step_tokens
        kinds = self._attention
        blocks = 1 + spare + sum(k.most_blocks(MAX_MODEL_LEN, SIZE, step_tokens) for k in kinds)
        slots = Slots(blocks)
        worker.register_pool(slots.pool)  # type: ignore[arg-type]
        self.engine = TinyEngine(
            EngineParts(side, worker),
            slots,
            config,
            max_model_len=MAX_MODEL_LEN,
            watermark=rng.choice([0.0, 0.2]),
            fails_with_load=self._fails_with_load,
            targets=lambda: self.device.targets,
            pass_time=lambda: clock.advance(self._pass_seconds),
            fails=lambda: self._is_harmed("batch"),
            attention=kinds,
            speculation=self._speculation(),
            drafts=self._more,
        )
        self._driver = Driver(
            self.engine.scheduler,
            self._step,
            self._woken,
            monotonic=clock.monotonic,
            seconds=LIFE_SECONDS,
            grace_seconds=0.0,
        )
        names = [store.name for store in self.stores]
        self.note("built", blocks, num_slots, policy, admission, choice, names)

    def _may_hold(self, key: bytes, page: bytes) -> bool:
        return self.engine.may_hold(key, page)

    def _is_harmed(self, kind: str) -> bool:
        harmed = self._harm.random() < self._harm_rates[kind]
        self.seen[f"harmed {kind}"] += harmed
        return harmed

    def _config(self) -> SchedulerConfig:
        rng = self.rng
        num_seqs = rng.randint(1, 6)
        chunked = rng.random() < 0.8
        return SchedulerConfig(
            max_num_batched_tokens=num_seqs + rng.choice([1, 9, 40]) if chunked else MAX_MODEL_LEN,
            max_num_seqs=num_seqs,
            enable_chunked_prefill=chunked,
            admit_below=(admit_below := rng.choice([0.3, 0.8, 1.0])),
            preempt_above=max(admit_below, self._harm.choice([0.5, 0.9, 1.0, 1.0])),
        )

    def _speculation(self) -> Speculation | None:
        if not self._most_drafts:
            return None
        is_adaptive, looks_ahead = self._more.random() < 0.3, self._more.random() < 0.5
        return Speculation(self._most_drafts, is_adaptive, looks_ahead)

    def _live(self) -> None:
        rng = self.rng
        pace = rng.choice([0.1, 0.3, 1.0])
        to_ask = rng.randint(3, 40)
        while to_ask or self.engine.scheduler.requests:
            if to_ask and (rng.random() < pace or not self.engine.scheduler.requests):
                to_ask = max(0, to_ask - self._ask())
            if self._faulty:
                self._trouble()
            self._driver.turn()

    def _ask(self) -> int:
        """A prompt is asked, once or for several answers, and how many."""
        rng, more = self.rng, self._more
        text = rng.choice(self._documents)[: rng.randint(1, MAX_MODEL_LEN - 2)]
        text = (text + [rng.randint(1, 49) for _ in range(rng.randint(0, 5))])[: MAX_MODEL_LEN - 1]
        name = f"r{len(self._prompts)}"
        self._prompts[name] = (text, rng.randint(1, 12), None)
        first = self._add(name)
        num_forks = 0
        if self._fork_rate and more.random() < self._fork_rate:
            num_forks = more.choice([1, 1, 2, 5])
        for seed in range(1, 1 + num_forks):
            self._prompts[f"{name}-{seed}"] = (text, more.randint(1, 12), seed)
            self._add(f"{name}-{seed}", first)
        self.note("asked", name, len(text))
        return 1 + num_forks

    def _add(self, name: str, fork_of: Request | None = None) -> Request:
        text, count, seed = self._prompts[name]
        return self.engine.add(name, text, fork_of=fork_of, max_tokens=count, seed=seed)

    def _trouble(self) -> None:
        """What the world does to an engine."""
        rng, scheduler = self.rng, self.engine.scheduler
        luck = rng.random()
        if luck < 0.04 and self.stores:
            store = rng.choice(self.stores)
            self._set_mode(store, rng.choice(MODES))
        elif luck < 0.05:
            self._swizzle()
        elif luck < 0.07 and scheduler.requests:
            victim = rng.choice(list(scheduler.requests))
            self._spoilt.add(victim)
            self.engine.take(scheduler.finish_requests([victim]))
            self.note("aborted", victim)
        elif luck < 0.09:
            self.note("forgets", scheduler.reset_prefix_cache(rng.random() < 0.5))
        elif luck < 0.12:
            self.clock.advance(rng.choice([0.001, 0.3, 3.0]))

    def _swizzle(self) -> None:
        """All tiers go away one after the other, and come back one by one."""
        moment = self.clock.now
        for mode in (self.rng.choice(["down", "hung", "lost"]), "up"):
            for store in self.rng.sample(self.stores, len(self.stores)):
                moment += self.rng.uniform(0.0, 0.5)
                self.clock.at(moment, lambda s=store, m=mode: self._set_mode(s, m))  # type: ignore[misc]
        self._calm_at = moment

    def _set_mode(self, store: SimStore, mode: str) -> None:
        store.set_mode(mode)
        self.seen[mode] += 1
        self.note(store.name, mode)

    def _step(self) -> None:
        engine, scheduler = self.engine, self.engine.scheduler
        output = scheduler.schedule()
        self._note_step(output)
        if output.num_scheduled_tokens and self._is_harmed("nan"):
            engine.spoil(self._harm.choice(sorted(output.num_scheduled_tokens)))
        if self._steps_fail and output.num_scheduled_tokens and self.rng.random() < 0.005:
            self._fail(output)
        else:
            self._run(output)
        self._check_books()

    def _run(self, output: SchedulerOutput) -> None:
        """As the engine core does it."""
        engine, began = self.engine, self.clock.now
        try:
            result = engine.run(output)
        except (InjectedFault, DeviceError):
            self._end_failed(output)
            return
        except (ValueError, RuntimeError) as error:
            raise AssertionError("the worker failed by itself") from error
        engine.take(engine.scheduler.update_from_output(output, result))
        self._note_costs(output, result, self.clock.now - began)

    def _fail(self, output: SchedulerOutput) -> None:
        """The worker raises, before or after its pass."""
        try:
            self.engine.begin(output)
            if self.rng.random() < 0.5:
                self.engine.compute(output)
        except InjectedFault:
            pass
        self._end_failed(output)

    def _end_failed(self, output: SchedulerOutput) -> None:
        self._spoilt |= output.num_scheduled_tokens.keys()
        self._spoilt.update(new.request_id for new in output.new_requests)
        self.engine.take(self.engine.scheduler.fail_step(output, "the worker raised"))
        self.note("failed", sorted(output.num_scheduled_tokens))

    def _note_costs(
        self, output: SchedulerOutput, result: ModelRunnerOutput, seconds: float
    ) -> None:
        """As the engine core does it, which measures."""
        if (speculation := self.engine.scheduler.speculation) is not None:
            speculation.note_step(output, result, seconds)
        counts = [count for count in output.num_scheduled_tokens.values() if count > 1]
        if counts:
            context = sum(count * count // 2 for count in counts)
            seconds = sum(counts) * self._token_seconds
            self.engine.parts.side._economics.prefill.record_prefill(sum(counts), context, seconds)

    def _check_books(self) -> None:
        assert not self.wrong, self.wrong
        check_invariants(self.engine)
        slab = self.slab
        assert len(slab._free) + len(slab._slots) == slab.num_slots
        side = self.engine.parts.side
        check_writes(side._hierarchy)
        # Nobody is barred from loading whose load has not failed.
        failures = side._counters.failures
        failed = sum(count for reason, count in failures.items() if reason != "store_copy")
        assert self.engine.scheduler.counts["loads_failed"] <= failed, "a load that was cancelled"
        self._barred |= {
            name for name, offload in side.requests.items() if offload.stage is Stage.FAILED
        }
        assert len(self._barred) <= failed, "a load that was cancelled counts as a failed one"

    def _end(self) -> None:
        """All is well again; what is under way ends, everybody is answered, the tiers close."""
        self.clock.advance(max(0.0, self._calm_at - self.clock.now))
        self._harm_rates = dict.fromkeys(self._harm_rates, 0.0)
        # Nor would the scheduler learn of what a step met that fails.
        self._steps_fail = False
        for store in self.stores:
            self._set_mode(store, "up")
            store.give_up_lost()
        healed = self.clock.now
        self._driver.step()  # tells the worker who is gone
        while (
            self.engine.scheduler.has_runnable_work()  # asking may start some
            or is_busy(self.engine)
            or self.clock.now <= healed + RECOVERY_SECONDS
        ):
            self._driver.turn()
        check_breakers(self.engine.parts.side._hierarchy)
        self._ask_again()
        check_nothing_left(self.engine)
        self._check_answers()
        assert self.engine.states == {}
        for name, count in self.engine.parts.side.stats()["failures"].items():  # type: ignore[attr-defined]
            self.seen[name] += count
        for name, count in self.engine.scheduler.counts.items():
            self.seen[name] += count
        broken = self._faulty and self.rng.random() < 0.5
        for store in self.stores if broken else ():
            self._set_mode(store, self.rng.choice(["down", "hung", "lost", "full"]))
        began = self.clock.now
        shut_down(self.engine, SHUTDOWN_SECONDS)
        took = self.clock.now - began
        assert took <= (MOST_SHUTDOWN_SECONDS if broken else SHUTDOWN_SECONDS), took
        assert not self.wrong, self.wrong

    def _ask_again(self) -> None:
        """Whatever gave somebody NaN is gone: the same prompt may meet what an aborted request left
        behind, once, and is then answered."""
        for number, name in enumerate(sorted(self.engine.nan)):
            for again in range(2):
                retry = f"{name} again {number} {again}"
                self._prompts[retry] = self._prompts[name]
                self._add(retry)
                while self.engine.scheduler.requests or is_busy(self.engine):
                    self._driver.turn()
                if retry not in self.engine.nan:
                    break
            else:
                raise AssertionError(f"{name} never heals")
            self.seen["healed"] += 1
        if self.engine.nan:
            self._driver.step()  # as above
        while self.engine.scheduler.has_runnable_work() or is_busy(self.engine):
            self._driver.turn()

    def _check_answers(self) -> None:
        for name, (text, count, seed) in self._prompts.items():
            told = self.engine.outputs[name]
            assert [output.finish_reason is not None for output in told].count(True) == 1
            expected = reference(text, count, MAX_MODEL_LEN, seed=seed)
            said = self.engine.said(name)
            error = told[-1].error or ""
            if error.startswith(LOAD_FAILED.partition("{")[0]):
                assert self._fails_with_load and told[-1].finish_reason == "error"
                # A block may be displaced while it is being read.
                assert self._faulty or "(missed)" in error, "nothing went wrong, and yet it failed"
                self.seen["failed with its load"] += 1
                assert said == expected[: len(said)], name
            elif name in self.engine.nan:
                assert "not finite" in error or name in self._spoilt, name
                assert said == expected[: len(said)], name
                self.seen["nan"] += 1
            elif name in self._spoilt:
                assert said == expected[: len(said)], name
            else:
                assert said == expected, name
                assert told[-1].finish_reason in ("stop", "length")
        self.seen["requests"] += len(self._prompts)
        if (speculation := self.engine.scheduler.speculation) is not None:
            self.seen["accepted drafts"] += speculation.num_accepted_tokens
            num_rejected = speculation.num_draft_tokens - speculation.num_accepted_tokens
            self.seen["rejected drafts"] += num_rejected

    def _note_step(self, output: SchedulerOutput) -> None:
        meta = output.connector_meta
        moved: Sequence[object] = ()
        if meta:
            moved = [
                [(job.job_id, job.block_ids) for job in jobs]
                for jobs in (meta.stores, meta.loads, meta.ahead)
            ]
            self.seen["ahead"] += len(meta.ahead)
            self.seen["overtaken"] += len(meta.overtaken)
        self.note(sorted(output.num_scheduled_tokens.items()), moved)
        for store in self.stores:
            self.note(store.name, store.log)
            store.log.clear()
