# SPDX-License-Identifier: Apache-2.0
"""Prompts with pictures on a whole engine: the answers of transformers in float64, however the
prompt is cut into steps, and wherever its blocks come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.request.core_messages import AddRequest, RequestExtras, share_prompt
from stratakv.engine.scheduler import request_limits

from ..picture_model import KINDS, Part, PictureModel, draw_picture, make_picture_model
from .conftest import config_of, finish, run
from .conftest import request as asked_of

BLOCK = 8
NUM_TOKENS = 6
WIDE, TALL, SMALL = draw_picture(40, 90, 1), draw_picture(64, 30, 2), draw_picture(20, 20, 3)
OTHER_WIDE = draw_picture(40, 90, 4)
CHAT: list[Part] = ["look: ", WIDE, " and ", TALL, " differ"]
Make = Callable[..., EngineCore]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PictureModel:
    return PictureModel(make_picture_model(tmp_path_factory.mktemp("pictures"), request.param))


@pytest.fixture
def make(model: PictureModel) -> Iterator[Make]:
    cores: list[EngineCore] = []

    def make(**options: Any) -> EngineCore:
        cores.append(EngineCore(config_of(model.path, **options)))
        return cores[-1]

    yield make
    for core in cores:
        core.shutdown(5.0)


@pytest.fixture(scope="module")
def answers(model: PictureModel) -> Callable[[Sequence[Part]], list[int]]:
    known: dict[tuple[int, ...], list[int]] = {}

    def answer(parts: Sequence[Part]) -> list[int]:
        key = tuple(map(id, parts))
        if key not in known:
            known[key] = model.answer(parts, NUM_TOKENS)[0]
        return known[key]

    return answer


def asked(model: PictureModel, parts: Sequence[Part], name: str = "a", **fields: Any) -> AddRequest:
    tokens, pictures = model.prompt_of(parts)
    return asked_of(name, tokens, extras=RequestExtras(pictures=pictures), **fields)


def stats(core: EngineCore) -> dict[str, Any]:
    found: dict[str, Any] = core.call("stats", "")
    return found


def found_in(core: EngineCore, message: AddRequest, tier: str) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt came from the pool and from `tier`; of many
    tokens most came from `tier`."""
    output = run(core, message)[message.request_id]
    assert output.error is None
    found = output.cached_tokens_by_tier or {}
    total = sum(found.values())
    assert set(found) <= {tier, "pool"} and (total <= BLOCK or 2 * found[tier] >= total)
    return output.new_token_ids, total


@pytest.mark.parametrize("budget", [8, 9, 11, 13, 16, 19, 23, 31, 64, 200])
def test_answers_do_not_depend_on_where_a_prompt_is_cut(
    model: PictureModel, make: Make, answers: Callable[[Sequence[Part]], list[int]], budget: int
) -> None:
    """A cut may be inside a picture: the pieces before and behind it take the same embeddings."""
    core = make(max_num_batched_tokens=budget)
    for number, parts in enumerate((CHAT, [SMALL, "what is it?"], ["no picture"])):
        output = run(core, asked(model, parts, f"r{number}"))[f"r{number}"]
        assert output.new_token_ids == answers(parts)


def test_prompts_in_parts_have_no_pictures(model: PictureModel, make: Make) -> None:
    opening = asked(model, CHAT)
    assert opening.extras is not None
    opening.extras = msgspec.structs.replace(opening.extras, more_follows=True)
    [output] = make().add(opening)
    assert "without pictures; send the prompt whole" in (output.error or "")


def test_pictures_beyond_the_engines_memory_are_named(
    model: PictureModel, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_limits, "MAX_EMBED_BYTES", 1000)
    core = make()
    assert core.add(asked(model, [WIDE], "a")) == []
    [output] = core.add(asked(model, [TALL], "b"))
    assert output.error_code == "overloaded"
    assert "prompt embeddings and pictures of unfinished requests" in (output.error or "")


def test_requests_share_a_step(
    model: PictureModel, make: Make, answers: Callable[[Sequence[Part]], list[int]]
) -> None:
    chats: list[list[Part]] = [CHAT, ["text"], [SMALL, "?"], ["is this", TALL], [WIDE, TALL, SMALL]]
    core = make(max_num_batched_tokens=96, num_blocks=200)
    outputs = run(core, *[asked(model, parts, f"r{n}") for n, parts in enumerate(chats)])
    for number, parts in enumerate(chats):
        assert outputs[f"r{number}"].new_token_ids == answers(parts)


def test_preempted_requests_encode_their_pictures_again(
    model: PictureModel, make: Make, answers: Callable[[Sequence[Part]], list[int]]
) -> None:
    chats: list[list[Part]] = [CHAT, [TALL, "and", WIDE], [WIDE, TALL, SMALL]]
    blocks = -(-max(len(model.prompt_of(parts)[0]) for parts in chats) // BLOCK) + 4
    core = make(num_blocks=blocks, max_num_batched_tokens=40, max_num_seqs=3)
    outputs = run(core, *[asked(model, parts, f"r{n}") for n, parts in enumerate(chats)])
    for number, parts in enumerate(chats):
        assert outputs[f"r{number}"].new_token_ids == answers(parts)


def in_step(core: EngineCore) -> bool:
    """Whether scheduler and worker agree about the embeddings that the worker has."""
    worker = core.executor.runner._pictures._embeds  # type: ignore[attr-defined]
    cache = core.scheduler._pictures
    assert cache is not None
    return set(worker) - set(cache._to_drop) == set(cache._entries)


def test_a_picture_that_comes_again_waits_for_none(
    model: PictureModel, make: Make, answers: Callable[[Sequence[Part]], list[int]]
) -> None:
    """The budget holds either picture, and not both."""
    parts: list[Part] = ["x", TALL, "y", SMALL, "z", TALL, "?"]
    most = max(
        sum(item.num_tokens for item in model.processor.process_picture(each).items)
        for each in (TALL, SMALL)
    )
    core = make(num_blocks=200, max_num_batched_tokens=most)
    assert run(core, asked(model, parts))["a"].new_token_ids == answers(parts)
    assert in_step(core)


def test_a_step_without_tokens_carries_out_its_plan_of_pictures(
    model: PictureModel,
    make: Make,
    answers: Callable[[Sequence[Part]], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A load holds the room that a request with a picture needs: the step reserves the picture,
    and computes nothing."""
    parts: list[Part] = ["x" * 40, TALL, "?"]
    text = asked(model, ["t" * 100], "text")
    num_tokens = max(len(text.prompt_token_ids) // 4, len(model.prompt_of(parts)[0]))
    core = make(
        num_blocks=num_tokens // BLOCK + 4, max_num_batched_tokens=200, kv_offload="cpu",
        kv_offload_cpu_bytes="8MiB", kv_offload_load="always",
    )  # fmt: skip
    run(core, text)
    run(core, asked(model, ["u" * 100], "other"))  # the text's blocks go to the tier
    runner = core.executor.runner  # type: ignore[attr-defined]
    poll, is_held = runner.poll_copies, [True]
    monkeypatch.setattr(runner, "poll_copies", lambda: None if is_held[0] else poll())
    core.add(msgspec.structs.replace(text, request_id="again"))
    for _ in range(5):
        core.step()
    assert core.scheduler._states.num_loading == 1
    core.add(asked(model, parts, "picture"))
    for _ in range(3):
        core.step()
        assert in_step(core)
    is_held[0] = False
    ended = finish(core, [], 2)
    assert ended["picture"].error is None
    assert ended["picture"].new_token_ids == answers(parts)
    assert run(core, asked(model, parts, "later"))["later"].new_token_ids == answers(parts)


def test_failed_steps_leave_no_embeddings_behind(
    model: PictureModel, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make(num_blocks=200, max_num_batched_tokens=24)
    runner = core.executor.runner  # type: ignore[attr-defined]
    for number in range(3):
        run(core, asked(model, [f"a{number}", draw_picture(64, 48, number)], f"a{number}"))
        with monkeypatch.context() as patch:
            patch.setattr(runner, "_update_batch", lambda _: 1 / 0)
            failed = run(core, asked(model, ["b", draw_picture(64, 64, 100 + number)], "b"))
        assert failed["b"].error is not None
        run(core, asked(model, ["text"], "text"))
        assert in_step(core)


def test_blocks_are_found_by_the_pictures_in_them(
    model: PictureModel, make: Make, answers: Callable[[Sequence[Part]], list[int]]
) -> None:
    """A picture of equal size has equal tokens, and its blocks are others."""
    core = make(num_blocks=200)
    text = "this text comes before"
    parts: list[Part] = [text, WIDE, "what is it?"]
    tokens, pictures = model.prompt_of(parts)
    assert tokens == model.prompt_of([text, OTHER_WIDE, "what is it?"])[0]
    assert found_in(core, asked(model, parts, "a"), "pool") == (answers(parts), 0)
    whole = (len(tokens) - 1) // BLOCK * BLOCK
    assert found_in(core, asked(model, parts, "b"), "pool") == (answers(parts), whole)
    others: list[Part] = [text, OTHER_WIDE, "what is it?"]
    before = pictures[0].start // BLOCK * BLOCK
    assert found_in(core, asked(model, others, "c"), "pool") == (answers(others), before)
    assert answers(others) != answers(parts)
    same_file_again: list[Part] = [text, WIDE.copy(), "what is it?"]
    again = asked(model, same_file_again, "d")
    assert found_in(core, again, "pool") == (answers(parts), whole)


@pytest.mark.parametrize("tiers", ["cpu", "cpu,ssd"])
def test_tiers_give_back_blocks_of_pictures(
    model: PictureModel,
    make: Make,
    answers: Callable[[Sequence[Part]], list[int]],
    tiers: str,
    tmp_path: Path,
) -> None:
    tokens = len(model.prompt_of(CHAT)[0])
    options: dict[str, Any] = {
        "kv_offload": tiers, "kv_offload_cpu_bytes": "8MiB", "kv_offload_load": "always",
        "num_blocks": tokens // BLOCK + 6,
    }  # fmt: skip
    if tiers != "cpu":
        options |= {"kv_offload_ssd_path": str(tmp_path), "kv_offload_ssd_bytes": "64MiB"}
    core = make(**options)
    whole = (tokens - 1) // BLOCK * BLOCK
    assert found_in(core, asked(model, CHAT, "a"), "cpu") == (answers(CHAT), 0)
    _push_out(model, core, "x" * tokens)
    assert found_in(core, asked(model, CHAT, "b"), "cpu") == (answers(CHAT), whole)
    _push_out(model, core, "y" * tokens)
    others: list[Part] = ["look: ", OTHER_WIDE, " and ", TALL, " differ"]
    before = model.prompt_of(CHAT)[1][0].start // BLOCK * BLOCK
    assert found_in(core, asked(model, others, "c"), "cpu") == (answers(others), before)
    if tiers == "cpu":
        return
    core.shutdown(20.0)
    assert found_in(make(**options), asked(model, CHAT, "d"), "ssd") == (answers(CHAT), whole)


def _push_out(model: PictureModel, core: EngineCore, text: str) -> None:
    """Fill the pool with blocks of a text."""
    assert run(core, asked(model, [text], text[:1]))[text[:1]].error is None


def test_forks_share_the_prompt_of_a_picture(
    model: PictureModel, make: Make, answers: Callable[[Sequence[Part]], list[int]]
) -> None:
    first, second = asked(model, CHAT, "a"), asked(model, CHAT, "b")
    share_prompt([first, second])
    core = make(num_blocks=200)
    outputs = finish(core, core.add(first), 2)
    assert {name: output.new_token_ids for name, output in outputs.items()} == {
        "a": answers(CHAT), "b": answers(CHAT)
    }  # fmt: skip


@pytest.mark.parametrize("fault", ["no picture", "forged", "moved", "short", "too few", "overlap"])
def test_prompts_that_do_not_fit_their_pictures_are_refused(
    model: PictureModel, make: Make, fault: str
) -> None:
    tokens, pictures = model.prompt_of(CHAT)
    first = pictures[0]
    if fault == "no picture":
        pictures = []
    elif fault == "forged":
        tokens = [*tokens, tokens[first.start]]
    elif fault == "moved":
        pictures = [type(first)(first.digest, first.start - 1, *_rest(first)), *pictures[1:]]
    elif fault == "short":
        rest = (first.num_tokens, first.height, first.width, first.pixels[:-1])
        pictures = [type(first)(first.digest, first.start, *rest), *pictures[1:]]
    elif fault == "too few":
        pictures = pictures[:-1]
    else:
        pictures = [first, *pictures]
    core = make(num_blocks=200)
    extras = RequestExtras(pictures=pictures)
    [output] = core.add(asked_of("bad", tokens, extras=extras))
    assert output.error is not None and "picture" in output.error
    good = run(core, asked(model, ["go on"], "good"))["good"]
    assert good.error is None and len(good.new_token_ids) == NUM_TOKENS


def _rest(picture: Any) -> tuple[Any, ...]:
    return picture.num_tokens, picture.height, picture.width, picture.pixels
