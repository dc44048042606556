# SPDX-License-Identifier: Apache-2.0
"""A request whose grammar is being compiled is the scheduler's: counted, looked up in the tiers,
and in its turn when the grammar is there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.request.core_messages import INVALID_GRAMMAR, TokenOutput, share_prompt
from stratakv.engine.request.request import RequestStatus
from stratakv.engine.request.structured_params import GrammarSpec
from stratakv.engine.structured.base import Grammar, GrammarError

from .conftest import MakeCore, finish, prompt_of, request, run, step_outputs
from .test_grammars import _Stubborn, following, wait_for, with_backend


class _Gated(_Stubborn):
    """Grammars that allow everything, each compiled once the gate is open; `bad` are refused."""

    def compile(self, spec: GrammarSpec) -> Grammar:
        grammar = super().compile(spec)
        if spec.text == "bad":
            raise GrammarError("it is bad")
        return grammar


@contextmanager
def gate_of(core: EngineCore, model: Path) -> Iterator[threading.Event]:
    gate = threading.Event()
    with_backend(core, model, _Gated(gate))
    try:
        yield gate
    finally:
        gate.set()


def statuses(core: EngineCore) -> dict[str, RequestStatus]:
    return {name: each.status for name, each in core.scheduler.requests.items()}


def test_its_tiers_are_asked_while_it_waits(make_core: MakeCore, tiny_model: Path) -> None:
    core = make_core(
        kv_offload="cpu",
        kv_offload_cpu_bytes="8MiB",
        kv_offload_load="always",
        num_blocks=20,
        max_model_len=110,
    )
    prompt = prompt_of(40)
    run(core, request("before", prompt))
    run(core, *[request(f"other {i}", prompt_of(70, i), max_tokens=20) for i in range(1, 4)])
    with gate_of(core, tiny_model) as gate:
        assert core.add(following("g", prompt, {"regex": "g"}, max_tokens=3)) == []
        assert statuses(core) == {"g": RequestStatus.WAITING_FOR_GRAMMAR}
        stats = core.call("stats", "")["scheduler"]
        assert (stats["num_waiting"], stats["num_deferred"], stats["num_running"]) == (1, 1, 0)
        assert core.scheduler.num_waiting == 0  # it takes no place in the queue
        assert not core.scheduler.has_runnable_work()
        assert "g" in core._connector.requests  # type: ignore[attr-defined]
        gate.set()
        wait_for(lambda: core._grammars.is_due)
        answer = finish(core, [], 1)["g"]
    assert len(answer.new_token_ids) == 3
    assert (answer.cached_tokens_by_tier or {}).get("cpu", 0) > 0


def test_it_comes_between_requests_that_came_before_and_after_it(
    make_core: MakeCore, tiny_model: Path
) -> None:
    core = make_core(max_num_seqs=1)
    with gate_of(core, tiny_model) as gate:
        outputs = core.add(request("first", prompt_of(20), max_tokens=8)) + core.step()
        outputs += core.add(request("early", prompt_of(9, 4), max_tokens=2))
        outputs += core.add(following("g", prompt_of(9), {"regex": "g"}, max_tokens=2))
        outputs += core.add(request("late", prompt_of(9, 3), max_tokens=2)) + core.step()
        gate.set()
        wait_for(lambda: core._grammars.is_due)
        ends: list[str] = []
        for told in chain([outputs], step_outputs(core)):
            ends += [each.request_id for each in told if each.finish_reason]
            if len(ends) == 4:
                break
    assert ends == ["first", "early", "g", "late"]


def test_it_leaves_nothing_however_it_ends(make_core: MakeCore, tiny_model: Path) -> None:
    core = make_core()
    told: list[TokenOutput] = []
    with gate_of(core, tiny_model) as gate:
        for name in ("bad", "gone", "stays"):
            told += core.add(following(name, prompt_of(20), {"regex": name}, max_tokens=2))
        core.abort_requests(["gone"])
        assert statuses(core).keys() == {"bad", "stays"}
        gate.set()
        wait_for(lambda: core._grammars.is_due)
        ended = {}
        while len(ended) < 2:
            told += next(step_outputs(core))
            ended = {each.request_id: each for each in told if each.finish_reason}
    assert ended["bad"].error_code == INVALID_GRAMMAR
    assert "it is bad" in (ended["bad"].error or "")
    assert ended["stays"].finish_reason == "length"
    assert not core.scheduler.requests
    assert not core.scheduler._states.awaiting_grammar
    assert core.call("stats", "")["scheduler"]["num_waiting"] == 0


def test_forks_join_the_prompt_that_is_there_when_their_grammar_is(
    make_core: MakeCore, tiny_model: Path
) -> None:
    """All of one message wait for one grammar, and then share the prompt."""
    core = make_core()
    with gate_of(core, tiny_model) as gate:
        asked = [
            following(name, prompt_of(40), {"regex": "g"}, max_tokens=2, seed=at)
            for at, name in enumerate("abc")
        ]
        share_prompt(asked)
        assert core.add(asked[0]) == []
        gate.set()
        wait_for(lambda: core._grammars.is_due)
        ended = finish(core, [], 3)
    assert {name: len(each.new_token_ids) for name, each in ended.items()} == dict.fromkeys(
        "abc", 2
    )
    assert core.scheduler.counts["forks"] == 2
    assert core.scheduler.counts["scheduled_tokens"] <= 40 + 3 * 2
