# SPDX-License-Identifier: Apache-2.0
"""One simulated life of a small cluster: prefill engines, decode engines, a server that they share.

A caller has a prefill engine compute each prompt, waits for its ticket, and goes on with it on a
decode engine; or without one, or with another one's; or it asks both at once, and the decode engine
waits for the blocks, as long as that is of use. In half of the lives some prompts come in parts to
one engine, some with waits that are too long, and others are asked for several answers, which share
their blocks; and engines may have draft tokens. Meanwhile engines are killed, steps fail or give
NaN, the server hangs, refuses, loses answers and restarts empty, for one engine or for all. After
every step the books must balance; in the end everybody has been answered once and rightly, by one
engine's tokens, and nothing is held, leased for ever, or left.

    Cluster(clock, rng).live(seed)  →  the hash of all that happened, the same for the same seed
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from stratakv.engine.request.core_messages import (
    AddRequest,
    ExtendPrompt,
    Fork,
    RequestExtras,
    TokenOutput,
)
from stratakv.engine.request.handover_ticket import Ticket
from stratakv.engine.request.request import pack_token_ids
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.scheduler.output import SchedulerOutput
from stratakv.engine.scheduler.speculation import Speculation

from .clock import VirtualClock
from .cluster_node import MAX_MODEL_LEN, Asked, Node, note_contents
from .prompt_parts import PromptParts
from .shared_store import Server
from .sim_core import SESSION_IDLE_SECONDS
from .tiny_engine import check_nothing_left, shut_down

# Of virtual time, beyond every deadline there is.
LIFE_SECONDS = 300.0
SHUTDOWN_SECONDS = 10.0
MAX_EMPTY_STEPS = 200
MODES = ("slow", "hung", "lost", "down", "flaky", "full", "damaged")


class Cluster:
    """`live` raises AssertionError for what must not happen. `show` is given every line of the
    trace. The clock and the generator are the caller's, who has the product believe in them, since
    that takes longer than a life."""

    def __init__(
        self, clock: VirtualClock, rng: random.Random, show: Callable[[str], None] | None = None
    ) -> None:
        self.clock = clock
        self.rng = rng
        self.seen: Counter[str] = Counter()
        self._show = show

    def live(self, seed: int) -> str:
        """From start to shutdown; the hash of the trace."""
        self.clock.restart()
        self.rng.seed(f"cluster {seed}")
        # Drawn apart, so that half of all seeds lead the lives that they led before.
        self.more = random.Random(f"more {seed}")
        self._build()
        try:
            self._live()
            self._end()
        finally:
            for node in self._all:
                node.core.slab.close()
        return self._trace.hexdigest()

    def note(self, *what: object) -> None:
        """One line of the trace."""
        line = f"{self.clock.now:.6f} {what}"
        self._trace.update(line.encode())
        if self._show:
            self._show(line)

    def fails(self) -> bool | None:
        """Whether a step raises: before its pass, or after; None: it does not."""
        if self.rng.random() >= self._step_faults:
            return None
        self.seen["failed steps"] += 1
        return self.rng.random() < 0.5

    def spoils(self, step: SchedulerOutput) -> str:
        """The request of a step that writes NaN; none: ""."""
        if not self._nan_rate or self.more.random() >= self._nan_rate:
            return ""
        self.seen["spoilt"] += 1
        return self.more.choice(sorted(step.num_scheduled_tokens))

    def make_speculation(self) -> Speculation | None:
        if not self._most_drafts:
            return None
        return Speculation(self._most_drafts, self.more.random() < 0.3, self.more.random() < 0.5)

    def _build(self) -> None:
        rng, more = self.rng, self.more
        is_plain = more.random() < 0.5
        self._parts_rate = 0.0 if is_plain else more.choice([0.0, 0.4, 0.4])
        self._forks_rate = 0.0 if is_plain else more.choice([0.0, 0.3, 0.3])
        self._most_drafts = 0 if is_plain else more.choice([0, 0, 2, 5])
        self.wrong: list[str] = []
        self.contents: dict[bytes, list[int]] = {}
        self.is_faulty = rng.random() < 0.8
        self.pass_seconds = rng.choice([0.0005, 0.003])
        self._step_faults = rng.choice([0.0, 0.01]) if self.is_faulty else 0.0
        has_nan = self.is_faulty and not is_plain
        self._nan_rate = more.choice([0.0, 0.0, 0.02]) if has_nan else 0.0
        self._trace = hashlib.sha256()
        self.server = Server(self.clock, rng.choice([6, 30, 500]))
        self._all: list[Node] = []
        self._todo: deque[Callable[[], None]] = deque()
        self._asked: list[Asked] = []
        self._by_id: dict[str, Asked] = {}
        self._tickets: list[Ticket] = []
        roles = ["prefill"] * rng.randint(1, 2) + ["decode"] * rng.randint(1, 2)
        self._nodes = [self._start(role) for role in roles]
        self._documents = [
            [rng.randint(1, 49) for _ in range(MAX_MODEL_LEN)] for _ in range(rng.randint(1, 3))
        ]
        self.note("built", roles, self.server.num_blocks)

    def _start(self, role: str) -> Node:
        node = Node(self, role, f"{role}{len(self._all)}")
        self._all.append(node)
        return node

    # What goes on.

    def _live(self) -> None:
        rng = self.rng
        to_ask = rng.randint(2, 7)
        pace = rng.choice([0.05, 0.3, 1.0])
        deadline = self.clock.now + LIFE_SECONDS
        while to_ask or any(not asked.end for asked in self._asked):
            assert self.clock.now < deadline, "somebody waits for ever"
            if to_ask and (rng.random() < pace or all(asked.end for asked in self._asked)):
                to_ask = max(0, to_ask - self._ask())
            if self.is_faulty:
                self._trouble()
            self._turn()

    def _turn(self) -> None:
        """What the caller has to do, or a step of one engine, or time passes."""
        if self._todo:
            self._todo.popleft()()
            return
        due = [node for node in self._nodes if node.is_due]
        if due:
            self._go(self.rng.choice(due))
            return
        until = min(node.sleeps_until for node in self._nodes)
        self.clock.wait_for(
            lambda: bool(self._todo) or any(node.woken.is_set() for node in self._nodes),
            until - self.clock.now,
        )

    def _go(self, node: Node) -> None:
        """A turn of this engine's loop."""
        core = node.core
        is_late = not (node.is_awake or node.woken.is_set())
        node.woken.clear()
        node.is_awake = core.has_work()
        if not node.is_awake:
            node.empty_steps = 0
            node.sleeps_until = self.clock.now + core.idle_seconds()
            return
        if is_late:
            retry_at = core.scheduler._retry_at
            is_known = retry_at is not None and retry_at <= self.clock.now
            came = is_known or core._held.is_due or core.sessions.idle_seconds <= 0.0
            came = came or self._is_woken_now(node)
            assert came, f"there is work, and nobody woke {node.name}"
        # Messages are taken between the question and the step.
        if self.is_faulty and self.rng.random() < 0.01:
            self._leave()
        before = core.scheduler.counts["scheduled_tokens"]
        self._step(node)
        if core.scheduler.counts["scheduled_tokens"] > before:
            node.empty_steps = 0
        node.empty_steps += 1
        assert node.empty_steps < MAX_EMPTY_STEPS, f"{node.name} steps without doing anything"

    def _is_woken_now(self, node: Node) -> bool:
        return self.clock.wait_for(node.woken.is_set, 0.0)

    def _step(self, node: Node) -> None:
        core, counts, began = node.core, node.core._held.counts, self.clock.now
        incomplete = counts.incomplete
        stored = set(node.store._blocks) if self._show is None else set()
        outputs = core.step()
        if core.simulated.wrong is not None:
            raise core.simulated.wrong
        self.note(node.name, sorted(core.scheduler.requests), node.store.mode, node.store.log)
        node.store.log.clear()
        node.check_released(outputs, counts.incomplete - incomplete)
        self.seen["incomplete"] += counts.incomplete - incomplete
        for output in outputs:
            self._deliver(node, output)
        if self.rng.random() < 0.7:  # others hear of what was stored since
            new = [key for key in self.server.blocks if key not in stored]
            for other in self._nodes if new else ():
                other.store.tell(new)
        assert not self.wrong, self.wrong
        node.check_books(began)

    def _trouble(self) -> None:
        """What the world does to a cluster."""
        rng = self.rng
        luck = rng.random()
        if luck < 0.03:
            mode = rng.choice(["up", *MODES])
            nodes = self._nodes if rng.random() < 0.5 else [rng.choice(self._nodes)]
            for node in nodes:
                self._set_mode(node, mode)
        elif luck < 0.04:
            self.note("the server restarts")
            self.seen["restarts"] += 1
            self.server.restart()
            for node in self._nodes:
                if rng.random() < 0.5:
                    node.store.forget_what_is_known()
        elif luck < 0.045:
            self._kill(rng.choice(self._nodes))
        elif luck < 0.06:
            self._leave()
        elif luck < 0.065:
            scheduler = (node := rng.choice(self._nodes)).core.scheduler
            self.note(node.name, "forgets", scheduler.reset_prefix_cache(rng.random() < 0.5))
            node.is_awake = True
        elif luck < 0.08:
            self.clock.advance(rng.choice([0.001, 0.3, 3.0]))

    def _set_mode(self, node: Node, mode: str) -> None:
        node.store.set_mode(mode)
        self.seen[mode] += 1
        self.note(node.name, mode)
        if mode in MODES:  # for a while
            self.clock.after(self.rng.uniform(0.0, 2.0), lambda: node.store.set_mode("up"))

    def _kill(self, node: Node) -> None:
        """All its state is gone; another one takes its place."""
        self.note(node.name, "is killed")
        self.seen[f"killed {node.role}"] += 1
        node.is_alive = False
        node.store.abandon()
        self._nodes[self._nodes.index(node)] = self._start(node.role)
        for asked in list(node.asked.values()):
            self._lost(asked)
        node.asked.clear()

    def _leave(self) -> None:
        """A client does."""
        waiting = [asked for asked in self._asked if not asked.end]
        if waiting:
            asked = self.rng.choice(waiting)
            self.note(asked.name, "leaves")
            self._abort(asked)
            asked.end = "left"

    # The caller, between two steps.

    def _ask(self) -> int:
        """A client comes with a prompt; as how many it counts."""
        rng = self.rng
        text = rng.choice(self._documents)[: rng.randint(1, MAX_MODEL_LEN - 6)]
        text = text + [rng.randint(1, 49) for _ in range(rng.choice([0, 0, 1, 3]))]
        note_contents(self.contents, text)
        asked = Asked(f"r{len(self._asked)}", text, rng.randint(1, 6), rng.choice([1, 1, 1, 3]))
        self._asked.append(asked)
        luck = self.more.random()
        if luck < self._parts_rate:
            asked.hand_over_tokens = asked.count
            self._open_session(asked)
            return 2
        if luck < self._parts_rate + self._forks_rate:
            return self._ask_for_several(asked)
        if rng.random() < 0.3:
            self._ask_both(asked)
        elif rng.random() < 0.9:
            self._prefill(asked)
            if rng.random() < 0.3:
                node = self._pick("decode")
                hint = self._message(asked, "hint", asked.count, RequestExtras())
                self.note(node.name, "follows", node.core.call("follow", _as_json(hint)))
                node.is_awake = True
        else:
            self._decode(asked)
        return 1

    def _ask_for_several(self, asked: Asked) -> int:
        """Several answers to one prompt, of one engine; how many."""
        more, forks = self.more, []
        asked.hand_over_tokens = asked.count
        node = more.choice(self._nodes)
        for seed in range(1, more.choice([2, 2, 3, 4])):
            fork = Asked(f"{asked.name}-{seed}", asked.prompt, count := more.randint(1, 6), count)
            fork.seed = seed
            self._asked.append(fork)
            self._assign(fork, node)
            forks.append(Fork(fork.request_id, self._params(fork, fork.count)))
        self._send(asked, node, RequestExtras(forks=forks))
        self.seen["several answers"] += 1
        return 1 + len(forks)

    def _open_session(self, asked: Asked) -> None:
        """Its prompt comes in parts to one engine, which makes the answer too."""
        asked.is_prefill, asked.fed_at = False, self.clock.now
        most_tokens = MAX_MODEL_LEN - 1
        parts = PromptParts.of(asked.prompt, self.more, most_tokens, SESSION_IDLE_SECONDS)
        asked.parts, node = parts, self.more.choice(self._nodes)
        self._send(asked, node, RequestExtras(more_follows=True))
        self._feed_later(asked, node, asked.request_id, parts, 1)

    def _feed_later(
        self, asked: Asked, node: Node, request_id: str, parts: PromptParts, number: int
    ) -> None:
        feed = functools.partial(self._feed, asked, node, request_id, parts, number)
        self.clock.after(parts.waits[number - 1], functools.partial(self._todo.append, feed))

    def _feed(
        self, asked: Asked, node: Node, request_id: str, parts: PromptParts, number: int
    ) -> None:
        """The part of this number comes; where its session has ended, for nothing."""
        if not node.is_alive:
            return
        if self.is_faulty and self.more.random() < 0.03 and not asked.end:
            self.note(asked.name, "leaves in the middle of its prompt")
            self._abort(asked)
            asked.end = "left"
        is_open = node.asked.get(request_id) is asked
        is_last = number == len(parts.tokens) - 1
        if is_open:
            asked.fed_at = self.clock.now
        else:
            self.seen["parts for nothing"] += 1
        self.note(request_id, node.name, "part", number, len(parts.tokens[number]))
        message = ExtendPrompt(
            request_id,
            pack_token_ids(parts.tokens[number]),
            is_last,
            parts.num_kept if is_last else -1,
        )
        node.is_awake = True
        for output in node.core.extend_prompt(message):
            self._deliver(node, output)
        if is_open and is_last:
            self.seen["whole in parts"] += 1
            self.seen["changed prompts"] += -1 < parts.num_kept < sum(map(len, parts.tokens[:-1]))
        elif is_open:
            self._feed_later(asked, node, request_id, parts, number + 1)

    def _ask_both(self, asked: Asked) -> None:
        """As routers do that have the nodes find each other."""
        name, count = f"h{len(self._asked)}", self.rng.choice([1, 1, 3])
        helper = Asked(name, asked.prompt, count, count)
        helper.is_helper = helper.is_prefill = True
        self._asked.append(helper)
        kind = {self.rng.choice(["computed_elsewhere", "asked_elsewhere"]): True}
        legs = [(helper, "prefill", RequestExtras()), (asked, "decode", RequestExtras(**kind))]
        self.rng.shuffle(legs)
        for leg, role, extras in legs:
            send = functools.partial(self._send_leg, leg, role, extras)
            if self.rng.random() < 0.7:
                send()
            else:
                late = functools.partial(self._todo.append, send)
                self.clock.after(self.rng.uniform(0.0, 0.05), late)

    def _send_leg(self, asked: Asked, role: str, extras: RequestExtras) -> None:
        if not asked.end:  # its client may have left
            self._send(asked, self._pick(role), extras)

    def _pick(self, role: str) -> Node:
        return self.rng.choice([node for node in self._nodes if node.role == role])

    def _message(
        self, asked: Asked, request_id: str, max_tokens: int, extras: RequestExtras
    ) -> AddRequest:
        tokens = asked.prompt
        if extras.more_follows:
            assert asked.parts is not None
            tokens = asked.parts.tokens[0]
        params = self._params(asked, max_tokens)
        return AddRequest(request_id, pack_token_ids(tokens), params, extras=extras)

    def _params(self, asked: Asked, max_tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, seed=asked.seed)

    def _send(self, asked: Asked, node: Node, extras: RequestExtras) -> None:
        max_tokens = asked.hand_over_tokens if asked.is_prefill else asked.count
        self._assign(asked, node)
        self.note(asked.request_id, node.name, len(asked.prompt), max_tokens)
        for output in node.core.add(self._message(asked, asked.request_id, max_tokens, extras)):
            self._deliver(node, output)

    def _assign(self, asked: Asked, node: Node) -> None:
        """From now on this engine is to answer."""
        asked.tries += 1
        asked.request_id = f"{asked.name}{node.role[0]}{asked.tries}"
        asked.node = node
        node.asked[asked.request_id] = asked
        node.is_awake = True

    def _prefill(self, asked: Asked) -> None:
        asked.is_prefill = True
        self._send(asked, self._pick("prefill"), RequestExtras(hand_over=True))
        request_id = asked.request_id
        max_wait_seconds = self.rng.choice([0.5, 3.0, 40.0])
        self.clock.after(
            max_wait_seconds, lambda: self._todo.append(lambda: self._give_up(request_id))
        )

    def _give_up(self, request_id: str) -> None:
        """The prefill leg has taken too long: the decode engine computes."""
        asked = next((a for a in self._asked if a.request_id == request_id and not a.end), None)
        if asked is not None and asked.is_prefill:
            self.seen["too late"] += 1
            self._abort(asked)
            self._decode(asked)

    def _decode(self, asked: Asked) -> None:
        asked.is_prefill, asked.parts = False, None
        self._send(asked, self._pick("decode"), RequestExtras(ticket=self._ticket_for(asked)))

    def _ticket_for(self, asked: Asked) -> Ticket | None:
        """Its own, or what a caller may mistake for it."""
        luck, ticket = self.rng.random(), asked.ticket
        if luck < 0.1 and self._tickets:
            self.seen["foreign tickets"] += 1
            return self.rng.choice(self._tickets)
        if luck < 0.2 and ticket is not None:
            self.seen["bad tickets"] += 1
            wrong = (ticket.first_token + 1) % 50
            change: dict[str, object] = self.rng.choice(
                [
                    {"num_tokens": ticket.num_tokens - 1, "first_token": wrong},
                    {"prompt": "00" * 32, "first_token": wrong},
                    {"params": "0" * 32, "first_token": wrong},
                    {"first_token": 10**6},
                ]
            )
            return msgspec.structs.replace(ticket, **change)
        return None if luck < 0.3 else ticket

    def _abort(self, asked: Asked) -> None:
        if asked.node is None or asked.node.asked.pop(asked.request_id, None) is None:
            return  # between two engines
        asked.node.core.abort_requests([asked.request_id])
        asked.node.is_awake = True

    def _lost(self, asked: Asked) -> None:
        """Its engine is gone, or has ended it."""
        if asked.is_helper:
            asked.end = "helper lost"
        elif asked.told:
            asked.end = "cut"  # the client is told so
        elif asked.parts is not None and self.more.random() < 0.5:
            again = functools.partial(self._again, asked, asked.tries, self._open_session)
            self._todo.append(again)
        elif asked.is_prefill and self.rng.random() < 0.5:
            self._todo.append(functools.partial(self._again, asked, asked.tries, self._prefill))
        else:
            self._todo.append(functools.partial(self._again, asked, asked.tries, self._decode))

    def _again(self, asked: Asked, tries: int, leg: Callable[[Asked], None]) -> None:
        if not asked.end and asked.tries == tries:  # nobody else was quicker
            leg(asked)

    def _deliver(self, node: Node, output: TokenOutput) -> None:
        self.note("told", output.request_id, output.new_token_ids, output.finish_reason)
        asked = node.asked.get(output.request_id)
        assert asked is not None, f"{output.request_id} is told what nobody waits for"
        right = asked.right
        reason = output.finish_reason
        if not asked.is_prefill:
            asked.told += output.new_token_ids
            assert asked.told == right[: len(asked.told)], asked.name
            is_whole = output.num_cached_tokens == len(asked.prompt)
            self.seen["handed on whole"] += is_whole and asked.seed is None
        if reason is None:
            return
        del node.asked[output.request_id]
        if reason == "error":
            self._check_error(node, asked, output)
            self._lost(asked)
        elif asked.is_prefill:
            self.seen["handed over"] += 1
            assert output.ticket is not None
            assert output.ticket.first_token == right[0], "a ticket with a wrong token"
            asked.ticket = output.ticket
            self._tickets.append(output.ticket)
            if asked.is_helper:
                asked.end = "helped"
                return
            self._todo.append(functools.partial(self._again, asked, asked.tries, self._decode))
        else:
            assert asked.told == right, asked.name
            assert reason in ("stop", "length")
            asked.end = reason

    def _check_error(self, node: Node, asked: Asked, output: TokenOutput) -> None:
        """A request may end so, and now."""
        error = output.error or ""
        if error.startswith("no part of the prompt came"):
            assert asked.parts is not None
            assert self.clock.now >= asked.fed_at + SESSION_IDLE_SECONDS, "a session ends too soon"
            self.seen["waited too long"] += 1
        elif "sessions are open" in error:
            assert asked.parts is not None
            assert len(node.core.sessions) >= node.core.sessions.most_sessions
            asked.parts = None
            self.seen["sessions refused"] += 1
        elif "not finite" in error:
            names = {name.partition("\0")[0] for name in node.core.engine.nan}
            assert output.request_id in names, "it met no NaN"
            self.seen["nan"] += 1
        else:
            assert self.is_faulty and "the worker was to fail" in error, output

    def _end(self) -> None:
        """All is well again; what is under way ends, and nothing is left."""
        self._step_faults = self._nan_rate = 0.0
        for node in self._nodes:
            node.store.set_mode("up")
            node.store.give_up_lost()
            node.is_awake = True
        deadline = self.clock.now + LIFE_SECONDS
        for _ in range(2):
            while self._todo or any(node.is_busy for node in self._nodes):
                assert self.clock.now < deadline, "something never ends"
                self._turn()
            for node in self._nodes:
                self._step(node)  # tells the worker who is gone
                node.is_awake = True
        for node in self._nodes:
            check_nothing_left(node.core.engine)
            held, moves = node.core._held, node.core.engine.parts.side.handover
            assert not (held._held or held._expected or held._first_logprobs or moves.moving)
            assert not (moves.ended or node.asked or node.core.engine.states)
            assert not len(node.core.sessions)
            if (speculation := node.core.scheduler.speculation) is not None:
                self.seen["accepted drafts"] += speculation.num_accepted_tokens
                num_rejected = speculation.num_draft_tokens - speculation.num_accepted_tokens
                self.seen["rejected drafts"] += num_rejected
            for name, count in node.core.scheduler.counts.items():
                self.seen[name] += count
            waits = node.core.engine.parts.side._counters.prefill_waits
            for end, count in waits.items():
                self.seen[f"wait {end}"] += count
            shut_down(node.core.engine, SHUTDOWN_SECONDS)
        for asked in self._asked:
            assert asked.end, f"{asked.name} has no answer"
            self.seen[asked.end] += 1
        assert not self.wrong, self.wrong


def _as_json(request: AddRequest) -> str:
    return msgspec.json.encode(request).decode()
