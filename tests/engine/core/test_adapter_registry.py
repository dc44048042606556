# SPDX-License-Identifier: Apache-2.0
"""Adapters by name: loads beside the steps, limits, and unloads that wait for the last request."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stratakv.engine.core import loop as loop_module
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.core.loop import CoreLoop
from stratakv.engine.request.beam_params import BeamSearchParams
from stratakv.engine.request.core_messages import (
    AddRequest,
    Call,
    ExtendPrompt,
    FromCore,
    LoadAdapter,
    LoadedAdapter,
    Reply,
    RequestExtras,
    UnloadAdapter,
    share_prompt,
)
from stratakv.engine.request.request import pack_token_ids
from stratakv.engine.scheduler.scheduler import Pause
from stratakv.tiers.settings.values import ConfigError

from ...threads import WAIT_SECONDS
from ..written_adapters import make_tensors, spec_of, write_adapter
from .conftest import MakeCore, finish, prompt_of, request, run
from .test_sessions import part_of

PROMPT = prompt_of(30)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("adapters")
    made = {name: write_adapter(path / name, tiny_model, seed) for seed, name in enumerate("abc")}
    return {**made, "same as a": write_adapter(path / "again", tiny_model, 0)}


@pytest.fixture
def core(make_core: MakeCore, folders: dict[str, Path]) -> EngineCore:
    return make_core(lora_modules={"a": folders["a"]}, max_loras=2, max_cpu_loras=3)


def asks(name: str, adapter: str, **fields: Any) -> AddRequest:
    extras = RequestExtras(adapter=adapter, **fields.pop("extras", {}))
    return request(name, fields.pop("prompt", PROMPT), extras=extras, **fields)


def load(core: EngineCore, name: str, path: Path, *, replaces: bool = False) -> LoadedAdapter:
    """Load an adapter, and wait for the thread that reads it."""
    message = LoadAdapter(name, str(path), replaces)
    deferred = core.call("load_adapter", msgspec.json.encode(message).decode())
    deferred.future.exception(WAIT_SECONDS)
    return deferred.finish(deferred.future)  # type: ignore[no-any-return]


def unload(core: EngineCore, name: str) -> None:
    core.call("unload_adapter", msgspec.json.encode(UnloadAdapter(name)).decode())


def held(core: EngineCore) -> set[bytes]:
    """The adapters that the worker has."""
    return set(core.executor.runner.adapters._loaded)  # type: ignore[attr-defined]


def fingerprints(core: EngineCore) -> dict[str, bytes]:
    return {each.name: bytes.fromhex(each.fingerprint) for each in core.adapters.loaded}


def said(core: EngineCore, adapter: str) -> list[int]:
    return run(core, asks(f"of {adapter}", adapter))[f"of {adapter}"].new_token_ids


def test_names_have_adapters_and_equal_ones_one_copy(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    bare, first = run(core, request("bare", PROMPT))["bare"].new_token_ids, said(core, "a")
    load(core, "b", folders["b"])
    load(core, "too", folders["same as a"])
    names = fingerprints(core)
    assert names["too"] == names["a"] != names["b"]
    assert held(core) == set(names.values())
    assert first == said(core, "too") != bare
    assert said(core, "b") not in (first, bare)
    unload(core, "a")
    assert not core.has_work()
    assert held(core) == set(names.values()), "another name has the same"
    unload(core, "too")
    while core.has_work():
        core.step()
    assert held(core) == {names["b"]}


@pytest.mark.parametrize("how", ["replace", "unload"])
@pytest.mark.parametrize("num_steps", [0, 6])
def test_a_prompt_that_takes_tokens_back_keeps_its_adapter(
    core: EngineCore, folders: dict[str, Path], how: str, num_steps: int
) -> None:
    whole = [*PROMPT[:20], 7, 8, 9]
    wanted = run(core, asks("wanted", "a", prompt=whole))["wanted"].new_token_ids
    other = load(core, "b", folders["b"]).fingerprint
    assert run(core, asks("b", "b", prompt=whole))["b"].new_token_ids != wanted
    core.add(asks("parts", "a", extras={"more_follows": True}))
    for _ in range(num_steps):
        core.step()
    if how == "replace":
        load(core, "a", folders["b"], replaces=True)
    else:
        unload(core, "a")
    assert core.extend_prompt(ExtendPrompt("parts", pack_token_ids([7]), num_kept=20)) == []
    for _ in range(num_steps):
        core.step()
    outputs = core.extend_prompt(part_of("parts", [8, 9], is_last=True))
    found = finish(core, outputs, 1)["parts"]
    assert (found.new_token_ids, found.error) == (wanted, None)
    while core.has_work():
        core.step()
    assert held(core) == {bytes.fromhex(other)}


def test_names_and_numbers_have_limits(core: EngineCore, folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="an adapter a is loaded; unload it before"):
        load(core, "a", folders["b"])
    load(core, "b", folders["b"])
    load(core, "c", folders["c"])
    with pytest.raises(ValueError, match="3 adapters are loaded and --max-cpu-loras is 3"):
        load(core, "d", folders["c"])
    load(core, "c", folders["same as a"], replaces=True)
    for call in (lambda: unload(core, "d"), lambda: core.adapters.find_adapter("d")):
        with pytest.raises(ValueError, match="the adapter d is not loaded"):
            call()
    [refused] = core.add(asks("x", "d"))
    assert refused.finish_reason == "error"
    assert "the adapter d is not loaded" in (refused.error or "")
    for text in ("", "{}", '{"name": "x", "path": "/", "more": 1}'):
        with pytest.raises(ValueError, match="this is no LoadAdapter"):
            core.call("load_adapter", text)


@pytest.mark.parametrize("name", ["a", "new"])
def test_a_name_is_loaded_once_at_a_time(
    core: EngineCore, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    read = core.executor.read_adapter

    def slow(path: Path) -> Any:
        begun.set()
        assert may_go_on.wait(WAIT_SECONDS)
        return read(path)

    monkeypatch.setattr(core.executor, "read_adapter", slow)
    message = msgspec.json.encode(LoadAdapter(name, str(folders["b"]), True)).decode()
    deferred = core.call("load_adapter", message)
    assert begun.wait(WAIT_SECONDS)
    with pytest.raises(ValueError, match=f"the adapter {name} is being loaded"):
        core.call("load_adapter", message)
    assert said(core, "a"), "steps go on"
    may_go_on.set()
    deferred.future.result(WAIT_SECONDS)
    with pytest.raises(ValueError, match="is being loaded"):
        core.call("load_adapter", message)  # it is read, and not taken yet
    deferred.finish(deferred.future)
    assert fingerprints(core)[name] in held(core)


def test_a_load_that_fails_leaves_all_as_it_was(
    core: EngineCore, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprints(core)
    for replaces, name in ((False, "b"), (True, "a")):
        with pytest.raises(ConfigError, match=r"adapter_config.json is missing"):
            load(core, name, tmp_path, replaces=replaces)

    def refuse(_: object) -> None:
        raise ConfigError("the worker refuses")

    with monkeypatch.context() as patched:
        patched.setattr(core.executor, "add_adapter", refuse)
        with pytest.raises(ConfigError, match="the worker refuses"):
            load(core, "b", folders["b"])
    assert fingerprints(core) == before
    assert held(core) == set(before.values())
    load(core, "b", folders["b"])


@pytest.mark.parametrize("replaces", [False, True], ids=["unload", "replace"])
def test_requests_keep_the_adapter_that_they_began_with(
    core: EngineCore, folders: dict[str, Path], replaces: bool
) -> None:
    expected, old = said(core, "a"), fingerprints(core)["a"]
    outputs = core.add(asks("runs", "a"))
    outputs += core.step()
    if replaces:
        load(core, "a", folders["b"], replaces=True)
    else:
        unload(core, "a")
        [refused] = core.add(asks("late", "a"))
        assert "the adapter a is not loaded" in (refused.error or "")
    assert old in held(core)
    assert finish(core, outputs, 1)["runs"].new_token_ids == expected
    while core.has_work():
        core.step()
    assert old not in held(core)
    if replaces:
        found = run(core, asks("new", "a"))["new"]
        assert found.new_token_ids != expected
        assert not sum((found.cached_tokens_by_tier or {}).values()), "blocks of the old one"
        load(core, "a", folders["a"], replaces=True)
        again = run(core, asks("again", "a"))["again"]
        assert again.new_token_ids == expected
        assert sum((again.cached_tokens_by_tier or {}).values()), "its own blocks are there yet"


def test_an_idle_or_paused_engine_drops_adapters_too(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    """Loads that replace one another would else fill the memory."""
    for number in range(4):
        load(core, "a", folders["abc"[number % 3]], replaces=True)
        while core.has_work():
            assert core.step() == []
        assert held(core) == {fingerprints(core)["a"]}
    core.add(request("waits", PROMPT))
    core.scheduler.pause(Pause.ALL)
    unload(core, "a")
    while held(core):
        assert core.has_work()
        core.step()
    core.scheduler.resume()
    finish(core, [], 1)


@pytest.mark.parametrize("reload", [False, True])
def test_sessions_and_searches_end_well_across_an_unload(
    core: EngineCore, folders: dict[str, Path], reload: bool
) -> None:
    old = fingerprints(core)["a"]
    params = BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True)

    def search() -> AddRequest:
        asked = [asks(f"beam{i}", "a", max_tokens=5) for i in range(2)]
        share_prompt(asked, params)
        return asked[0]

    outputs = core.add(search())
    expected = finish(core, outputs, 2)
    whole = said(core, "a")
    core.add(asks("parts", "a", prompt=PROMPT[:12], extras={"more_follows": True}))
    while core.has_work():
        core.step()
    outputs = core.add(search()) + core.step()
    if reload:
        load(core, "a", folders["b"], replaces=True)
    else:
        unload(core, "a")
    found = finish(core, outputs, 2)
    assert {name: each.new_token_ids for name, each in found.items()} == {
        name: each.new_token_ids for name, each in expected.items()
    }
    assert old in held(core), "the session waits for its next part"
    outputs = core.extend_prompt(part_of("parts", PROMPT[12:], is_last=True))
    ended = finish(core, outputs, 1)["parts"]
    assert ended.error is None
    assert ended.new_token_ids == whole
    while core.has_work():
        core.step()
    assert old not in held(core)


def test_adapters_of_the_start_are_checked(
    make_core: MakeCore, folders: dict[str, Path], tmp_path: Path, tiny_model: Path
) -> None:
    with pytest.raises(ConfigError, match=r"--lora-modules bad: .*adapter_config.json is missing"):
        make_core(lora_modules={"a": folders["a"], "bad": tmp_path})
    with pytest.raises(
        ConfigError, match=r"--lora-modules a: .*has rank 4 and --max-lora-rank is 2"
    ):
        make_core(lora_modules={"a": folders["a"]}, max_lora_rank=2)
    large = {name: each * 1e4 for name, each in make_tensors(spec_of(tiny_model)).items()}
    write_adapter(tmp_path / "large", tiny_model, tensors=large, lora_alpha=1e5)
    with pytest.raises(ConfigError, match=r"large has numbers too large for float16; start the"):
        make_core(lora_modules={"a": tmp_path / "large"}, dtype="float16")
    with pytest.raises(ConfigError, match=r"--lora-dir .*nowhere is no directory"):
        make_core(lora_dir=tmp_path / "nowhere")


def test_an_engine_without_adapters_says_how_to_take_them(
    make_core: MakeCore, folders: dict[str, Path]
) -> None:
    core = make_core()
    with pytest.raises(ValueError, match="start it with --lora-modules NAME=PATH, --lora-dir or"):
        load(core, "a", folders["a"])
    [refused] = core.add(asks("x", "a"))
    assert "is not loaded" in (refused.error or "")


class Looped:
    """A core in a loop, whose messages a test reads."""

    def __init__(self, core: EngineCore) -> None:
        self.said: queue.Queue[FromCore] = queue.Queue()
        self.loop = CoreLoop(core, self.said.put)
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()

    def call(self, number: int, name: str, message: object) -> None:
        argument = msgspec.json.encode(message).decode()
        self.loop.submit(Call(number, name, argument), WAIT_SECONDS)

    def reply(self) -> Reply:
        while True:
            message = self.said.get(timeout=WAIT_SECONDS)
            if isinstance(message, Reply):
                return message


@pytest.fixture
def looped(core: EngineCore) -> Iterator[Looped]:
    looped = Looped(core)
    yield looped
    looped.loop.stop()
    looped.thread.join(WAIT_SECONDS)
    assert not looped.thread.is_alive()


def test_loads_are_answered_beside_other_calls(
    core: EngineCore, looped: Looped, folders: dict[str, Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    may_go_on = threading.Event()
    read = core.executor.read_adapter

    def slow(path: Path) -> Any:
        assert may_go_on.wait(WAIT_SECONDS)
        return read(path)

    monkeypatch.setattr(core.executor, "read_adapter", slow)
    looped.call(1, "load_adapter", LoadAdapter("b", str(folders["b"])))
    looped.call(2, "load_adapter", LoadAdapter("b", str(folders["c"])))
    looped.call(3, "load_adapter", LoadAdapter("c", str(tmp_path)))
    looped.call(4, "paused", "")
    second, fourth = looped.reply(), looped.reply()
    assert (second.call_id, fourth.call_id) == (2, 4)
    assert "is being loaded" in second.error
    may_go_on.set()
    others = {each.call_id: each for each in (looped.reply(), looped.reply())}
    assert msgspec.json.decode(others[1].result, type=LoadedAdapter).name == "b"
    assert "adapter_config.json is missing" in others[3].error
    assert set(fingerprints(core)) == {"a", "b"}


def test_a_full_queue_stops_no_load(
    core: EngineCore, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that has ended before the loop looks would wait for itself."""
    monkeypatch.setattr(loop_module, "QUEUE_MESSAGES", 2)
    read, threads = core.executor.read_adapter, []

    class AtOnce(threading.Thread):
        def start(self) -> None:
            threads.append(self)
            self.run()

    monkeypatch.setattr("stratakv.engine.core.adapter_registry.threading.Thread", AtOnce)
    said: queue.Queue[FromCore] = queue.Queue()
    loop = CoreLoop(core, said.put)

    def fills(path: Path) -> Any:
        loop.wake()
        loop.wake()
        return read(path)

    monkeypatch.setattr(core.executor, "read_adapter", fills)
    message = msgspec.json.encode(LoadAdapter("b", str(folders["b"]))).decode()
    loop.submit(Call(1, "load_adapter", message), 0)
    monkeypatch.undo()
    thread = threading.Thread(target=loop.run)
    thread.start()
    reply = said.get(timeout=WAIT_SECONDS)
    loop.stop()
    thread.join(WAIT_SECONDS)
    assert isinstance(reply, Reply)
    assert reply.call_id == 1
    assert not reply.error
