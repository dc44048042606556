# SPDX-License-Identifier: Apache-2.0
"""PictureCache: what a step encodes and drops, within its budget and its room."""

from __future__ import annotations

import random

import pytest

from stratakv.engine.cache.picture_cache import PictureCache
from stratakv.engine.request.pictures import Picture
from stratakv.engine.request.request import Request
from stratakv.engine.request.sampling_params import SamplingParams

ROOM = 10


def picture(name: str, start: int, num_tokens: int) -> Picture:
    return Picture(name.encode().ljust(32, b"."), start, num_tokens, 1, num_tokens)


def request(name: str, *pictures: Picture) -> Request:
    prompt = [1] * (max((each.end for each in pictures), default=0) + 4)
    return Request(name, prompt, SamplingParams(), pictures=pictures)


def names_of(plan: tuple[list[Picture], list[bytes]]) -> tuple[list[str], list[str]]:
    encoded, dropped = plan
    return (
        [each.digest.rstrip(b".").decode() for each in encoded],
        [each.rstrip(b".").decode() for each in dropped],
    )


@pytest.fixture
def cache() -> PictureCache:
    return PictureCache(ROOM)


def test_a_picture_is_encoded_with_the_first_chunk_that_touches_it(cache: PictureCache) -> None:
    one = request("r", picture("a", 4, 4))
    cache.begin_step(1, [one])
    assert cache.fit_chunk(one, 0, 4) == 4  # ends where the picture begins
    assert names_of(cache.take_plan()) == ([], [])
    one.num_computed_tokens = 4
    cache.begin_step(2, [one])
    assert cache.fit_chunk(one, 4, 1) == 1
    assert names_of(cache.take_plan()) == (["a"], [])
    one.num_computed_tokens = 5
    cache.begin_step(3, [one])
    assert cache.fit_chunk(one, 5, 7) == 7
    assert names_of(cache.take_plan()) == ([], [])
    assert (cache.num_encoded, cache.num_reused) == (1, 0)


def test_a_chunk_ends_before_a_picture_that_finds_no_budget(cache: PictureCache) -> None:
    one = request("r", picture("a", 2, 6), picture("b", 8, 6))
    cache.begin_step(1, [one])
    assert cache.fit_chunk(one, 0, 18) == 8
    assert names_of(cache.take_plan()) == (["a"], [])
    one.num_computed_tokens = 8
    cache.begin_step(2, [one])
    assert cache.fit_chunk(one, 8, 10) == 10
    assert names_of(cache.take_plan()) == (["b"], ["a"])


def test_requests_share_the_embeddings_of_a_picture(cache: PictureCache) -> None:
    first, second = request("r", picture("a", 0, 6)), request("s", picture("a", 3, 6))
    cache.begin_step(1, [first])
    assert cache.fit_chunk(first, 0, 8) == 8
    assert cache.fit_chunk(second, 0, 9) == 9
    assert names_of(cache.take_plan()) == (["a"], [])
    assert (cache.num_encoded, cache.num_reused) == (1, 1)


def test_pictures_are_counted_when_a_request_computes_them(cache: PictureCache) -> None:
    """A request may try in many steps, and wait for blocks."""
    first, second = request("r", picture("a", 0, 6)), request("s", picture("a", 3, 6))
    for step in (1, 2, 3):
        cache.begin_step(step, [])
        assert cache.fit_chunk(first, 0, 8) == 8
        assert cache.fit_chunk(second, 0, 9) == 9
        cache.take_plan({"other"})
    assert (cache.num_encoded, cache.num_reused) == (1, 0)
    cache.begin_step(4, [])
    assert cache.fit_chunk(first, 0, 8) == 8
    assert cache.fit_chunk(second, 0, 4) == 4
    cache.take_plan({"r", "s"})
    assert (cache.num_encoded, cache.num_reused) == (1, 1)
    first.num_computed_tokens, second.num_computed_tokens = 8, 4
    cache.begin_step(5, [first, second])
    assert cache.fit_chunk(second, 4, 5) == 5
    cache.take_plan({"s"})
    assert (cache.num_encoded, cache.num_reused) == (1, 1)


def test_a_picture_that_comes_again_leaves_its_room_to_others_between(cache: PictureCache) -> None:
    one = request("r", picture("a", 0, 6), picture("b", 6, 6), picture("a", 12, 6))
    for step, (computed, plan) in enumerate(
        [(0, (["a"], [])), (6, (["b"], ["a"])), (12, (["a"], ["b"]))], start=1
    ):
        one.num_computed_tokens = computed
        cache.begin_step(step, [one])
        assert cache.fit_chunk(one, computed, 20 - computed) == (6 if computed < 12 else 8)
        assert names_of(cache.take_plan()) == plan


def test_embeddings_that_a_request_needs_stay(cache: PictureCache) -> None:
    first, second = request("r", picture("a", 0, 6)), request("s", picture("b", 0, 6))
    cache.begin_step(1, [first])
    assert cache.fit_chunk(first, 0, 3) == 3
    first.num_computed_tokens = 3
    for step in (2, 3):
        cache.begin_step(step, [first])
        assert cache.fit_chunk(second, 0, 10) == 0
    cache.take_plan()
    first.num_computed_tokens = 6
    cache.begin_step(4, [first])
    assert cache.fit_chunk(second, 0, 10) == 10
    assert names_of(cache.take_plan()) == (["b"], ["a"])


def test_a_picture_larger_than_the_room_is_encoded_alone(cache: PictureCache) -> None:
    small, large = request("r", picture("a", 0, 2)), request("s", picture("b", 1, ROOM + 5))
    cache.begin_step(1, [small])
    assert cache.fit_chunk(small, 0, 1) == 1
    assert cache.fit_chunk(large, 0, 20) == 1
    small.num_computed_tokens = 6
    cache.begin_step(2, [small])
    cache.take_plan()
    assert cache.fit_chunk(large, 1, 20) == 20
    assert cache.fit_chunk(request("t", picture("c", 0, 1)), 0, 1) == 0
    assert names_of(cache.take_plan()) == (["b"], ["a"])


def test_later_requests_do_not_take_the_room_that_a_picture_waits_for(cache: PictureCache) -> None:
    """A later request begins in each step, so one is always in the middle of a picture."""
    large, running = request("large", picture("a", 0, 8)), list[Request]()
    for step in range(1, 20):
        running.append(request(f"r{step}", picture(f"b{step % 3}", 0, 4), picture("c", 5, 4)))
        if step == 3:
            running.insert(0, large)
        cache.begin_step(step, running)
        for each in running:
            computed = each.num_computed_tokens
            left = min(3, each.num_tokens - computed)
            each.num_computed_tokens += cache.fit_chunk(each, computed, left)
        cache.take_plan()
        running = [each for each in running if each.num_computed_tokens < each.num_tokens]
    assert large.num_computed_tokens == large.num_tokens


def test_a_preempted_request_holds_nothing(cache: PictureCache) -> None:
    one = request("r", picture("a", 0, 8))
    cache.begin_step(1, [one])
    assert cache.fit_chunk(one, 0, 2) == 2
    cache.take_plan()
    cache.begin_step(2, [])
    other = request("s", picture("b", 0, 8))
    assert cache.fit_chunk(other, 0, 8) == 8
    assert names_of(cache.take_plan()) == (["b"], ["a"])


def test_pictures_of_a_failed_step_are_encoded_again(cache: PictureCache) -> None:
    one = request("r", picture("a", 0, 3), picture("b", 3, 3))
    cache.begin_step(1, [one])
    assert cache.fit_chunk(one, 0, 3) == 3
    cache.take_plan()
    cache.begin_step(2, [one])
    assert cache.fit_chunk(one, 3, 3) == 3
    cache.take_plan()
    cache.fail_step(2)
    cache.begin_step(3, [one])
    assert cache.fit_chunk(one, 0, 6) == 6
    assert names_of(cache.take_plan()) == (["b"], ["b"])


@pytest.mark.parametrize("seed", range(20))
def test_random_lives_keep_the_worker_within_the_room(seed: int) -> None:
    """The worker, played here, has what each chunk needs, and never more than the room."""
    draw = random.Random(seed)
    cache, held = PictureCache(ROOM), dict[bytes, int]()
    lives: dict[str, Request] = {}
    failed = 0
    for step in range(1, 400):
        if len(lives) < 4:
            place, pictures = draw.randrange(4), []
            for _ in range(draw.randrange(1, 4)):
                size = draw.randrange(1, ROOM + 3)
                pictures.append(picture(f"{draw.randrange(6)}/{size}", place, size))
                place += size + draw.randrange(3)
            lives[f"r{step}"] = request(f"r{step}", *pictures)
        running = [each for each in lives.values() if draw.random() < 0.9]
        cache.begin_step(step, running)
        chunks = []
        for each in running:
            left = each.num_tokens - each.num_computed_tokens
            wanted = min(left, draw.randrange(1, 12))
            count = cache.fit_chunk(each, each.num_computed_tokens, wanted)
            assert 0 <= count <= wanted
            chunks += [(each, count)] if count else []
        encoded, dropped = cache.take_plan()
        if draw.random() < 0.1:  # the worker did neither
            cache.fail_step(step)
            failed += 1
            for digest in dropped:
                held.pop(digest, None)
            continue
        for digest in dropped:
            held.pop(digest, None)
        held |= {each.digest: each.num_tokens for each in encoded}
        assert sum(held.values()) <= ROOM or len(held) == 1
        for each, count in chunks:
            end = each.num_computed_tokens + count
            for one in each.pictures:
                if one.end > each.num_computed_tokens and one.start < end:
                    assert one.digest in held
            each.num_computed_tokens = end
            if end == each.num_tokens:
                del lives[each.request_id]
    assert failed and cache.num_encoded and cache.num_reused
