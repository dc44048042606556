# SPDX-License-Identifier: Apache-2.0
"""Every family with states against transformers in float64, and its states against each other.

A sequence's numbers must not depend on how it is cut into steps, on what is computed beside it, on
where its state lies, or on what lay there before.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stratakv.engine.models.decoder import AuxStates
from stratakv.engine.models.layers import Elementwise, norm
from stratakv.engine.models.rope import rotate
from stratakv.engine.models.states import recurrence
from tests.tiny_models import load_reference, reference_logits

from .state_driver import NUM_SLOTS, GrowingAttention, Part, Request, StateDriver
from .state_models import STATE_MODELS, exact_logits, make_state_model, random_tokens

# Longer than two chunks of a recurrence and a half.
LENGTH = 150
EXACT, CLOSE = 1e-9, 1e-11


@pytest.fixture(scope="module", params=STATE_MODELS)
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StateDriver:
    return StateDriver(make_state_model(tmp_path_factory.mktemp("model"), request.param))


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference as a share of the largest number."""
    return float((one - other).abs().max() / other.abs().max())


def assert_same_state(driver: StateDriver, slot: int, expected: list[torch.Tensor]) -> None:
    for found, wanted in zip(driver.state(slot), expected, strict=True):
        assert found.isfinite().all()
        assert distance(found, wanted) < CLOSE


def test_logits_equal_transformers(driver):
    tokens = random_tokens(1, LENGTH)
    found = driver.step([Part(Request(3), tokens)])
    assert distance(found, exact_logits(driver.path, tokens)) < EXACT


def test_greedy_tokens_equal_transformers(driver):
    tokens, request = random_tokens(2, 70), Request(0)
    logits = driver.step([Part(request, tokens)])[-1:]
    answer: list[int] = []
    for _ in range(40):
        answer.append(int(logits.argmax()))
        logits = driver.step([Part(request, answer[-1:])])
    assert len(set(answer)) > 8, "a repeating answer would prove little"
    expected = exact_logits(driver.path, tokens + answer)
    assert answer == expected[69:-1].argmax(-1).tolist()
    assert distance(logits, expected[-1:]) < EXACT


def test_a_sequence_cut_anywhere_is_the_same(driver):
    tokens = random_tokens(3, LENGTH)
    whole = driver.step([Part(Request(0), tokens)])
    expected = driver.state(0)
    for cut in (*range(1, 12), 63, 64, 65, 127, 128, 129, LENGTH - 1):
        request = Request(1)
        first = driver.step([Part(request, tokens[:cut])])
        second = driver.step([Part(request, tokens[cut:])])
        assert distance(torch.cat((first, second)), whole) < CLOSE
        assert_same_state(driver, 1, expected)


def test_a_long_prompt_is_scanned_in_parts(driver, monkeypatch):
    tokens = random_tokens(16, LENGTH)
    whole = driver.step([Part(Request(0), tokens)])
    monkeypatch.setattr(recurrence, "MOST_ROWS", 64)
    assert distance(driver.step([Part(Request(1), tokens)]), whole) < CLOSE
    assert_same_state(driver, 1, driver.state(0))


def test_row_by_row_is_the_same(driver):
    tokens, request = random_tokens(4, 30), Request(1)
    whole = driver.step([Part(Request(0), tokens)])
    single = torch.cat([driver.step([Part(request, [token])]) for token in tokens])
    assert distance(single, whole) < CLOSE
    assert_same_state(driver, 1, driver.state(0))


def test_saves_in_the_middle_equal_the_state_of_a_cut(driver):
    tokens = random_tokens(5, LENGTH)
    cuts = (1, 2, 40, 64, 90, 149)
    saves = [(cut, slot) for slot, cut in enumerate(cuts)]
    whole = driver.step([Part(Request(9), tokens, [*saves, (LENGTH, 9)])])
    for cut, slot in saves:
        driver.step([Part(Request(10), tokens[:cut])])
        assert_same_state(driver, slot, driver.state(10))
    # The sequence goes on from each.
    resumed = Request(9)
    driver.step([Part(resumed, tokens)])
    for cut, slot in saves[2:]:
        request = resumed.copy(slot)
        request.truncate(cut)
        assert distance(driver.step([Part(request, tokens[cut:])]), whole[cut:]) < CLOSE


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_drafts_have_a_state_behind_each_row(driver, count):
    """Also where the state that they begin with is in a slot that one of them is saved to."""
    prompt, drafts = random_tokens(6, 33), random_tokens(7, count)
    request = Request(4)
    driver.step([Part(request, prompt)])
    states = []
    for number in range(count):
        one = Request(10)
        driver.step([Part(one, prompt + drafts[: number + 1])])
        states.append(driver.state(10))
    slots = [5, 4, 6, 7, 8, 9, 11, 12, 13][:count]
    found = driver.step([Part(request, drafts, [(n + 1, slot) for n, slot in enumerate(slots)])])
    whole = driver.step([Part(Request(10), prompt + drafts)])
    assert distance(found, whole[len(prompt) :]) < CLOSE
    for slot, state in zip(slots, states, strict=True):
        assert_same_state(driver, slot, state)
    # All but the last are accepted, and the answer goes on from there.
    if count > 1:
        request.truncate(len(prompt) + count - 1)
        again = driver.step([Part(request, drafts[-1:], source=slots[-2])])
        assert distance(again, whole[-1:]) < CLOSE


def mixture(driver: StateDriver, requests: list[Request]) -> list[Part]:
    """A prompt's first part, a later one, decodes, and drafts; of sequences that are prepared."""
    for request, length in zip(requests, (0, 37, 20, 50, 24), strict=True):
        if length:
            driver.step([Part(request, random_tokens(20 + length, length))])
    return [
        Part(requests[0], random_tokens(30, 70), [(33, 10), (70, requests[0].slot)]),
        Part(requests[1], random_tokens(31, 18)),
        Part(requests[2], random_tokens(32, 1)),
        Part(requests[3], random_tokens(33, 1)),
        Part(requests[4], random_tokens(34, 3), [(1, 11), (2, 12), (3, 13)]),
    ]


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]])
def test_neighbours_and_their_order_change_nothing(driver, order):
    alone = mixture(driver, [Request(slot) for slot in range(5)])
    expected = [driver.step([part]) for part in alone]
    kept = [driver.state(slot) for slot in (*range(4), 10, 11, 12, 13)]
    parts = mixture(driver, [Request(slot) for slot in (8, 5, 9, 6, 7)])
    found = driver.step([parts[number] for number in order])
    pieces = dict(zip(order, found.split([len(parts[n].tokens) for n in order]), strict=True))
    for number, logits in enumerate(expected):
        assert distance(pieces[number], logits) < CLOSE
    for slot, state in zip((8, 5, 9, 6, 10, 11, 12, 13), kept, strict=True):
        assert_same_state(driver, slot, state)


def test_forks_share_the_state_they_begin_with(driver):
    prompt = random_tokens(8, 21)
    first = Request(2)
    driver.step([Part(first, prompt)])
    second = first.copy(3)
    parts = [Part(first, [7], [(1, 4)]), Part(second, [9], [(1, 3)], source=2)]
    found = driver.step(parts)
    for row, token in enumerate((7, 9)):
        whole = driver.step([Part(Request(10), [*prompt, token])])
        assert distance(found[row], whole[-1]) < CLOSE


def test_requests_that_begin_with_one_token_begin_with_zeros(driver):
    """In slots whose bytes are no numbers, beside one that goes on."""
    driver.running.raw.fill_(0xFF)
    known = Request(0)
    driver.step([Part(known, random_tokens(9, 12))])
    both = driver.step([Part(Request(1), [5]), Part(known, [6]), Part(Request(2), [7])])
    for row, token in ((0, 5), (2, 7)):
        assert distance(both[row], driver.step([Part(Request(3), [token])])[0]) < CLOSE
    assert driver.running.raw[NUM_SLOTS - 1].eq(0xFF).all(), "no other slot is touched"


def test_states_move_on_by_rows_that_are_not_wanted(driver):
    tokens, aux = random_tokens(10, 40), AuxStates([0, 3, 4])
    whole = driver.step([Part(Request(0), tokens)])
    found = driver.step([Part(Request(1), tokens)], torch.tensor([39, 11]), aux)
    assert distance(found, whole[[39, 11]]) < CLOSE
    assert {layer: len(rows) for layer, rows in aux.found.items()} == {0: 2, 3: 2, 4: 2}
    assert_same_state(driver, 1, driver.state(0))


def test_rows_without_a_save_leave_no_state(driver):
    before = driver.running.raw.clone()
    tokens = random_tokens(11, 20)
    found = driver.step([Part(Request(0), tokens, [])])
    assert torch.equal(driver.running.raw, before)
    assert distance(found, driver.step([Part(Request(0), tokens)])) < CLOSE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_logits_in_smaller_types(driver, dtype):
    """They are as near to the exact ones as those of transformers in that type are: of a prompt in
    two parts and a decode."""
    tokens, smaller, request = random_tokens(12, 90), StateDriver(driver.path, dtype), Request(0)
    parts = [tokens[:50], tokens[50:89], tokens[89:]]
    found = torch.cat([smaller.step([Part(request, part)]) for part in parts])
    exact = exact_logits(driver.path, tokens)
    error = (found - exact).abs().mean()
    assert error < 1.5 * (reference_logits(driver.path, tokens, dtype) - exact).abs().mean()
    assert error < (1e-5 if dtype is torch.float32 else 0.1) * exact.abs().max()


def test_chosen_experts_are_those_of_transformers(driver):
    experts = driver.spec.experts
    if experts is None:
        pytest.skip("a model without experts")
    decoder, count, tokens = driver.decoder, experts.num_per_token, random_tokens(15, 70)
    decoder.record_experts(len(tokens))
    driver.step([Part(Request(0), tokens)])
    assert decoder.chosen_experts is not None
    found = decoder.chosen_experts.sort(-1).values
    scores: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda *args: scores.append(args[2][0]))
        for name, module in load_reference(driver.path).named_modules()
        if name.endswith((".mlp.gate", ".block_sparse_moe.router"))
    ]
    exact_logits(driver.path, tokens)
    for hook in hooks:
        hook.remove()
    expected = torch.stack([each.topk(count, -1).indices.sort(-1).values for each in scores])
    assert len(expected) == len(experts.layers) and torch.equal(found, expected.int())


class RotatingAttention(GrowingAttention):
    """An attention that norms and rotates by itself, as kernels do."""

    def of_qkv(self, qkv, rotary, layer, plan):
        positions, cos, sin, norms, eps = rotary
        kv_heads = (qkv.shape[1] - self.num_heads) // 2
        turning = qkv.shape[1] - kv_heads
        turned = qkv[:, :turning]
        if norms is not None:
            turned = norm(turned, norms, eps)
        turned = rotate(turned, cos[positions][:, None], sin[positions][:, None])
        q, k = turned[:, : self.num_heads], turned[:, self.num_heads :]
        return self(q, k, qkv[:, turning:], layer, plan)


def test_kernels_have_the_same_numbers(driver):
    """Functions in the place of kernels: layers then add in place, and attention rotates."""
    kernels = replace(Elementwise(), is_kernels=True)
    other = StateDriver(driver.path, torch.float64, kernels)
    other.attention = RotatingAttention(driver.spec.attention_scale)
    other.attention.num_heads = driver.spec.num_heads
    prompt, drafts = random_tokens(13, 20), random_tokens(14, 3)
    found, aux = [], [AuxStates([0, 2, 4]) for _ in range(2)]
    for number, each in enumerate((driver, other)):
        request = Request(0)
        each.step([Part(request, prompt)])
        saves = [(1, 1), (2, 2), (3, 3)]
        wanted = torch.tensor([2, 0])
        found.append(each.step([Part(request, drafts, saves)], wanted, aux[number]))
    assert distance(found[1], found[0]) < CLOSE
    for layer in (0, 2, 4):
        assert distance(aux[1].found[layer], aux[0].found[layer]) < CLOSE
    for slot in range(4):
        assert_same_state(driver, slot, other.state(slot))


def test_layers_with_a_state_are_not_the_librarys(driver):
    decoder = driver.decoder
    assert not decoder.can_record
    kinds = driver.spec.layer_attention
    pools = [torch.empty(0)] * len(kinds)
    assert decoder.in_library(pools, [0] * len(kinds)) is None
    with pytest.raises(ValueError, match="takes a step's states"):
        decoder.forward(torch.tensor([1]), torch.tensor([0]), driver.attention, [], None)
